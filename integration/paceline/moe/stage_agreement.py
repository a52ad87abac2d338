"""Agreement of a pipeline's stages on moves of their experts.

Each stage decides about its own experts. What it saves shortens the step only as far as the other stages let it, so
they tell each other how long they compute; and the first rank of the job gets all decisions, for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..comm.control import ControlPlane
from ..planning.rebalance import step_saved_s
from ..planning.tuning import DecisionRecord

Value = TypeVar("Value")


@dataclass
class Stages:
    """The stages of a pipeline of which this rank has one. All ranks of the job call both methods at each planning.

    Args:
        stage: of this rank.
        num_stages: more than one.
        computed_s: seconds that this rank computed in the step that ends now.
        num_micro_batches: of a step.
    """

    stage: int
    num_stages: int
    control: ControlPlane
    computed_s: Callable[[], float]
    num_micro_batches: Callable[[], int]

    def step_saved_s(self, saved_s: float, pays: bool) -> float:
        """By how much the step becomes shorter if this stage saves what it can.

        Args:
            saved_s: of the stage's computing; on the stage's first rank, on others 0.
            pays: whether the stage would move if all of that counted; else the others cannot build on it.
        """
        told = self.control.gather((self.stage, self.computed_s(), saved_s, pays))
        busy, saved = [0.0] * self.num_stages, [0.0] * self.num_stages
        for stage, computed, could_save, would in told:
            busy[stage] = max(busy[stage], computed)
            if would or stage == self.stage:
                saved[stage] = max(saved[stage], could_save)
        return step_saved_s(busy, saved, self.stage, self.num_micro_batches())

    def records(self, own: Sequence[DecisionRecord]) -> list[DecisionRecord]:
        """Gather the decisions of all stages, in their order, on the first rank of the job; nothing elsewhere.

        Args:
            own: of this stage, on its first rank.
        """
        found = self.control.gather_at_first([record.of_stage(self.stage) for record in own])
        return sorted((record for told in found for record in told), key=lambda record: record.stage or 0)


class StageAgreement:
    """The ranks that share the experts of a stage decide together; in a pipeline each stage for itself.

    Args:
        group: of these ranks.
        device: that the group communicates from.
        stages: of a pipeline.
    """

    def __init__(self, group: Any, device: torch.device, stages: Stages | None) -> None:
        self._group, self._device, self._stages = group, device, stages

    @property
    def decides(self) -> bool:
        """Whether this is the first rank of the group."""
        return dist.get_rank(self._group) == 0

    def from_first(self, value: Value) -> Value:
        """The first rank's value. Collective over the group."""
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0, device=self._device)
        return values[0]

    def tell_failure(self, error: Exception) -> None:
        """Nobody is sure to wait: all ranks exchange numbers within a proposal."""

    def records(self, own: Sequence[DecisionRecord]) -> Sequence[DecisionRecord]:
        """Decisions of all stages, on the first rank of the job. Collective over the job."""
        return own if self._stages is None else self._stages.records(own)
