"""The partition of a pipeline, which follows its devices: layers move to the stages where a step takes the least."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ..comm.control import is_shared
from ..planning.candidates import Candidate
from ..planning.partition_search import FoundPartition, PartitionArguments, search_partition
from ..planning.switching import SwitchRule
from ..planning.tuning import PARTITION, DecisionRecord, Proposal
from ..supervise.watch import WATCH
from .controller import Agreement
from .migration import Migration
from .movable_layers import Layers
from .pipeline_measurements import PipelineMeasurements
from .planning_process import Call, PlanningProcess
from .schedule_actuator import ScheduleActuator

logger = logging.getLogger("paceline")

REBUILD_S = 0.1
"""Seconds of moving layers beside sending them, before the first were moved."""

REFUSED_PERIODS = 10
"""Intervals until a partition that was refused is considered again: memory may be free by then."""

MUCH = 1 << 20
"""Bytes, of which so many show how fast layers can be sent."""


class MovesLayers(Protocol):
    """A pipeline whose layers can change stage between steps."""

    @property
    def global_steps(self) -> int: ...

    @property
    def migrations(self) -> Sequence[Migration]:
        """Figures of the last ones."""

    def prepare_repartition(self, parts: Sequence[int]) -> bool:
        """Send ahead what can be of the layers that a later repartition moves, if it pays. Collective."""

    def repartition_is_prepared(self) -> bool:
        """Whether what is sent ahead has arrived everywhere. Collective."""

    def forget_repartition(self) -> None:
        """Let go of layers that were sent ahead. On all ranks."""

    def repartition(self, parts: Sequence[int]) -> object:
        """Have the stages hold the items that ``parts`` says. Collective."""


class PartitionChange(NamedTuple):
    """Boundaries, and the schedule to go with them."""

    parts: tuple[int, ...]
    candidate: Candidate


class PartitionActuator:
    """Chooses which layers each stage of a pipeline holds, together with the schedule that suits them best.

    Args:
        schedules: of the pipeline; if it proposes a schedule in the same planning, the partition is for that one.
        follows_schedules: whether a partition may bring another schedule with it.
        every: steps between plannings.
        memory_bytes: of each device; None: what the stage has, and what is free.
        process: searches beside steps where that takes long; None: it is always done between two of them.
    """

    _begun: Call[FoundPartition | None] | None
    """On the rank that decides, a search in another process, until it is proposed."""

    def __init__(
        self,
        pipeline: MovesLayers,
        layers: Layers,
        measurements: PipelineMeasurements,
        schedules: ScheduleActuator,
        agreement: Agreement,
        every: int,
        *,
        follows_schedules: bool,
        memory_bytes: int | None = None,
        process: PlanningProcess | None = None,
    ) -> None:
        self._process, self._begun, self._is_first = process, None, True
        self._pipeline, self._layers = pipeline, layers
        self._measurements, self._schedules, self._agreement = measurements, schedules, agreement
        self._follows_schedules, self._memory_bytes = follows_schedules, memory_bytes
        self._rule = SwitchRule(every)
        self._plannings = 0
        self._planned_for: tuple[int, ...] = ()
        """Boundaries when the last planning began."""
        self._refused: dict[tuple[int, ...], int] = {}
        """Boundaries that were refused, and the number of the planning that may try them again."""
        self._warned = False

    def begin(self, steps: int) -> bool:
        """Have the planning process search, if that takes long enough to be in the way of a step.

        The first search is made at once, as is one that waits for a schedule which is chosen at once.
        """
        first, self._is_first = self._is_first, False
        self._begun, self._planned_for = None, tuple(self._layers.parts)
        if first or self._schedules.is_at_once or not self._schedules.plans_aside:
            return False
        if self._process is not None and self._agreement.decides:
            arguments, schedule = self._question(steps), self._schedules.begun
            if arguments is not None:
                search = partial(search_partition, arguments)
                begun = self._process.begin(search) if schedule is None else self._process.begin_after(schedule, search)
                self._begun = begun
        return True

    def propose(self, steps: int) -> Proposal[PartitionChange, bool] | None:
        """Find the best partition, and decide whether moving layers pays."""
        self._plannings += 1
        if not self._agreement.decides or self._schedules.shares_change:
            return None
        WATCH.doing("choosing a schedule and a partition")
        found = self._found(steps)
        if found is None:
            return None
        self._rule, self._schedules.num_made = found.rule, found.num_made
        self._warn_of_memory(found)
        change = PartitionChange(found.parts, found.candidate) if found.decision.switch else None
        return Proposal(change, partial(self._record, found))

    def prepare(self, change: PartitionChange | None) -> bool:
        """Begin to send layers, if much of them can be sent before they move."""
        if change is None or self._have_moved:
            return False
        try:
            is_begun = self._pipeline.prepare_repartition(change.parts)
        except Exception as error:
            if not is_shared(error):
                raise
            return False  # moving them will say so again
        if is_begun:
            self._measurements.disturb()
        return is_begun

    def is_prepared(self) -> bool:
        """Whether all that :meth:`prepare` sends has arrived."""
        if self._pipeline.repartition_is_prepared():
            return True
        self._measurements.disturb()
        return False

    def forget_prepared(self) -> None:
        """Let go of what :meth:`prepare` has sent."""
        self._pipeline.forget_repartition()

    def apply(self, change: PartitionChange) -> bool:
        """Move layers; whether that was possible. If it was not, the same is not tried again for some time.

        Where somebody has moved layers since the planning began, they stay until the next one.
        """
        if self._have_moved:
            return False
        if self._measurements.guesses:
            self._measurements.time_layers_again()
        try:
            self._pipeline.repartition(change.parts)
        except Exception as error:
            if not is_shared(error):
                raise
            self._refused[change.parts] = self._plannings + REFUSED_PERIODS
            if self._agreement.decides:
                logger.warning("step %d: layers stay where they are: %s", self._pipeline.global_steps, error)
            return False
        self._measurements.disturb()
        if change.candidate != self._schedules.current:
            self._schedules.apply(change.candidate)
        return True

    @property
    def _have_moved(self) -> bool:
        return tuple(self._layers.parts) != self._planned_for

    def _found(self, steps: int) -> FoundPartition | None:
        begun, self._begun = self._begun, None
        if begun is not None and self._process is not None:
            return self._process.result(begun)
        arguments = self._question(steps)
        return None if arguments is None else search_partition(arguments)

    def _question(self, steps: int) -> PartitionArguments | None:
        """Everything that the choice depends on; None before layers were timed."""
        costs, migrations = self._measurements.costs, self._pipeline.migrations
        if not costs.items:
            return None
        sent = [m["paused_bytes"] / m["transfer_s"] for m in migrations if m["paused_bytes"] > MUCH]
        return PartitionArguments(
            layout=costs.layout(self._layers.cuts(), self._memory_bytes),
            measured=self._schedules.measured(),
            options=self._schedules.options,
            schedules=self._schedules.for_partitions(),
            follows_schedules=self._follows_schedules,
            refused=frozenset(parts for parts, until in self._refused.items() if self._plannings < until),
            rule=self._rule,
            rebuild_s=migrations[-1]["rebuild_s"] if migrations else REBUILD_S,
            sent_per_s=sent[-1] if sent else None,
            steps=steps,
        )

    def _warn_of_memory(self, found: FoundPartition) -> None:
        """Say once if even what runs takes more than a partition was allowed to."""
        if self._memory_bytes is not None and found.over is not None and not self._warned:
            self._warned = True
            device, need, limit = found.over
            logger.warning(
                "step %d: with the partition %s, device %d takes %.4g MiB and paceline.pipeline.partition.memory_gib "
                "allows %.4g MiB: layers move only to where all devices keep to it; allow more, or lower the "
                "micro-batch size",
                *(self._pipeline.global_steps, list(found.before), device, need / 2**20, limit / 2**20),
            )

    def _record(self, move: FoundPartition, has_moved: bool | None) -> DecisionRecord:
        decision, step, measured_s = move.decision, self._pipeline.global_steps, self._measurements.costs.measured_s
        logger.log(
            logging.INFO if decision.switch else logging.DEBUG,
            "step %d: %s -> %s (%s): %s (predicted %.4g s -> %.4g s, measured %.4g s)",
            *(step, list(move.before), list(move.parts), move.candidate.name, decision.why),
            *(decision.now_s, decision.best_s, measured_s),
        )
        figures = {
            "from": list(move.before),
            "to": list(move.parts),
            "schedule": move.candidate.name,
            "measured_s": measured_s,
            "moved_bytes": move.most_bytes,
            "migration": self._pipeline.migrations[-1] if has_moved else None,
        }
        return DecisionRecord(PARTITION, step, bool(has_moved), decision, decision.best_s, figures)
