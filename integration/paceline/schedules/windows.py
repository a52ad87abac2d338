"""From a stream to what a rank does in a step: its actions with all communication derived.

For transports with a queue for each lane, whose sends do not block (the ``"free"`` order of :mod:`.lower`): a send
follows the compute that makes it, receives are posted in the order in which the other end sends. The receives of a step
are posted in the receiver's own step, since shapes may differ between steps; gradients once the activation is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .lower import (
    APPLY,
    COMPLETE,
    LOAD,
    POST_ACTIVATION,
    POST_GRADIENT,
    RUN_BACKWARD,
    RUN_FORWARD,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WAIT_ACTIVATION,
    WAIT_GRADIENT,
    Op,
)
from .schedule import FORWARD
from .stream import UPDATE, Stream, StreamAction

POSTED_AHEAD = 2
"""Activations of a direction that may arrive before the one that is waited for has been used."""


class StreamProgram:
    """What one rank does in each step of a run.

    Args:
        stream: any whose backwards run in the order of the forwards, on every stage.
        rank: of it.
    """

    def __init__(self, stream: Stream, rank: int) -> None:
        self.stream, self.rank = stream, rank
        routes = stream.routes
        stages = [route.index(rank) for route in routes]
        last = len(routes[0]) - 1
        self._receives = [stage > 0 for stage in stages]
        self._sends = [stage < last for stage in stages]
        self._loads = [stage in (0, last) for stage in stages]
        # Of each chunk, the backward that ends a step: in the stream, steps' last ones come in the steps' order.
        backwards: dict[int, list[StreamAction]] = {}
        for action in stream.windows[rank]:
            if action.kind not in (FORWARD, UPDATE):
                backwards.setdefault(action.chunk, []).append(action)
        self._closing = {max(of_chunk, key=lambda a: (a.lag, of_chunk.index(a))) for of_chunk in backwards.values()}

    def step(self, begun: int) -> list[Op]:
        """The step that has ``begun`` steps before it since the start, or the last drain."""
        return self._lowered(self.stream.window(self.rank, begun))

    def drain(self, begun: int) -> list[Op]:
        """What is left after ``begun`` steps; ``lag`` counts from the last of them."""
        last = begun - 1
        return self._lowered(action._replace(lag=last - step) for step, action in self.stream.drain(self.rank, begun))

    def _lowered(self, actions: Iterable[StreamAction]) -> list[Op]:
        ops: list[Op] = []
        run = list(actions)
        to_post: list[deque[StreamAction]] = [deque() for _ in self._receives]
        for action in run:
            if action.kind == FORWARD and self._receives[action.chunk]:
                to_post[action.chunk].append(action)

        def post(chunk: int, most: int) -> None:
            for _ in range(min(most, len(to_post[chunk]))):
                ops.append(Op(POST_ACTIVATION, *to_post[chunk].popleft()[1:]))

        for chunk in range(len(to_post)):
            post(chunk, POSTED_AHEAD)
        for kind, micro_batch, chunk, lag in run:
            if kind == UPDATE:
                ops.append(Op(APPLY, micro_batch, chunk, lag))
                continue
            if kind == FORWARD:
                before, compute = (WAIT_ACTIVATION, self._receives[chunk]), RUN_FORWARD
                after = [(SEND_ACTIVATION, self._sends[chunk]), (POST_GRADIENT, self._sends[chunk])]
                if self._loads[chunk]:
                    ops.append(Op(LOAD, micro_batch, chunk, lag))
            else:
                before, compute = (WAIT_GRADIENT, self._sends[chunk]), RUN_BACKWARD
                after = [(SEND_GRADIENT, self._receives[chunk])]
                after.append((COMPLETE, self._is_closing(micro_batch, chunk)))
            ops += [
                Op(what, micro_batch, chunk, lag) for what, is_there in (before, (compute, True), *after) if is_there
            ]
            if kind == FORWARD:
                post(chunk, 1)
        return ops

    def _is_closing(self, micro_batch: int, chunk: int) -> bool:
        return any(a.chunk == chunk and a.micro_batch == micro_batch for a in self._closing)
