"""The space of parallel strategies: degrees of each kind of parallelism, and the order in which stages compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ..schedules import asynchronous, directions
from ..schedules.asynchronous import MULTIDIRECTION, ONE_DIRECTION
from ..schedules.stream import Stream


class Strategy(NamedTuple):
    """t · p · d devices. Ranks are numbered tensor innermost, then data, then pipeline, as DeepSpeed does.

    Args:
        tensor: t, devices that compute one layer together.
        pipeline: p, stages.
        data: d, replicas of each stage.
        expert: ep, devices among which the experts of a layer are spread; divides d.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int

    @property
    def expert_data(self) -> int:
        """edp, replicas of each expert."""
        return self.data // self.expert

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        """``tp1_pp2_dp2_ep2``."""
        return f"tp{self.tensor}_pp{self.pipeline}_dp{self.data}_ep{self.expert}"


class PipelineSchedule(NamedTuple):
    """The order in which the stages of a pipeline compute: 1F1B, what ``"adaptive"`` chooses, or one without a flush,
    whose gradients are late.

    Args:
        type: as ``paceline.pipeline.schedule.type``.
        directions: P, pipelines over the same devices.
        chunks: stages of the one direction that each device holds.
    """

    type: str = "1f1b"
    directions: int = 1
    chunks: int = 1

    @property
    def suffix(self) -> str:
        """``_multidirection2``, ``_one_direction``, ``_chunks2``; of 1F1B nothing."""
        if self.chunks > 1:
            return f"_chunks{self.chunks}"
        return {MULTIDIRECTION: f"_{self.type}{self.directions}", ONE_DIRECTION: f"_{self.type}"}.get(self.type, "")

    @property
    def flushes(self) -> bool:
        """Whether a step ends before the next begins."""
        return self.type not in asynchronous.STREAMS

    def stream(self, num_stages: int, num_micro_batches: int) -> Stream | None:
        """The order with the fewest micro-batches a step, at most so many, that repeats as the whole step does: without
        a flush micro-batches go on alike from one step to the next. None of 1F1B.

        Raises:
            ValueError: there is none of this shape.
        """
        if self == ONE_F_ONE_B:
            return None
        return asynchronous.make(self.type, num_stages, min(num_micro_batches, num_stages), self.directions)

    def to_dict(self) -> dict[str, str | int]:
        """The section's ``pipeline.schedule``."""
        found: dict[str, str | int] = {"type": self.type}
        if self.type == MULTIDIRECTION:
            found["directions"] = self.directions
        return found | ({"chunks": self.chunks} if self.chunks > 1 else {})


ONE_F_ONE_B = PipelineSchedule()


def late_schedules(strategy: Strategy, types: Collection[str]) -> Iterator[PipelineSchedule]:
    """Schedules of so many stages without a flush. Experts are not spread over ranks with them.

    Args:
        types: keys of :data:`~paceline.schedules.asynchronous.STREAMS` that are allowed.
    """
    if strategy.pipeline == 1 or strategy.expert > 1:
        return
    if ONE_DIRECTION in types:
        yield PipelineSchedule(ONE_DIRECTION)
    if MULTIDIRECTION in types:
        for count in directions.allowed(strategy.pipeline):
            yield PipelineSchedule(MULTIDIRECTION, count)
