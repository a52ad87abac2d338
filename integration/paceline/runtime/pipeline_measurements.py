"""Costs of a pipeline's steps, measured while it trains, for plannings of its schedule and partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ..comm.control import ControlPlane, PeerError
from ..planning.candidates import Candidate
from ..planning.rebalance import Uneven
from ..planning.tuning import DecisionLog, DecisionRecord
from ..schedules.variation import without_variation
from ..supervise.watch import EVERYONE, WATCH
from .controller import Agreement
from .measured_costs import MeasuredCosts
from .meter import Meter
from .movable_layers import Layers
from .rank_reports import LaneKey, LayerReport, Report, ReportGatherer
from .schedule_actuator import RunsSchedules
from .tracer import TimelineWriter

SETTLING_STEPS = 2
"""Steps before anything is measured: connections, caches and allocators find their sizes."""

MEASURING_STEPS = 2
"""Steps with a micro-batch size before its times count."""

Value = TypeVar("Value")


class _Failed(NamedTuple):
    """The first rank's error, where a value was to come."""

    error: str


class JobAgreement:
    """All ranks of the job decide as the first one does, which proposes by itself."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    @property
    def decides(self) -> bool:
        return self._control.rank == 0

    def from_first(self, value: Value) -> Value:
        WATCH.doing("agreeing on a schedule and a partition", EVERYONE)
        found: Value | _Failed = self._control.from_first(value)
        if isinstance(found, _Failed):
            raise PeerError(f"rank 0 failed while choosing a schedule and a partition: {found.error}")
        return found

    def tell_failure(self, error: Exception) -> None:
        """The others wait for what the first rank proposes."""
        if self.decides:
            self._control.from_first(_Failed(f"{type(error).__name__}: {error}"))

    def records(self, own: Sequence[DecisionRecord]) -> Sequence[DecisionRecord]:
        """The first rank has them all."""
        return own


class PipelineMeasurements:
    """Gathers times, links and memory of a pipeline's ranks, of each micro-batch size and layer that may be chosen.

    Args:
        costs: to be kept up to date on the first rank; elsewhere they know the boundaries only.
        try_size: runs a candidate from the next step on.
        trials: to run before the first planning: what already runs, and others that are to be measured.
        times_layers: whether to time each layer by itself, in one step.
        memory_bytes: that activations may take; None: what devices have free.
        timelines: gets the last step before each switch, and the last of the interval after it, if it records them.
        uneven_experts: seconds of a step that layers of this rank take longer because their experts are not evenly
            busy, by the names of these; None: not known yet.
    """

    def __init__(
        self,
        pipeline: RunsSchedules,
        costs: MeasuredCosts,
        try_size: Callable[[Candidate], None],
        layers: Layers,
        meter: Meter,
        reports: ReportGatherer,
        agreement: Agreement,
        log: DecisionLog,
        timelines: TimelineWriter,
        *,
        trials: Sequence[Candidate],
        times_layers: bool = False,
        memory_bytes: int | None = None,
        uneven_experts: Callable[[], Mapping[str, Uneven] | None] = dict,
    ) -> None:
        self._uneven_experts = uneven_experts
        self._pipeline, self._layers, self._meter, self._gatherer = pipeline, layers, meter, reports
        self._agreement, self._log, self._timelines = agreement, log, timelines
        self._times_layers, self._memory_bytes = times_layers, memory_bytes
        self.costs, self._try = costs, try_size
        self.guesses = False
        """Whether, on all ranks, layers that have moved would tell more about the devices."""
        self._untried = list(trials)
        """They run for a few steps each before the first planning; none after it."""
        self._time_at = SETTLING_STEPS - 1
        self._is_timing = False
        self._timed: dict[int, LayerReport] = {}
        """Layers of this rank, until reports are gathered."""
        self.reports: Sequence[Report] = []
        """On the first rank, of all ranks, from :meth:`gather` to :meth:`before_switch`."""
        self._reported = 0
        """Steps that were done when they were gathered: a planning may go on beside further steps."""
        self._has_switched = False
        """At the last planning."""
        self._disturbed: set[int] = set()
        """Steps, by number, beside which layers or experts move."""
        self._num_left_out = 0
        """Steps so far that count for nothing."""
        self._num_measured = 0
        """Steps since the last :meth:`gather` that count."""
        self._done = 0
        self._after: dict[LaneKey, int] = {}

    # -- called by the loop --------------------------------------------------------------------------------------

    def end_step(self, done: int) -> None:
        """Take the times of layers. A step that was observed so closely does not count otherwise."""
        self._done = done
        self._num_measured += 1
        if self._is_timing:
            self._timed = self._meter.stop_timing_layers(self._layers, self._pipeline.cut)
            self._is_timing = False
            self._forget_steps()
        if done in self._disturbed:
            self._num_left_out += 1
            self._forget_steps()
            self._gatherer.skip_messages(self._after)
        self._disturbed = {number for number in self._disturbed if number > done}

    def is_complete(self, done: int) -> bool:
        """Whether everything that was to be tried and fits was measured; if not, have the next run. Collective.

        Without a step that counts since the last planning, there is nothing to plan by but what was known then.
        """
        is_measured = self._num_measured > 0
        turn, step = divmod(done - self._num_left_out - SETTLING_STEPS, MEASURING_STEPS)
        while self._untried:
            if turn < 1 or step > 0:
                return False
            if turn == len(self._untried):
                self._untried = []
                break
            self.gather()
            trial = self._untried[turn]
            if self._agreement.from_first(self._would_fit(trial)):
                self._try(trial)
                return False
            self._untried.remove(trial)
        # Where layers move, what experts add to them is part of that; all ranks know it from the same step on.
        return is_measured and (not self._times_layers or self._uneven_experts() is not None)

    def forget(self) -> None:
        """Drop steps and messages since the last planning, and what is known of links."""
        self._forget_steps()
        self._gatherer.skip_messages(self._after)
        self.costs.forget_links()

    def gather(self) -> None:
        """Bring the reports of all ranks together, into :attr:`costs` on the first one. Collective."""
        parts = tuple(self._layers.parts)
        if parts != self.costs.parts:
            self.costs.has_moved(parts)
        WATCH.doing("comparing the last steps", EVERYONE)
        uneven_s, timed = self._uneven_s(), {}
        if uneven_s is not None:  # before, nobody can tell what a layer would take with evenly busy experts
            timed, self._timed = self._timed, {}
        reports = self._gatherer.gather(self._after, layers=timed, uneven_s=uneven_s, memory_bytes=self._memory_bytes)
        self._forget_steps()
        if self._agreement.decides:
            self.costs.update(reports)
            self.reports, self._reported = reports, self._pipeline.global_steps
        if self._times_layers and not self._untried and uneven_s is not None:
            is_untimed = not self.costs.items  # the step that was to be timed may have failed
            is_untimed, self.guesses = self._agreement.from_first((is_untimed, bool(self.costs.guessed)))
            if is_untimed:
                self.time_layers_again()

    def before_switch(self, *, switches: bool) -> None:
        """Record the costs, and a step to compare with those after the switch. On the first rank."""
        size = self._pipeline.cut
        if self._agreement.decides and size in self.costs.sizes():
            self._log.add_measurement(
                {
                    "step": self._pipeline.global_steps,
                    "micro_batch_size": size,
                    "partition": list(self.costs.parts),
                    "routes": [list(route) for route in self.costs.routes],
                    "measured_s": self.costs.measured_s,
                    "room_bytes": list(self.costs.room_bytes),
                    **without_variation(self.costs.costs(size)).to_dict(),
                }
            )
            is_near_switch = self._timelines.records_switches and (switches or self._has_switched)
            if is_near_switch and self._timelines.is_drawn and all(report.steps for report in self.reports):
                self._timelines.write(self.reports, self.costs, self._reported)
        self._has_switched, self.reports = switches, []
        if switches:  # a step beside which it was planned is of other shares, or another schedule, than those to come
            self._forget_steps()

    def begin_step(self, done: int, until_planning: int | None) -> None:
        """Time the layers in the step that begins, if they are to be timed in this one."""
        if self._times_layers and done == self._time_at:
            self._meter.time_layers(self._layers)
            self._is_timing = True

    # -- called by actuators -------------------------------------------------------------------------------------

    def disturb(self) -> None:
        """Leave out the step that begins: layers move beside it, in the way of its messages. On all ranks."""
        self._disturbed.add(self._done + 1)

    def disturb_next(self) -> None:
        """Leave out the step after the one that ends: experts move beside it. On all ranks, before :meth:`end_step`."""
        self._disturbed.add(self._done + 2)

    def time_layers_again(self) -> None:
        """Time the layers in the step after the next. On all ranks."""
        self._time_at = self._done + 1

    def _forget_steps(self) -> None:
        self._meter.recorder.forget()
        self._num_measured = 0

    def _uneven_s(self) -> dict[int, Uneven] | None:
        """Of a sample, by item of this rank."""
        found = self._uneven_experts()
        if not found:
            return None if found is None else {}
        samples = self._pipeline.micro_batches * self._pipeline.micro_batch_size
        of_items: dict[int, Uneven] = {}
        for item in self._layers.here:
            if own := [seconds for name, seconds in found.items() if name.startswith(self._layers.prefixes(item))]:
                of_items[item] = Uneven(*map(sum, zip(*own, strict=True))).times(1 / samples)
        return of_items

    def _would_fit(self, trial: Candidate) -> bool:
        """Whether a trial exists for each replica's micro-batches and fits, if memory grows with the samples."""
        costs, known, size = self.costs, self._pipeline.micro_batch_size, trial.micro_batch_size
        if known not in costs.saved_bytes:
            return size < known
        now = costs.costs(known)
        scaled = replace(now, activation_bytes=tuple(num_bytes * size / known for num_bytes in now.activation_bytes))
        num_stages, counts = self._pipeline.num_stages, set(self._pipeline.replica_micro_batches)
        try:
            return all(trial.fits(num_stages, known * count, scaled, costs.room_bytes) for count in counts)
        except ValueError:  # not with so few micro-batches
            return False
