"""The schedule that steps run, and this rank's operations of it."""

from __future__ import annotations

from ..config.schedules import ScheduleChoice
from ..schedules import families
from ..schedules.lower import FLUSHED_UPDATE, Op, lower
from ..schedules.schedule import Schedule
from ..schedules.verify import verify

KEPT = 8
"""Programs of schedules that ran before."""


class Programs:
    """Chooses and lowers synchronous schedules with one stage a rank.

    Args:
        choice: of the JSON; gives the first schedule.
        device: number of this rank along its pipeline.
        order: of communication, ``"free"`` or ``"paired"``; see :func:`paceline.schedules.lower.lower`.
    """

    def __init__(self, choice: ScheduleChoice, num_stages: int, device: int, order: str) -> None:
        self._choice, self._num_stages, self._device, self._order = choice, num_stages, device, order
        self._schedule: Schedule | None = None
        self._training: dict[int, tuple[Schedule, tuple[Op, ...]]] = {}
        self._forwards: dict[int, tuple[Op, ...]] = {}

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Schedule of the next step."""
        if self._schedule is None or self._schedule.num_micro_batches != num_micro_batches:
            self._schedule = self._choice.first(self._num_stages, num_micro_batches)
        return self._schedule

    def set(self, schedule: Schedule, num_micro_batches: int) -> None:
        """Run ``schedule`` from the next step on.

        Raises:
            ValueError: it cannot be run: of another shape, incomplete, or with a deadlock.
        """
        is_plain = schedule.num_chunks == 1 and schedule.cells == tuple((rank,) for rank in range(schedule.num_ranks))
        if not is_plain or schedule.num_ranks != self._num_stages:
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.num_ranks} ranks with {schedule.num_chunks} chunks: "
                f"this pipeline has {self._num_stages} stages of one chunk each."
            )
        if schedule.num_micro_batches != num_micro_batches:
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.num_micro_batches} micro-batches and a step "
                f"{num_micro_batches}: make one for these, or change gradient_accumulation_steps."
            )
        proof = verify(schedule)
        if not proof.backward_in_order:
            raise ValueError(
                f"the schedule {schedule.name!r} runs backwards out of order: gradients are added up in the order of "
                "the micro-batches, so that no number depends on the schedule."
            )
        self._schedule = schedule

    def training(self, num_micro_batches: int) -> tuple[Op, ...]:
        """Operations of a training step with a flush."""
        schedule = self.schedule(num_micro_batches)
        kept, program = self._training.get(id(schedule), (None, ()))
        if kept is not schedule:
            if len(self._training) >= KEPT:
                self._training.clear()
            program = (*lower(schedule, order=self._order)[self._device], *FLUSHED_UPDATE)
            self._training[id(schedule)] = schedule, program
        return program

    def forwards(self, num_micro_batches: int) -> tuple[Op, ...]:
        """Operations of an evaluation."""
        if num_micro_batches not in self._forwards:
            if len(self._forwards) >= KEPT:
                self._forwards.clear()
            schedule = families.forward_only(self._num_stages, num_micro_batches)
            self._forwards[num_micro_batches] = lower(schedule, order=self._order)[self._device]
        return self._forwards[num_micro_batches]
