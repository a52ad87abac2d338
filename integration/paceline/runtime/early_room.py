"""Activations that have room although they may be computed again: some are kept, the others computed again early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..schedules.lower import RUN_BACKWARD, RUN_BACKWARD_INPUT, RUN_BACKWARD_WEIGHT, RUN_FORWARD, WAIT_GRADIENT, Op

if TYPE_CHECKING:
    from .meter import Meter

Cell: TypeAlias = tuple[int, int]
"""Chunk of this rank, and micro-batch."""

RECOMPUTE_EARLY = "PACELINE_RECOMPUTE_EARLY"
"""Variable of the environment; ``0``: all is computed again within backwards."""

GROWTHS = 4
"""Sizes of a step's largest micro-batch are told apart as far as one needs 2^(1/4) times the memory of another."""

CLOSE = 1e-9
"""Share of a layer that is a rounding error."""

_BACKWARDS = (RUN_BACKWARD, RUN_BACKWARD_INPUT)


class Extent(NamedTuple):
    """Size of a micro-batch, or of the largest of a step."""

    tokens: int
    length: int

    def growth(self, other: Extent) -> float:
        """How many times as much ``other`` keeps at most: some of it grows with the length of each token's context."""
        return other.tokens / self.tokens * max(1.0, other.length / self.length)


class Recomputed(NamedTuple):
    """What the layers of a micro-batch keep that were computed again.

    Args:
        extent: of that micro-batch.
        num_bytes: of all layers together.
        layers: how many they are.
    """

    extent: Extent
    num_bytes: float
    layers: int = 1


class Keeping(NamedTuple):
    """How activations are dealt with in a step.

    Args:
        is_early: those that are computed again are so before the gradient of their micro-batch is there.
        kept: of micro-batches, the first layers that keep theirs from the forward on, so many.
    """

    is_early: bool
    kept: Mapping[Cell, int]


NOTHING = Keeping(False, {})


class EarlyRoom:
    """Decides, step by step, for which activations there is memory.

    Those of a micro-batch that are kept from the forward on need not be computed again. While a rank waits for a
    gradient, it computes again what it has not kept; all of that is there at once then, not one layer after another.
    Nothing depends on it but memory and time, so each rank decides for itself.

    Args:
        room_bytes: what this rank may still take while no micro-batch is alive.
    """

    def __init__(self, meter: Meter, room_bytes: Callable[[], float]) -> None:
        self._meter, self._room_bytes = meter, room_bytes
        self._of_what: object = None
        """Program and measured bytes."""
        self._known: dict[int, Keeping] = {}
        """What was decided for them, by the size of the largest micro-batch."""

    def choose(self, program: Sequence[Op], most: Extent | None) -> Keeping:
        """What a step keeps, of which there is room also for its largest micro-batches.

        Args:
            program: of the step on this rank.
            most: of its micro-batches.
        """
        meter, size = self._meter, self._meter.measures_memory_of
        again = {} if size is None else meter.recomputed_bytes.get(size, {})
        if size is None or not again or most is None or meter.times_single_layers:
            return NOTHING
        growth = max(1.0, *(each.extent.growth(most) for each in again.values()))
        growths = ceil(GROWTHS * log2(growth))
        saved, deferred = meter.saved_bytes.get(size, {}), meter.deferred_bytes.get(size, {})
        of_what = (tuple(program), size, dict(again), dict(saved), dict(deferred))
        if self._of_what != of_what:
            self._of_what, self._known = of_what, {}
        if growths not in self._known:
            room = self._room_bytes() / 2 ** (growths / GROWTHS)
            found = keeping(program, saved, deferred, again, room)
            if found == NOTHING:
                return NOTHING
            self._known[growths] = found
        return self._known[growths]


def keeping(
    program: Sequence[Op],
    saved: Mapping[int, float],
    deferred: Mapping[int, float],
    again: Mapping[int, Recomputed],
    room_bytes: float,
) -> Keeping:
    """As many activations as there is room for at every moment of a step.

    Of those that are alive when there is too little, the ones are given up whose backward comes last.

    Args:
        saved: bytes that a live micro-batch keeps with all layers recomputed, by chunk.
        deferred: the same between its two backwards, where they are split.
        again: what its layers keep where they are not, or no longer, to be recomputed.
    """
    waiting = {(op.chunk, op.micro_batch) for op in program if op.kind == WAIT_GRADIENT}
    kept = _kept(program, saved, deferred, again, room_bytes, waiting)
    if kept is not None:
        return Keeping(bool(waiting) or bool(kept), kept)
    kept = _kept(program, saved, deferred, again, room_bytes, set())
    return Keeping(False, kept) if kept else NOTHING


def _kept(
    program: Sequence[Op],
    saved: Mapping[int, float],
    deferred: Mapping[int, float],
    again: Mapping[int, Recomputed],
    room_bytes: float,
    early: set[Cell],
) -> dict[Cell, int] | None:
    """By micro-batch, the layers that keep their activations, of which there are some.

    Args:
        early: micro-batches whose other layers are all computed again before their backward. None is returned where
            these have no room.
    """
    ends = {(op.chunk, op.micro_batch): n for n, op in enumerate(program) if op.kind in _BACKWARDS}
    layer_bytes = {chunk: each.num_bytes / each.layers for chunk, each in again.items()}
    kept: dict[Cell, int] = {}
    alive: list[Cell] = []
    held = 0.0
    """Bytes of all that is alive."""

    def own_bytes(cell: Cell) -> float:
        return kept.get(cell, 0) * layer_bytes.get(cell[0], 0.0)

    def more_bytes(cell: Cell) -> float:
        """Beside what is alive, while a backward runs."""
        chunk = cell[0]
        if chunk not in again:
            return 0.0
        left = again[chunk].layers - kept.get(cell, 0)
        # Gradients of what is saved anyway, such as logits, are there before any layer is done.
        gradients = saved.get(chunk, 0.0) if kept.get(cell) else 0.0
        return gradients + layer_bytes[chunk] * (left if cell in early else min(left, 1))

    for op in program:
        cell, live = (op.chunk, op.micro_batch), saved.get(op.chunk, 0.0)
        later = deferred.get(op.chunk, live)
        is_backward = op.kind in _BACKWARDS
        if op.kind == RUN_FORWARD:
            alive.append(cell)
            if op.chunk in again and cell in ends:
                kept[cell] = again[op.chunk].layers
            held += live + own_bytes(cell)
        while (over := held + (more_bytes(cell) if is_backward else 0.0) - room_bytes) > 0:
            last = max(filter(own_bytes, alive), key=ends.__getitem__, default=None)
            if last is None:
                if is_backward and cell in early and op.chunk in again:
                    return None
                break
            each = layer_bytes[last[0]]
            given = min(kept[last], max(1, ceil(over / each - CLOSE)))
            kept[last] -= given
            held -= given * each
        if is_backward:
            alive.remove(cell)
            held -= live + own_bytes(cell)
            held += later if op.kind == RUN_BACKWARD_INPUT else 0.0
        elif op.kind == RUN_BACKWARD_WEIGHT:
            held -= later
    return {cell: layers for cell, layers in kept.items() if layers}
