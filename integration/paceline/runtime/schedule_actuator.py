"""The schedule of a pipeline, which follows what its steps are measured to cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from ..config.schedules import ScheduleChoice
from ..planning.candidates import FEW, IN_V, SLACKS, SPLIT_IN_LINE, Candidate, candidates, that_fit
from ..planning.choose import NO_FORMATS, Choice, Planner
from ..planning.format_costs import FormatCosts
from ..planning.repartition import Layout
from ..planning.shared_devices import live_of, whole_schedule
from ..planning.switching import SwitchRule
from ..planning.tuning import SCHEDULE, DecisionRecord, Proposal
from ..schedules.costs import Costs
from ..schedules.families import VMIN, ZBV
from ..schedules.generator import GENERATED, generated
from ..schedules.schedule import Schedule
from ..schedules.split_families import ZBH1
from ..schedules.stream import Stream
from ..supervise.watch import WATCH
from .controller import Agreement
from .measured_costs import MeasuredCosts

logger = logging.getLogger("paceline")

GENERATED_UP_TO = 2048
"""Up to so many stages times micro-batches an order is made anew at each planning: it takes a second there."""

SWITCH_S = 0.01
"""A switch before the first was timed."""


def first_candidate(choice: ScheduleChoice, micro_batch_size: int) -> Candidate:
    """The schedule that a run begins with."""
    return Candidate(micro_batch_size, family="" if choice.chunks is None else ZBV)


def least_candidate(choice: ScheduleChoice, micro_batch_size: int) -> Candidate:
    """The schedule that needs least memory of those that are pipelined."""
    return Candidate(micro_batch_size, family="" if choice.chunks is None else VMIN)


def trials(
    choice: ScheduleChoice, num_stages: int, micro_batch_size: int, *, recomputes: bool = False
) -> list[Candidate]:
    """Schedules to run for some steps each before the first choice, so that what they cost is known.

    All sizes of micro-batches, and a split backward, whose two parts are timed. Where activations are recomputed none
    is tried: what it leaves for later is many times what was kept before, and memory is short.
    """
    sizes = sorted(
        {micro_batch_size, *(choice.micro_batch_sizes or ())}, key=lambda size: (size != micro_batch_size, size)
    )
    found = [first_candidate(choice, size) for size in sizes]
    if choice.chunks is None and not choice.late_gradients and not recomputes and num_stages > 1:
        found.append(Candidate(micro_batch_size, family=ZBH1))
    return found


class RunsSchedules(Protocol):
    """A pipeline whose schedule can change between steps."""

    @property
    def num_stages(self) -> int: ...

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch, as configured."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step of this replica, before they are cut otherwise."""

    @property
    def replica_micro_batches(self) -> tuple[int, ...]:
        """The same for each replica."""

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
        choice: of the JSON: which schedules there are to choose from, and how often.
        formats: by name, costs of formats that stages may send in.

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
        choice: ScheduleChoice,
        formats: Mapping[str, FormatCosts] = NO_FORMATS,
    ) -> None:
        self._pipeline, self._costs, self._agreement, self._choice = pipeline, costs, agreement, choice
        self._formats = formats
        self._rule = SwitchRule(choice.retune_every or 1)
        self.current = self.next = first_candidate(choice, pipeline.micro_batch_size)
        self.planner: Planner | None = None
        self._switch_s = SWITCH_S
        self._num_made = 0

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

    def run_again(self) -> None:
        """Run the schedule with another number of micro-batches; what was made for the old one gives way."""
        if self.current.made is not None:
            self.current = self.next = first_candidate(self._choice, self.current.micro_batch_size)
        self._pipeline.run_candidate(self.current)

    def order(self, candidate: Candidate) -> Schedule | Stream:
        """The order that a candidate runs; without candidates, that of the pipeline, which stays."""
        return self._pipeline.order if self.planner is None else self.planner.schedule(candidate)

    def that_fit(self, layout: Layout, parts: tuple[int, ...], *, makes: bool = True) -> Iterator[Candidate]:
        """Candidates that were measured and fit with other boundaries, in the format that runs.

        Args:
            makes: whether an order that is made for those is among them.
        """
        if self.planner is None:
            return
        costs = {size: layout.costs(self._costs.costs(size), parts) for size in self._costs.sizes()}
        split = {size: each for size, each in costs.items() if each.weight_s and size in self._costs.saved_bytes}
        made = self._made(self.planner.samples, split) if makes else ()
        for other in (*self.planner.candidates, *(each._replace(boundary=self.next.boundary) for each in made)):
            if other.micro_batch_size in costs and other.boundary == self.next.boundary:
                whole = whole_schedule(self.order(other))
                live = [live_of(whole, device) for device in range(whole.num_ranks)]
                if layout.fits(self._costs.costs(other.micro_batch_size), parts, live):
                    yield other

    def _choose(self, steps: int) -> Choice | None:
        known, pipeline = self._costs, self._pipeline
        sizes = [size for size in known.sizes() if size in known.saved_bytes]
        if self.current.micro_batch_size not in known.sizes():
            return None
        configured, num_stages = pipeline.micro_batch_size, pipeline.num_stages
        samples = configured * pipeline.micro_batches
        costs = {size: known.costs(size) for size in known.sizes()}
        found = tuple(
            candidate._replace(boundary=name)
            for candidate in self._candidates(sizes, samples, costs)
            if self._runs_everywhere(candidate, costs)
            for name in self._formats
        )
        if self.planner is None or (self.planner.candidates, self.planner.samples) != (found, samples):
            self.planner = Planner(found, num_stages, samples, self.planner, self._formats, self._choice.risk)
        # A candidate that no longer fits, or turned out not to, gives way to the smallest, whatever that costs.
        running = self.current
        least = least_candidate(self._choice, configured)._replace(boundary=running.boundary)
        if running != least and not self._fits(running, samples):
            logger.warning("step %d: %s does not fit in memory as measured now", pipeline.global_steps, running.name)
            running = least
        return self.planner.choose(costs, running, self._rule, switch_s=self._switch_s, steps=steps)

    def _candidates(self, sizes: Sequence[int], samples: int, costs: Mapping[int, Costs]) -> Iterator[Candidate]:
        """Schedules that fit in memory, of micro-batches of ``sizes``, whose memory was measured."""
        known, pipeline, choice = self._costs, self._pipeline, self._choice
        configured, num_stages = pipeline.micro_batch_size, pipeline.num_stages
        if choice.chunks is None and choice.type != GENERATED:
            yield from candidates(
                num_stages,
                samples,
                sizes,
                known.saved_bytes,
                known.room_bytes,
                configured=configured,
                slacks=SLACKS if len(sizes) * num_stages * pipeline.micro_batches <= FEW else (0.0, 1.0),
                late=choice.late_gradients is True,
            )
        else:
            yield least_candidate(choice, configured)
        # How long the backwards of weights take is known once backwards were split.
        split = {size: costs[size] for size in sizes if costs[size].weight_s}
        if not split:
            return
        names = SPLIT_IN_LINE if choice.chunks is None else IN_V
        yield from that_fit(names, num_stages, samples, split, known.room_bytes)
        yield from self._made(samples, split)

    def _runs_everywhere(self, candidate: Candidate, costs: Mapping[int, Costs]) -> bool:
        """Whether replicas with other shares can run a candidate that fits with this one's."""
        pipeline, size = self._pipeline, candidate.micro_batch_size
        for count in set(pipeline.replica_micro_batches) - {pipeline.micro_batches}:
            samples = count * pipeline.micro_batch_size
            try:
                if not candidate.fits(pipeline.num_stages, samples, costs[size], self._costs.room_bytes):
                    return False
            except ValueError:  # too few for it
                return False
        return True

    def _made(self, samples: int, costs: Mapping[int, Costs]) -> Iterator[Candidate]:
        """An order for these costs, of each micro-batch size."""
        num_cells = self._pipeline.num_stages * self._pipeline.micro_batches
        is_too_large = self._choice.type != GENERATED and num_cells > GENERATED_UP_TO
        if is_too_large or len(set(self._pipeline.replica_micro_batches)) > 1:
            return
        for size, each in costs.items():
            try:
                order = generated({tuple(self._costs.routes[0]): each}, samples // size, self._costs.room_bytes)
            except ValueError:  # nothing fits
                continue
            if self.current.made is not None and order.orders == self.current.made.orders:
                yield self.current._replace(boundary="")
            elif not order.name.startswith(f"{GENERATED} as "):
                self._num_made += 1
                yield Candidate(size, family=f"{GENERATED} {self._num_made}", made=replace(order, name=GENERATED))

    def _fits(self, candidate: Candidate, samples: int) -> bool:
        """Whether a candidate whose size was measured stays within the room that there is now."""
        known, size = self._costs, candidate.micro_batch_size
        if size not in known.saved_bytes:
            return True
        return candidate.fits(self._pipeline.num_stages, samples, known.costs(size), known.room_bytes)

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
