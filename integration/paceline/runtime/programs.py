"""The schedule that steps run, and this rank's operations of it."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.schedules import ScheduleChoice
from ..schedules import families
from ..schedules.directions import chunks_of
from ..schedules.lower import FLUSHED_UPDATE, Op, lower
from ..schedules.schedule import Schedule
from ..schedules.verify import verify

KEPT = 8
"""Programs of schedules that ran before."""


class Programs:
    """Chooses and lowers schedules with a flush.

    Args:
        choice: of the JSON; gives the first schedule.
        routes: device of each stage, one route a direction.
        device: number of this rank along its pipeline.
        order: of communication, ``"free"`` or ``"paired"``; see :func:`paceline.schedules.lower.lower`.
    """

    def __init__(self, choice: ScheduleChoice, routes: Sequence[Sequence[int]], device: int, order: str) -> None:
        self._choice, self._routes, self._device, self._order = choice, routes, device, order
        self._num_devices = max(routes[0]) + 1
        self._schedule: Schedule | None = None
        self._training: dict[int, tuple[Schedule, tuple[Op, ...]]] = {}
        self._forwards: dict[int, tuple[Op, ...]] = {}

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Schedule of the next step."""
        if self._schedule is None or self._schedule.num_micro_batches != num_micro_batches:
            self._schedule = self._choice.first(self._num_devices, num_micro_batches)
        return self._schedule

    def set(self, schedule: Schedule, num_micro_batches: int) -> None:
        """Run ``schedule`` from the next step on.

        Raises:
            ValueError: it cannot be run: of another shape, incomplete, or with a deadlock.
        """
        held = [chunks_of(device, self._routes) for device in range(self._num_devices)]
        wanted = tuple(tuple(way * schedule.num_stages + stage for way, stage in chunks) for chunks in held)
        if schedule.num_stages != len(self._routes[0]) or schedule.cells != wanted:
            own = [[stage for _, stage in chunks] for chunks in held]
            here = "stages of one chunk each" if max(map(len, own)) == 1 else f"ranks with the stages {own}"
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.num_ranks} ranks with {schedule.num_chunks} chunks: "
                f"this pipeline has {self._num_devices} {here}."
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
            schedule = families.forward_only(self._num_devices, num_micro_batches, self._routes[0])
            self._forwards[num_micro_batches] = lower(schedule, order=self._order)[self._device]
        return self._forwards[num_micro_batches]
