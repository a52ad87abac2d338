"""The partition of a pipeline, which follows its devices: layers move to the stages where a step takes the least."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from ..comm.control import is_shared
from ..planning.candidates import Candidate
from ..planning.choose import TIE
from ..planning.repartition import Layout
from ..planning.shared_devices import Live, actions_of, live_of, step_s, whole_schedule
from ..planning.switching import Decision, SwitchRule
from ..planning.tuning import PARTITION, DecisionRecord, Proposal
from ..schedules.steady import drained_s
from ..schedules.stream import Stream
from ..schedules.variation import varies
from ..supervise.watch import WATCH
from .controller import Agreement
from .migration import Migration
from .movable_layers import Layers
from .pipeline_measurements import PipelineMeasurements
from .schedule_actuator import ScheduleActuator

logger = logging.getLogger("paceline")

REBUILD_S = 0.1
"""Seconds of moving layers beside sending them, before the first were moved."""

LEAST_GAIN = 0.025
"""Layers stay where they are for less than this part of a step: predictions are off by as much."""

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

    def repartition(self, parts: Sequence[int]) -> object:
        """Have the stages hold the items that ``parts`` says. Collective."""


class PartitionChange(NamedTuple):
    """Boundaries, and the schedule to go with them."""

    parts: tuple[int, ...]
    candidate: Candidate


@dataclass(frozen=True)
class _Move:
    """A partition that was considered.

    Args:
        candidate: the schedule to go with ``parts``.
        most_bytes: that any device would send.
    """

    before: tuple[int, ...]
    parts: tuple[int, ...]
    candidate: Candidate
    decision: Decision
    most_bytes: float


class PartitionActuator:
    """Chooses which layers each stage of a pipeline holds, together with the schedule that suits them best.

    Args:
        schedules: of the pipeline; if it proposes a schedule in the same planning, the partition is for that one.
        follows_schedules: whether a partition may bring another schedule with it.
        every: steps between plannings.
        memory_bytes: of each device; None: what the stage has, and what is free.
    """

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
    ) -> None:
        self._pipeline, self._layers = pipeline, layers
        self._measurements, self._schedules, self._agreement = measurements, schedules, agreement
        self._follows_schedules, self._memory_bytes = follows_schedules, memory_bytes
        self._rule = SwitchRule(every)
        self._plannings = 0
        self._refused: dict[tuple[int, ...], int] = {}
        """Boundaries that were refused, and the number of the planning that may try them again."""
        self._warned = False

    def propose(self, steps: int) -> Proposal[PartitionChange, bool] | None:
        """Find the best partition, and decide whether moving layers pays."""
        self._plannings += 1
        if not self._agreement.decides:
            return None
        WATCH.doing("choosing a schedule and a partition")
        move = self._choose(steps)
        if move is None:
            return None
        change = PartitionChange(move.parts, move.candidate) if move.decision.switch else None
        return Proposal(change, partial(self._record, move))

    def apply(self, change: PartitionChange) -> bool:
        """Move layers; whether that was possible. If it was not, the same is not tried again for some time."""
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
        if change.candidate != self._schedules.current:
            self._schedules.apply(change.candidate)
        return True

    def _choose(self, steps: int) -> _Move | None:
        """The best partition, with the schedule that is best for it, against the best schedule of the one that runs."""
        costs, candidate = self._measurements.costs, self._schedules.next
        if not costs.items or candidate.micro_batch_size not in costs.sizes():
            return None
        layout = costs.layout(self._layers.cuts(), self._memory_bytes)
        self._warn_of_memory(layout, candidate)
        now_s = self._step_s(candidate, layout)(layout.parts)
        best_s, parts, best = min(
            (self._best_from(start, layout) for start in self._starts(candidate, layout)), key=lambda found: found[0]
        )
        # Another schedule for the layers as they lie is a matter of the other rule.
        if parts == layout.parts or best_s > now_s * (1 - LEAST_GAIN):
            parts, best, best_s = layout.parts, candidate, now_s
        switch_s = self._switch_s(layout, parts, candidate)
        decision = self._rule.consider(now_s, best_s, switch_s, steps)
        return _Move(layout.parts, parts, best, decision, max(layout.sent_bytes(parts)))

    def _starts(self, candidate: Candidate, layout: Layout) -> list[Candidate]:
        """Schedules to begin a search with: an order made for the layers as they lie suits no other partition."""
        if candidate.made is None or not self._may_choose_schedules(candidate):
            return [candidate]
        others = self._schedules.that_fit(layout, layout.parts, makes=False)
        tried = [(self._step_s(other, layout)(layout.parts), other) for other in others if other.made is None]
        return [candidate, *(other for _, other in sorted(tried, key=_by_seconds)[:1])]

    def _may_choose_schedules(self, candidate: Candidate) -> bool:
        """Where messages vary the schedule is chosen over replays, and no other by a single one here."""
        return self._follows_schedules and not varies(self._measurements.costs.costs(candidate.micro_batch_size))

    def _best_from(self, start: Candidate, layout: Layout) -> tuple[float, tuple[int, ...], Candidate]:
        """Seconds of a step, boundaries and schedule that a search comes to."""
        best = start
        parts, best_s = self._search(layout, start)
        # Another partition may suit another schedule, and that one another partition.
        while self._may_choose_schedules(start):
            tried = [(self._step_s(other, layout)(parts), other) for other in self._schedules.that_fit(layout, parts)]
            seconds, other = min(tried, default=(best_s, best), key=_by_seconds)
            if seconds > best_s * (1 - TIE):
                break
            best = other
            parts, best_s = self._search(layout, best, parts)
        return best_s, parts, best

    def _switch_s(self, layout: Layout, parts: tuple[int, ...], candidate: Candidate) -> float:
        """Seconds of moving layers, by what the last moves took; without a flush, also of finishing the steps that are
        under way and of filling the pipeline again."""
        migrations = self._pipeline.migrations
        rebuild_s = migrations[-1]["rebuild_s"] if migrations else REBUILD_S
        sent = [m["most_bytes"] / m["transfer_s"] for m in migrations if m["most_bytes"] > MUCH]
        costs = self._measurements.costs.costs(candidate.micro_batch_size)
        order = self._schedules.order(candidate)
        drain_s = drained_s(order, costs) if isinstance(order, Stream) else 0.0
        return drain_s + layout.migration_s(costs, parts, rebuild_s, sent[-1] if sent else None)

    def _search(
        self, layout: Layout, candidate: Candidate, known: tuple[int, ...] | None = None
    ) -> tuple[tuple[int, ...], float]:
        order = self._schedules.order(candidate)
        costs = self._measurements.costs.costs(candidate.micro_batch_size)
        refused = frozenset(parts for parts, until in self._refused.items() if self._plannings < until)
        num_actions = actions_of(order)
        return layout.best(costs, self._live(candidate), self._step_s(candidate, layout), num_actions, known, refused)

    def _live(self, candidate: Candidate) -> list[Live]:
        """Live micro-batches of each device."""
        whole = whole_schedule(self._schedules.order(candidate))
        return [live_of(whole, device) for device in range(whole.num_ranks)]

    def _step_s(self, candidate: Candidate, layout: Layout) -> Callable[[tuple[int, ...]], float]:
        """Seconds of a step by its boundaries."""
        order = self._schedules.order(candidate)
        costs = self._measurements.costs.costs(candidate.micro_batch_size)
        return lambda parts: step_s(order, layout.costs(costs, parts))

    def _warn_of_memory(self, layout: Layout, candidate: Candidate) -> None:
        """Say once if even what runs takes more than a partition was allowed to."""
        if self._memory_bytes is None or self._warned:
            return
        costs = self._measurements.costs.costs(candidate.micro_batch_size)
        needed = layout.need_bytes(costs, layout.parts, self._live(candidate))
        over = [s for s, (need, limit) in enumerate(zip(needed, layout.limit_bytes, strict=True)) if need > limit]
        if over:
            self._warned = True
            logger.warning(
                "step %d: with the partition %s, device %d takes %.4g MiB and paceline.pipeline.partition.memory_gib "
                "allows %.4g MiB: layers move only to where all devices keep to it; allow more, or lower the "
                "micro-batch size",
                *(self._pipeline.global_steps, list(layout.parts), over[0]),
                *(needed[over[0]] / 2**20, layout.limit_bytes[over[0]] / 2**20),
            )

    def _record(self, move: _Move, has_moved: bool | None) -> DecisionRecord:
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


def _by_seconds(found: tuple[float, Candidate]) -> tuple[float, tuple[int, int, float, bool, str, str]]:
    return found[0], found[1].key
