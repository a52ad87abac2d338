"""The schedule of a pipeline, which follows what its steps are measured to cost."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from ..config.schedules import ScheduleChoice
from ..planning.candidates import Candidate
from ..planning.choose import NO_FORMATS, Choice, Past
from ..planning.format_costs import FormatCosts
from ..planning.outlook import KEPT
from ..planning.partition_search import Schedules
from ..planning.schedule_search import Found, Measured, Options, SearchArguments, search
from ..planning.switching import SwitchRule
from ..planning.tuning import SCHEDULE, DecisionRecord, Proposal
from ..schedules.families import DUALPIPEV, VMIN, ZBV
from ..schedules.generator import GENERATED
from ..schedules.schedule import Schedule
from ..schedules.split_families import ZBH1
from ..schedules.stream import Stream
from ..schedules.variation import without_variation
from ..supervise.watch import WATCH
from .controller import Agreement
from .measured_costs import MeasuredCosts
from .planning_process import Call, PlanningProcess

logger = logging.getLogger("paceline")

ASIDE_FROM = 32
"""From so many stages times micro-batches on a choice is made beside the next step: of fewer, in milliseconds."""

MANY = 4
"""Micro-batches for each device from which on whole backwards are tried beside split ones."""

SWITCH_S = 0.01
"""A switch before the first was timed."""


def first_candidate(choice: ScheduleChoice, micro_batch_size: int) -> Candidate:
    """The schedule that a run begins with."""
    return Candidate(micro_batch_size, family="" if choice.chunks is None else ZBV)


def least_candidate(choice: ScheduleChoice, micro_batch_size: int) -> Candidate:
    """The schedule that needs least memory of those that are pipelined."""
    return Candidate(micro_batch_size, family="" if choice.chunks is None else VMIN)


def trials(
    choice: ScheduleChoice, num_stages: int, micro_batch_size: int, micro_batches: int, *, recomputes: bool = False
) -> list[Candidate]:
    """Schedules to run for some steps each before the first choice, so that what they cost is known.

    All sizes of micro-batches, and a split backward, whose two parts are timed; of schedules with split backwards none
    is chosen before.

    With several stages a device the run begins with split backwards, and a whole one is tried: otherwise whole ones
    would seem to take as long as both parts of split ones. Of few micro-batches it is not: while a pipeline fills and
    drains, what is left for later gains more than splitting costs.

    Args:
        micro_batches: of a step, of the replica with the fewest.
        recomputes: activations are computed again in layers of one's own: none is tried, since what it would leave for
            later is many times what was kept before, and nobody can tell how much.
    """
    sizes = sorted(
        {micro_batch_size, *(choice.micro_batch_sizes or ())}, key=lambda size: (size != micro_batch_size, size)
    )
    found = [first_candidate(choice, size) for size in sizes]
    if choice.chunks is None and not choice.late_gradients and not recomputes and num_stages > 1:
        found.append(Candidate(micro_batch_size, family=ZBH1))
    if choice.chunks is not None and micro_batches >= MANY * num_stages:
        found.append(Candidate(micro_batch_size, family=DUALPIPEV))
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
        process: chooses beside steps where that takes long; None: it is always done between two of them.

    Attributes:
        current: what runs.
        next: what runs after the present planning, as far as it has come.
        candidates: compared in the last proposal.
        num_made: orders that were made for what was measured.
        begun: on the rank that decides, a choice in another process, until it is proposed.
        is_at_once: a choice is due in the present planning, and made between two steps.
        shares_change: on the rank that decides, replicas get other shares in the present planning: what was measured is
            of those before, and choices wait for the next one.
    """

    def __init__(
        self,
        pipeline: RunsSchedules,
        costs: MeasuredCosts,
        agreement: Agreement,
        choice: ScheduleChoice,
        formats: Mapping[str, FormatCosts] = NO_FORMATS,
        process: PlanningProcess | None = None,
    ) -> None:
        self._pipeline, self._costs, self._agreement, self._choice = pipeline, costs, agreement, choice
        self.options = Options(
            in_v=choice.chunks is not None,
            only_generated=choice.type == GENERATED,
            late=choice.late_gradients is True,
            formats=formats,
            risk=choice.risk,
        )
        self._past: deque[tuple[tuple[int, ...], Past]] = deque(maxlen=KEPT)
        """Partition and costs at the last choices."""
        self._process = process
        self.begun: Call[Found] | None = None
        self.is_at_once = self.shares_change = False
        self._is_first = True
        """Whether nothing was chosen yet."""
        self._rule = SwitchRule(choice.retune_every or 1)
        self.current = self.next = first_candidate(choice, pipeline.micro_batch_size)
        self.candidates: tuple[Candidate, ...] = ()
        self._switch_s = SWITCH_S
        self.num_made = 0

    def begin(self, steps: int) -> bool:
        """Have the planning process choose, if that takes long enough to be in the way of a step.

        The first choice is made at once: until then the job runs what is tried.
        """
        first, self._is_first = self._is_first, False
        self.begun, self.is_at_once = None, first or not self.plans_aside
        if not self.is_at_once and self._process is not None and self._agreement.decides:
            asked = self._question(steps)
            self.begun = None if asked is None else self._process.begin(partial(search, *asked))
        return not self.is_at_once

    @property
    def plans_aside(self) -> bool:
        """Whether plannings of this pipeline take long; the same on all ranks."""
        num_cells = self._pipeline.num_stages * max(self._pipeline.replica_micro_batches)
        return self._process is not None and num_cells >= ASIDE_FROM

    def propose(self, steps: int) -> Proposal[Candidate, None] | None:
        """Predict all candidates that fit, and decide whether the best of them pays."""
        self.is_at_once = False
        if not self._agreement.decides or self.shares_change:
            return None
        WATCH.doing("choosing a schedule and a partition")
        found = self._found(steps)
        if found is None:
            return None
        self.candidates, self._rule, self.num_made = found.planner.candidates, found.rule, found.num_made
        if found.gives_way:
            name = self.current.name
            logger.warning("step %d: %s does not fit in memory as measured now", self._pipeline.global_steps, name)
        choice = found.choice
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
        """Run the schedule with other numbers of micro-batches; one that does not exist for them gives way.

        One that is not tuned follows them by itself.
        """
        self.shares_change = False
        if not self._choice.is_tuned:
            return
        if not self._exists(self.current):
            self.current = self.next = first_candidate(self._choice, self.current.micro_batch_size)
        self._pipeline.run_candidate(self.current)

    def for_partitions(self) -> Schedules:
        """Schedules that a partition may run with, after the last proposal."""
        return Schedules(self.next, self._pipeline.order, self.candidates, self.num_made)

    def _exists(self, candidate: Candidate) -> bool:
        """Whether all replicas can run a candidate with their micro-batches; the same on all ranks."""
        pipeline = self._pipeline
        try:
            for count in set(pipeline.replica_micro_batches):
                candidate.schedule(pipeline.num_stages, count * pipeline.micro_batch_size)
        except ValueError:
            return False
        return True

    def _found(self, steps: int) -> Found | None:
        begun, self.begun = self.begun, None
        if begun is not None and self._process is not None:
            return self._process.result(begun)
        asked = self._question(steps)
        return None if asked is None else search(*asked)

    def _question(self, steps: int) -> SearchArguments | None:
        """Everything that the choice depends on; None if what runs was not measured."""
        if self.current.micro_batch_size not in self._costs.sizes():
            return None
        least = least_candidate(self._choice, self._pipeline.micro_batch_size)
        measured, parts = self.measured(), self._costs.parts
        before = tuple(past for of_parts, past in self._past if of_parts == parts)
        costs = {size: without_variation(each) for size, each in measured.costs.items()}
        self._past.append((parts, Past(costs, self.current.boundary)))
        return SearchArguments(
            *(measured, self.options, self.current, least, self._rule, self.num_made, self._switch_s, steps, before)
        )

    def measured(self) -> Measured:
        """The pipeline as it was measured."""
        known, pipeline = self._costs, self._pipeline
        return Measured(
            *(pipeline.num_stages, pipeline.micro_batch_size, pipeline.micro_batches, pipeline.replica_micro_batches),
            costs={size: known.costs(size) for size in known.sizes()},
            saved_bytes={size: tuple(each) for size, each in known.saved_bytes.items()},
            room_bytes=tuple(known.room_bytes),
            route=tuple(known.routes[0]),
        )

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
