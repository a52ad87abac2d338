"""The schedule of a pipeline, which follows what its steps are measured to cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from ..planning.candidates import SLACKS, Candidate, candidates
from ..planning.choose import Choice, Planner
from ..planning.repartition import Layout
from ..planning.shared_devices import one_a_device
from ..planning.switching import SwitchRule
from ..planning.tuning import SCHEDULE, DecisionRecord, Proposal
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from ..supervise.watch import WATCH
from .controller import Agreement
from .measured_costs import MeasuredCosts

logger = logging.getLogger("paceline")

FEW = 512
"""Up to so many stages times micro-batches times sizes every warm-up is tried: a replay grows with all three."""

SWITCH_S = 0.01
"""A switch before the first was timed."""


class RunsSchedules(Protocol):
    """A pipeline whose schedule can change between steps."""

    @property
    def num_stages(self) -> int: ...

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch, as configured."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, as configured."""

    @property
    def cut(self) -> int:
        """Samples of a micro-batch, as it runs."""

    @property
    def schedule(self) -> Schedule:
        """Schedule of the next step."""

    @property
    def order(self) -> Schedule | Stream:
        """Order of the steps: without a flush, of one in the steady state."""

    @property
    def global_steps(self) -> int: ...

    def run_candidate(self, candidate: Candidate) -> None:
        """Run ``candidate`` from the next step on."""


class ScheduleActuator:
    """Chooses the order of a pipeline's steps, and into how many micro-batches they are cut.

    Args:
        costs: measured so far, on the rank that decides.
        every: steps between plannings.
        late_gradients: whether a schedule without a flush may be chosen.

    Attributes:
        current: what runs.
        next: what runs after the present planning, as far as it has come.
        planner: with the candidates of the last proposal.
    """

    def __init__(
        self,
        pipeline: RunsSchedules,
        costs: MeasuredCosts,
        agreement: Agreement,
        every: int = 1,
        *,
        late_gradients: bool = False,
    ) -> None:
        self._pipeline, self._costs, self._agreement = pipeline, costs, agreement
        self._late_gradients = late_gradients
        self._rule = SwitchRule(every)
        self.current = self.next = Candidate(pipeline.micro_batch_size)
        self.planner: Planner | None = None
        self._switch_s = SWITCH_S

    def propose(self, steps: int) -> Proposal[Candidate, None] | None:
        """Predict all candidates that fit, and decide whether the best of them pays."""
        if not self._agreement.decides:
            return None
        WATCH.doing("choosing a schedule and a partition")
        choice = self._choose(steps)
        if choice is None:
            return None
        self.next = choice.next
        change = None if choice.next == self.current else choice.next
        return Proposal(change, partial(self._record, choice))

    def apply(self, change: Candidate) -> None:
        """Run another candidate from the next step on."""
        begun = time.perf_counter()
        self.current = self.next = change
        self._pipeline.run_candidate(change)
        self._switch_s = time.perf_counter() - begun

    def order(self, candidate: Candidate) -> Schedule | Stream:
        """The order that a candidate runs; without candidates, that of the pipeline, which stays."""
        return self._pipeline.order if self.planner is None else self.planner.schedule(candidate)

    def that_fit(self, layout: Layout, parts: tuple[int, ...]) -> Iterable[Candidate]:
        """Candidates that were measured and fit with other boundaries."""
        if self.planner is None:
            return
        for other in self.planner.candidates:
            if other.micro_batch_size in self._costs.sizes():
                peaks = other.peak_activations(self._pipeline.num_stages, self.planner.samples)
                if layout.fits(self._costs.costs(other.micro_batch_size), parts, one_a_device(peaks)):
                    yield other

    def _choose(self, steps: int) -> Choice | None:
        known, pipeline = self._costs, self._pipeline
        sizes = [size for size in known.sizes() if size in known.saved_bytes]
        if self.current.micro_batch_size not in known.sizes():
            return None
        configured, num_stages = pipeline.micro_batch_size, pipeline.num_stages
        samples = configured * pipeline.micro_batches
        found = candidates(
            num_stages,
            samples,
            sizes,
            known.saved_bytes,
            known.room_bytes,
            configured=configured,
            slacks=SLACKS if len(sizes) * num_stages * pipeline.micro_batches <= FEW else (0.0, 1.0),
            late=self._late_gradients,
        )
        if self.planner is None or (self.planner.candidates, self.planner.samples) != (found, samples):
            self.planner = Planner(found, num_stages, samples)
        costs = {size: known.costs(size) for size in known.sizes()}
        # A candidate that no longer fits, or turned out not to, gives way to the smallest, whatever that costs.
        running = self.current
        if running != Candidate(configured) and not self._fits(running, samples):
            logger.warning("step %d: %s does not fit in memory as measured now", pipeline.global_steps, running.name)
            running = Candidate(configured)
        return self.planner.choose(costs, running, self._rule, switch_s=self._switch_s, steps=steps)

    def _fits(self, candidate: Candidate, samples: int) -> bool:
        """Whether a candidate whose size was measured stays within the room that there is now."""
        saved, room = self._costs.saved_bytes.get(candidate.micro_batch_size), self._costs.room_bytes
        peaks = candidate.peak_activations(self._pipeline.num_stages, samples)
        return saved is None or all(p * each <= r for p, each, r in zip(peaks, saved, room, strict=True))

    def _record(self, choice: Choice, outcome: None) -> DecisionRecord:
        decision, step, measured_s = choice.decision, self._pipeline.global_steps, self._costs.measured_s
        logger.log(
            logging.INFO if decision.switch else logging.DEBUG,
            "step %d: %s -> %s: %s (predicted %.4g s -> %.4g s, measured %.4g s)",
            *(step, choice.current.name, choice.next.name, decision.why),
            *(decision.now_s, decision.best_s, measured_s),
        )
        figures = {
            "from": choice.current.name,
            "to": choice.next.name,
            "measured_s": measured_s,
            "predicted_s": {prediction.candidate.name: prediction.step_s for prediction in choice.predictions},
        }
        return DecisionRecord(SCHEDULE, step, decision.switch, decision, decision.best_s, figures)
