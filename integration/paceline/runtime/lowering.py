"""A lowered program as DeepSpeed's pipeline engine takes it: a :class:`PipeSchedule` of :class:`PipeInstruction`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from ..schedules.lower import (
    LOAD,
    POST_ACTIVATION,
    POST_GRADIENT,
    RUN_BACKWARD,
    RUN_FORWARD,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WAIT_ACTIVATION,
    WAIT_GRADIENT,
    lower,
    num_buffers,
)
from ..schedules.schedule import Schedule


class PostActivation(BufferOpInstruction):
    """Make room for an activation that is to come, so that it can arrive while the stage computes."""


class PostGrad(BufferOpInstruction):
    """The same for a gradient."""


INSTRUCTIONS: dict[str, type[PipeInstruction]] = {
    LOAD: LoadMicroBatch,
    POST_ACTIVATION: PostActivation,
    WAIT_ACTIVATION: RecvActivation,
    RUN_FORWARD: ForwardPass,
    SEND_ACTIVATION: SendActivation,
    POST_GRADIENT: PostGrad,
    WAIT_GRADIENT: RecvGrad,
    RUN_BACKWARD: BackwardPass,
    SEND_GRADIENT: SendGrad,
}


class LoweredSchedule(PipeSchedule):
    """One stage's share of a schedule, with its communication.

    Every instruction has a ``buffer_id`` and the number of its ``micro_batch``.

    Args:
        order: of communication, ``"free"`` or ``"paired"``; see :func:`paceline.schedules.lower.lower`.
        trains: end with the reduction of gradients and the optimizer's step.
    """

    def __init__(self, schedule: Schedule, stage_id: int, *, order: str, trains: bool) -> None:
        super().__init__(schedule.num_micro_batches, schedule.num_stages, stage_id)
        self.schedule = schedule
        self.bound: list[Any] | None = None
        """What runs each instruction, once an engine has looked."""
        program = lower(schedule, order=order)[stage_id]
        self._num_buffers = num_buffers(program)
        self._instructions = [INSTRUCTIONS[op.kind](buffer_id=op.buffer, micro_batch=op.micro_batch) for op in program]
        if trains:
            self._instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        return self._num_buffers

    def steps(self) -> Iterator[list[Any]]:
        for instruction in self._instructions:
            yield [instruction]
