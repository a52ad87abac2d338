"""The one loop: measure, predict, choose, switch. It changes the schedule of a pipeline, and where its layers lie.

Every ``retune_every`` (schedule) or ``repartition_every`` (partition) steps all ranks put together what they saw, the
first rank decides, and all of them apply its decision before the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..comm.control import is_shared
from ..config.partitions import PartitionChoice
from ..config.schedules import ScheduleChoice
from ..planning.candidates import SLACKS, Candidate, candidates
from ..planning.choose import TIE, Choice, Planner
from ..planning.repartition import Layout
from ..planning.switching import Decision, SwitchRule
from ..schedules.schedule import Schedule
from ..schedules.simulate import simulate
from ..schedules.verify import verify
from ..supervise.watch import EVERYONE, WATCH
from .measured_costs import Knowledge
from .rank_reports import LayerReport, Report, gather_reports
from .tracer import is_drawn, record_step

logger = logging.getLogger("paceline")

SETTLING_STEPS = 2
"""Steps before anything is measured: connections, caches and allocators find their sizes."""

MEASURING_STEPS = 2
"""Steps with a micro-batch size before its times count."""

FEW = 512
"""Up to so many stages times micro-batches times sizes every warm-up is tried: a replay grows with all three."""

SWITCH_S = 0.01
"""A switch before the first was timed."""

REBUILD_S = 0.1
"""What moving layers takes beside sending them, before the first were moved."""

LEAST_GAIN = 0.025
"""Layers stay where they are for less than this part of a step: it is within what predictions are off by."""

REFUSED_PERIODS = 10
"""Looks until a partition that could not be is thought of again: memory may be free by then."""

KEPT_DECISIONS = 1024
"""And looks."""

MUCH = 1 << 20
"""A rank that sent so many bytes tells how fast layers can be sent."""


@dataclass
class Controller:
    """Chooses schedule and partition of one engine. Every rank has one, and calls :meth:`before_step` before each step.

    Args:
        engine: a :class:`~paceline.runtime.engine.PacelineEngine`.
        choice: of the schedule; if it is not ``"adaptive"``, the schedule stays.
        partition: None, or one without ``repartition_every``: the layers stay.
    """

    engine: Any
    choice: ScheduleChoice
    partition: PartitionChoice | None = None
    knowledge: Knowledge = field(init=False)
    current: Candidate = field(init=False)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """On the first rank, the decisions since somebody took them out; the last :data:`KEPT_DECISIONS`."""
    looks: list[dict[str, Any]] = field(default_factory=list)
    """Likewise, what was measured of stages and links at each look."""
    records_switches: bool = False
    """Whether the last step before each switch, and that before the look after it, are recorded as a tracer's are."""
    _reports: list[Report] = field(default_factory=list)
    """On the first rank, of all ranks at the last look."""
    _has_switched: bool = False
    """At the last look."""
    _steps: int = 0
    _last_look: dict[str, int] = field(default_factory=dict)
    _switch_s: float = SWITCH_S
    _after: dict[str, int] = field(default_factory=dict)
    _refused: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Boundaries that did not fit or could not be, and until when they are not tried."""
    _time_at: int = SETTLING_STEPS - 1
    _is_timing: bool = False
    _layers: dict[int, LayerReport] = field(default_factory=dict)
    """Of this rank, until its next look; a tracer may gather reports in between, and would take them away."""
    _told_of_memory: bool = False

    def __post_init__(self) -> None:
        engine = self.engine
        self.configured = int(engine.micro_batch_size)
        self.current = Candidate(self.configured)
        self.knowledge = Knowledge(engine.num_stages)
        self._every: dict[str, int] = {}
        others = []
        if self.choice.type == "adaptive":
            self._every["schedule"] = self.choice.retune_every or 1
            others = [size for size in self.choice.micro_batch_sizes or () if size != self.configured]
        if self.partition is not None and self.partition.repartition_every and engine.num_stages > 1:
            self._every["partition"] = self.partition.repartition_every
        self.knowledge.parts = tuple(engine.module.parts)
        self.rules = {what: SwitchRule(every) for what, every in self._every.items()}
        self._to_measure = [self.configured, *sorted(others)]
        self._planner: Planner | None = None

    # -- the loop ------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Look, decide and switch, if it is time to. Collective.

        Raises:
            RuntimeError: a rank was lost.
        """
        self._steps += 1
        done = self._steps - 1
        # One step tells what each layer is of its stage; what it costs to look so closely is not to count.
        if self._is_timing:
            self._layers = self.engine.meter.stop_timing_layers(self.engine.layers, self.engine.cut)
            self._is_timing = False
            self.engine.meter.recorder.forget()
        if done >= SETTLING_STEPS:
            if self._to_measure:
                self._measure(done - SETTLING_STEPS)
            elif due := {what for what, every in self._every.items() if done - self._last_look[what] >= every}:
                self._look(done, due)
        if "partition" in self._every and done == self._time_at:
            self.engine.meter.time_layers(self.engine.layers)
            self._is_timing = True

    def _measure(self, done: int) -> None:
        """One micro-batch size after the other runs as 1F1B for a few steps; then comes the first look."""
        turn, step = divmod(done, MEASURING_STEPS)
        if turn == 0 or step > 0:
            return
        if turn == len(self._to_measure):
            self._to_measure = []
            self._look(self._steps - 1, set(self._every))
            return
        self._see()
        size = self._to_measure[turn]
        fits = self._agree(self._would_fit(size))
        if fits:
            self._apply(Candidate(size))
        else:
            self._to_measure.remove(size)
            self._measure(done)

    def _would_fit(self, size: int) -> bool:
        """Whether 1F1B of an unmeasured size fits, if memory grows with the samples."""
        knowledge, (known, *_) = self.knowledge, self._to_measure
        if known not in knowledge.saved_bytes:
            return size < known
        stages = range(self.engine.num_stages)
        return all(
            knowledge.saved_bytes[known][s] * size / known * (self.engine.num_stages - s) <= knowledge.room_bytes[s]
            for s in stages
        )

    def _look(self, done: int, due: set[str]) -> None:
        self._see()
        steps = {what: done - self._last_look.get(what, 0) for what in due}
        self._last_look |= dict.fromkeys(due, done)
        choice: Choice | None = None
        move: _Move | None = None
        if self._decides:
            WATCH.doing("choosing a schedule and a partition")
            choice = self._choose(steps["schedule"]) if "schedule" in due else None
            move = self._choose_parts(choice, steps["partition"]) if "partition" in due else None
        chosen = self.current if choice is None else choice.next
        parts, instead = (None, chosen) if move is None or not move.decision.switch else (move.parts, move.candidate)
        # A step that was to be timed may have failed; and layers that have moved tell what was guessed of devices.
        is_unknown = not self.knowledge.items or (bool(self.knowledge.guessed) and parts is not None)
        chosen, parts, instead, is_unknown = self._agree((chosen, parts, instead, is_unknown))
        if is_unknown:
            self._time_at = done + 1
        self._record(switches=parts is not None or chosen != self.current)
        if parts is not None and self._has_moved(parts, done):
            chosen = instead
        begun = time.perf_counter()
        if chosen != self.current:
            self._apply(chosen)
            self._switch_s = time.perf_counter() - begun
        if choice is not None:
            self._tell(choice)
        if move is not None:
            self._tell_of_move(move)

    def _record(self, *, switches: bool) -> None:
        """Before anything is switched: what was measured, and a step to compare with those after the switch."""
        if not self._decides:
            return
        engine, size = self.engine, self.current.micro_batch_size
        if size in self.knowledge.sizes():
            costs = self.knowledge.costs(size).to_dict()
            self.looks.append(
                {"step": engine.global_steps, "micro_batch_size": size, "partition": list(self.knowledge.parts)}
                | {"measured_s": self.knowledge.measured_s, "room_bytes": list(self.knowledge.room_bytes), **costs}
            )
            del self.looks[:-KEPT_DECISIONS]
            if (
                self.records_switches
                and (switches or self._has_switched)
                and is_drawn(engine)
                and all(report.steps for report in self._reports)
            ):
                record_step(engine, self._reports, self.knowledge)
        self._has_switched, self._reports = switches, []

    def _has_moved(self, parts: tuple[int, ...], done: int) -> bool:
        """Move layers; whether that was possible. If it was not, the same is not tried again for some time."""
        try:
            self.engine.repartition(parts)
        except Exception as error:
            if not is_shared(error):
                raise
            self._refused[parts] = done + REFUSED_PERIODS * self._every["partition"]
            if self._decides:
                logger.warning("step %d: layers stay where they are: %s", self.engine.global_steps, error)
            return False
        return True

    def _choose(self, steps: int) -> Choice | None:
        knowledge = self.knowledge
        sizes = [size for size in knowledge.sizes() if size in knowledge.saved_bytes]
        if self.current.micro_batch_size not in knowledge.sizes():
            return None
        samples = self.configured * self.engine.micro_batches
        found = candidates(
            self.engine.num_stages,
            samples,
            sizes,
            knowledge.saved_bytes,
            knowledge.room_bytes,
            configured=self.configured,
            slacks=SLACKS if len(sizes) * self.engine.num_stages * self.engine.micro_batches <= FEW else (0.0, 1.0),
        )
        if self._planner is None or (self._planner.candidates, self._planner.samples) != (found, samples):
            self._planner = Planner(found, self.engine.num_stages, samples)
        costs = {size: knowledge.costs(size) for size in knowledge.sizes()}
        # What no longer fits, or turned out not to, is left for what needs the least, whatever that costs.
        running = self.current
        if running != Candidate(self.configured) and not self._fits(running, samples):
            logger.warning("step %d: %s does not fit in memory as measured now", self.engine.global_steps, running.name)
            running = Candidate(self.configured)
        return self._planner.choose(costs, running, self.rules["schedule"], switch_s=self._switch_s, steps=steps)

    def _choose_parts(self, choice: Choice | None, steps: int) -> _Move | None:
        """The best partition, with the schedule that is best for it, against the best schedule of the one that runs."""
        knowledge, candidate = self.knowledge, self.current if choice is None else choice.next
        if not knowledge.items or candidate.micro_batch_size not in knowledge.sizes():
            return None
        assert self.partition is not None
        layout = knowledge.layout(self.engine.layers.cuts(), self.partition.memory_bytes)
        self._tell_of_memory(layout, candidate)
        now_s = self._step_s(candidate, layout)(layout.parts)
        parts, best_s = self._search(layout, candidate)
        best = candidate
        while "schedule" in self._every:  # another partition may have a best schedule of its own, and that another one
            tried = [(self._step_s(other, layout)(parts), other) for other in self._planned(layout, parts)]
            seconds, other = min(tried, default=(best_s, best))
            if seconds > best_s * (1 - TIE):
                break
            best = other
            parts, best_s = self._search(layout, best, parts)
        # Another schedule for the layers as they lie is a matter of the other rule.
        if parts == layout.parts or best_s > now_s * (1 - LEAST_GAIN):
            parts, best, best_s = layout.parts, candidate, now_s
        migrations = self.engine.migrations
        rebuild_s = migrations[-1]["rebuild_s"] if migrations else REBUILD_S
        sent = [m["most_bytes"] / m["transfer_s"] for m in migrations if m["most_bytes"] > MUCH]
        costs = knowledge.costs(candidate.micro_batch_size)
        switch_s = layout.migration_s(costs, parts, rebuild_s, sent[-1] if sent else None)
        decision = self.rules["partition"].consider(now_s, best_s, switch_s, steps)
        return _Move(layout.parts, parts, best, decision, max(layout.sent_bytes(parts)))

    def _search(
        self, layout: Layout, candidate: Candidate, known: tuple[int, ...] | None = None
    ) -> tuple[tuple[int, ...], float]:
        schedule = self._schedule(candidate)
        costs = self.knowledge.costs(candidate.micro_batch_size)
        peaks = verify(schedule).peak_activations
        num_actions = 2 * schedule.num_stages * schedule.num_micro_batches
        refused = frozenset(parts for parts, until in self._refused.items() if self._steps <= until)
        return layout.best(costs, peaks, self._step_s(candidate, layout), num_actions, known, refused)

    def _planned(self, layout: Layout, parts: tuple[int, ...]) -> Iterable[Candidate]:
        """Schedules that fit with other boundaries."""
        if self._planner is None:
            return
        for other in self._planner.candidates:
            if other.micro_batch_size in self.knowledge.sizes():
                peaks = other.peak_activations(self.engine.num_stages, self._planner.samples)
                if layout.fits(self.knowledge.costs(other.micro_batch_size), parts, peaks):
                    yield other

    def _step_s(self, candidate: Candidate, layout: Layout) -> Callable[[tuple[int, ...]], float]:
        """Seconds of a step by its boundaries."""
        schedule, costs = self._schedule(candidate), self.knowledge.costs(candidate.micro_batch_size)
        return lambda parts: simulate(schedule, layout.costs(costs, parts)).makespan_s

    def _schedule(self, candidate: Candidate) -> Schedule:
        if self._planner is not None:
            return self._planner.schedule(candidate)
        schedule: Schedule = self.engine.schedule  # it stays what it is
        return schedule

    def _fits(self, candidate: Candidate, samples: int) -> bool:
        """Whether a candidate whose size was measured stays within the room that there is now."""
        saved, room = self.knowledge.saved_bytes.get(candidate.micro_batch_size), self.knowledge.room_bytes
        peaks = candidate.peak_activations(self.engine.num_stages, samples)
        return saved is None or all(p * each <= r for p, each, r in zip(peaks, saved, room, strict=True))

    # -- its parts -----------------------------------------------------------------------------------------------

    @property
    def _decides(self) -> bool:
        return bool(self.engine.global_rank == 0)

    def _see(self) -> None:
        parts = tuple(self.engine.module.parts)
        if parts != self.knowledge.parts:
            self.knowledge.has_moved(parts)
        WATCH.doing("comparing the last steps", EVERYONE)
        self.engine.meter.layer_reports, self._layers = self._layers, {}
        reports = gather_reports(self.engine, self._after, self.choice.memory_bytes)
        self.engine.meter.recorder.forget()
        if self._decides:
            self.knowledge.update(reports)
            self._reports = reports

    def _agree(self, value: Any) -> Any:
        """The first rank's value, on all."""
        WATCH.doing("agreeing on a schedule and a partition", EVERYONE)
        return self.engine.control.from_first(value)

    def _apply(self, candidate: Candidate) -> None:
        self.current = candidate
        self.engine.run_candidate(candidate)

    def _note(self, decision: dict[str, Any]) -> None:
        self.decisions.append(decision)
        del self.decisions[:-KEPT_DECISIONS]

    def _tell(self, choice: Choice) -> None:
        decision = choice.decision
        seconds = {prediction.candidate.name: prediction.step_s for prediction in choice.predictions}
        self._note(
            {
                "what": "schedule",
                "step": self.engine.global_steps,
                "switched": decision.switch,
                "from": choice.current.name,
                "to": choice.next.name,
                "why": decision.why,
                "predicted_now_s": decision.now_s,
                "predicted_best_s": decision.best_s,
                "measured_s": self.knowledge.measured_s,
                "switch_s": decision.switch_s,
                "predicted_s": seconds,
            }
        )
        level = logging.INFO if decision.switch else logging.DEBUG
        logger.log(
            level,
            "step %d: %s -> %s: %s (predicted %.4g s -> %.4g s, measured %.4g s)",
            *(self.engine.global_steps, choice.current.name, choice.next.name, decision.why),
            *(decision.now_s, decision.best_s, self.knowledge.measured_s),
        )

    def _tell_of_memory(self, layout: Layout, candidate: Candidate) -> None:
        """Say once if even what runs takes more than a partition was allowed to."""
        assert self.partition is not None
        if self.partition.memory_bytes is None or self._told_of_memory:
            return
        costs = self.knowledge.costs(candidate.micro_batch_size)
        needed = layout.need_bytes(costs, layout.parts, verify(self._schedule(candidate)).peak_activations)
        over = [s for s, (need, limit) in enumerate(zip(needed, layout.limit_bytes, strict=True)) if need > limit]
        if over:
            self._told_of_memory = True
            logger.warning(
                "step %d: with the partition %s, stage %d takes %.4g MiB and paceline.pipeline.partition.memory_gib "
                "allows %.4g MiB: layers move only to where all stages keep to it; allow more, or lower the "
                "micro-batch size",
                *(self.engine.global_steps, list(layout.parts), over[0]),
                *(needed[over[0]] / 2**20, layout.limit_bytes[over[0]] / 2**20),
            )

    def _tell_of_move(self, move: _Move) -> None:
        decision = move.decision
        has_moved = tuple(self.engine.module.parts) == move.parts
        self._note(
            {
                "what": "partition",
                "step": self.engine.global_steps,
                "switched": decision.switch and has_moved,
                "from": list(move.before),
                "to": list(move.parts),
                "schedule": move.candidate.name,
                "why": decision.why,
                "predicted_now_s": decision.now_s,
                "predicted_best_s": decision.best_s,
                "measured_s": self.knowledge.measured_s,
                "switch_s": decision.switch_s,
                "moved_bytes": move.most_bytes,
                "migration": self.engine.migrations[-1] if decision.switch and has_moved else None,
            }
        )
        level = logging.INFO if decision.switch else logging.DEBUG
        logger.log(
            level,
            "step %d: %s -> %s (%s): %s (predicted %.4g s -> %.4g s, measured %.4g s)",
            *(self.engine.global_steps, list(move.before), list(move.parts), move.candidate.name, decision.why),
            *(decision.now_s, decision.best_s, self.knowledge.measured_s),
        )


@dataclass(frozen=True)
class _Move:
    """What might be done about the partition.

    Args:
        candidate: the schedule to go with ``parts``.
        most_bytes: what the stage sends that sends the most.
    """

    before: tuple[int, ...]
    parts: tuple[int, ...]
    candidate: Candidate
    decision: Decision
    most_bytes: float
