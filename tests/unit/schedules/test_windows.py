"""What a rank does in a step of a stream: its actions with communication, and where a step's gradients are complete."""

from __future__ import annotations

import pytest

from paceline.schedules.asynchronous import multidirection, one_direction
from paceline.schedules.lower import APPLY, COMPLETE, RUN_BACKWARD, RUN_FORWARD
from paceline.schedules.stream import UPDATE, Stream
from paceline.schedules.windows import StreamProgram

STREAMS = [multidirection(2, 4), multidirection(4, 8), multidirection(6, 6), one_direction(4, 2), one_direction(3, 4)]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.name}-{stream.num_ranks}")
def test_a_stage_closes_once_a_step_after_its_last_backward(stream: Stream) -> None:
    for rank in range(stream.num_ranks):
        program = StreamProgram(stream, rank)
        num_steps = stream.most_lag + 3
        ops = [(step - op.lag, op) for step in range(num_steps) for op in program.step(step)]
        ops += [(num_steps - 1 - op.lag, op) for op in program.drain(num_steps)]
        for step in range(num_steps):
            own = [op for of, op in ops if of == step]
            for chunk in range(stream.num_chunks):
                kinds = [op.kind for op in own if op.chunk == chunk]
                assert kinds.count(COMPLETE) == 1
                assert RUN_BACKWARD not in kinds[kinds.index(COMPLETE) :]
            assert [op.kind for op in own].count(APPLY) == 1
            assert [op.kind for op in own][-1] == APPLY  # of gradients that are complete


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.name}-{stream.num_ranks}")
def test_computing_is_in_the_order_of_the_stream(stream: Stream) -> None:
    kinds = {RUN_FORWARD: "F", RUN_BACKWARD: "B", APPLY: UPDATE}
    for rank in range(stream.num_ranks):
        begun = stream.most_lag + 1
        found = [(kinds[op.kind], *op[1:]) for op in StreamProgram(stream, rank).step(begun) if op.kind in kinds]
        assert found == [tuple(action) for action in stream.windows[rank]]
