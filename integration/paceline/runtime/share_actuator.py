"""Shares of a step's micro-batches for the replicas, which follow how fast those are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ..measure.recurring import recurring_mean
from ..planning.switching import Decision, SwitchRule
from ..planning.tuning import SHARES, DecisionRecord, Proposal
from ..planning.unequal_replicas import MicroBatchCounts, ReplicaTimes, fastest_shares, slowest_s
from ..supervise.watch import WATCH
from .controller import Agreement
from .rank_reports import Report
from .step_spans import step_spans

logger = logging.getLogger("paceline")

SWITCH_S = 0.01
"""New shares cost as much as a new schedule."""

LEAST_GAIN = 0.02
"""Shares that save less of a step are not taken: times vary by as much."""


class SharesMicroBatches(Protocol):
    """A pipeline with others beside it."""

    @property
    def num_stages(self) -> int: ...

    @property
    def global_steps(self) -> int: ...

    @property
    def replica_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches of a step for each replica."""

    def share_micro_batches(self, shares: Sequence[int]) -> None:
        """Change :attr:`replica_micro_batches`, from the next step on."""


class MeasuresReplicas(Protocol):
    """What the ranks have reported last, on the rank that decides."""

    @property
    def reports(self) -> Sequence[Report]: ...


class Reschedules(Protocol):
    """Who has the pipeline run its schedule with another number of micro-batches."""

    shares_change: bool
    """Replicas get other shares in the present planning, for which nothing else can have been chosen."""

    def run_again(self) -> None: ...


class _Choice(NamedTuple):
    shares: tuple[int, ...]
    before: tuple[int, ...]
    times: tuple[ReplicaTimes, ...]
    decision: Decision


class ShareActuator:
    """Chooses how many micro-batches of a step each replica computes.

    Args:
        measured: has the last reports.
        schedules: of all replicas.
        counts: numbers of micro-batches that they can have.
        every: steps between choices.
    """

    def __init__(
        self,
        pipeline: SharesMicroBatches,
        measured: MeasuresReplicas,
        schedules: Reschedules,
        agreement: Agreement,
        counts: MicroBatchCounts,
        every: int,
    ) -> None:
        self._pipeline, self._measured, self._schedules = pipeline, measured, schedules
        self._agreement, self._counts, self._rule = agreement, counts, SwitchRule(every)

    def propose(self, steps: int) -> Proposal[tuple[int, ...], None] | None:
        """Find the shares with which the slowest replica ends first, and decide whether they pay."""
        if not self._agreement.decides:
            return None
        WATCH.doing("choosing shares of the replicas")
        before = self._pipeline.replica_micro_batches
        times = replica_times(self._measured.reports, before, self._pipeline.num_stages)
        if times is None:
            return None
        best = fastest_shares(times, sum(before), self._counts)
        now_s, best_s = slowest_s(times, before), slowest_s(times, best)
        if best_s > (1 - LEAST_GAIN) * now_s:
            best, best_s = before, now_s
        decision = self._rule.consider(now_s, best_s, SWITCH_S, steps)
        self._schedules.shares_change = decision.switch
        choice = _Choice(best, before, times, decision)
        return Proposal(best if decision.switch else None, partial(self._record, choice))

    def apply(self, change: tuple[int, ...]) -> None:
        """Compute other shares from the next step on."""
        self._pipeline.share_micro_batches(change)
        self._schedules.run_again()

    def _record(self, choice: _Choice, outcome: None) -> DecisionRecord:
        decision, step = choice.decision, self._pipeline.global_steps
        if decision.switch:
            logger.info(
                "step %d: micro-batches of the replicas %s -> %s: %s (predicted %.4g s -> %.4g s)",
                *(step, list(choice.before), list(choice.shares), decision.why, decision.now_s, decision.best_s),
            )
        figures = {
            "from": list(choice.before),
            "to": list(choice.shares),
            "micro_batch_s": [replica.micro_batch_s for replica in choice.times],
        }
        return DecisionRecord(SHARES, step, decision.switch, decision, decision.best_s, figures)


def replica_times(reports: Sequence[Report], shares: Sequence[int], num_stages: int) -> tuple[ReplicaTimes, ...] | None:
    """Seconds of each replica's part of a step, messages and the host included.

    A step of M micro-batches counts as M + S - 1 equal parts, of which the pipeline's fill and drain are S - 1.

    Returns:
        None where a replica has no steps.
    """
    found = []
    for replica, share in enumerate(shares):
        pipe = sorted((report for report in reports if report.replica == replica), key=lambda report: report.device)
        spans = step_spans(pipe) if pipe else []
        if not spans:
            return None
        seconds = recurring_mean(span.schedule_s for span in spans)
        each = seconds / (share + num_stages - 1)
        found.append(ReplicaTimes(each, seconds - each * share))
    return tuple(found)
