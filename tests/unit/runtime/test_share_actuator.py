"""Shares of the replicas, chosen from what ranks reported of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.planning.unequal_replicas import ANY_NUMBER, MicroBatchCounts
from paceline.runtime.rank_reports import Report
from paceline.runtime.share_actuator import ShareActuator, replica_times
from support.reports import MICRO_BATCHES, STAGES, Run

EQUAL = (MICRO_BATCHES, MICRO_BATCHES)


def reports(slower: float) -> list[Report]:
    """Two replicas, of which the second takes ``slower`` times as long."""
    fast = Run()
    slow = Run(
        tuple(slower * seconds for seconds in fast.forward_s),
        tuple(slower * seconds for seconds in fast.backward_s),
        slower * fast.transfer_s,
        latency_s=slower * fast.latency_s,
        offsets_s=(3.0, 400.0, -5.0),
    )
    return [*slow.reports(replica=1), *fast.reports(replica=0)]


@dataclass
class Job:
    """All that the actuator sees."""

    reports: Sequence[Report]
    decides: bool = True
    num_stages: int = STAGES
    global_steps: int = 7
    replica_micro_batches: tuple[int, ...] = EQUAL
    shares_change: bool = False
    called: list[Any] = field(default_factory=list)

    def share_micro_batches(self, shares: Sequence[int]) -> None:
        self.called.append(tuple(shares))

    def run_again(self) -> None:
        self.called.append("run again")


def actuator(job: Job, counts: MicroBatchCounts = ANY_NUMBER) -> ShareActuator:
    part: Any = job
    return ShareActuator(part, part, part, part, counts, 10)


def test_times_are_those_of_the_replicas() -> None:
    fast, slow = replica_times(reports(3.0), EQUAL, STAGES) or ()
    assert slow.micro_batch_s == pytest.approx(3 * fast.micro_batch_s)
    assert fast.step_s(MICRO_BATCHES) == pytest.approx(fast.micro_batch_s * (MICRO_BATCHES + STAGES - 1))
    # A replica that had fewer micro-batches took as long for each.
    assert (replica_times(reports(1.0), (4, 2), STAGES) or ())[1].micro_batch_s > fast.micro_batch_s


def test_a_replica_without_a_step_leaves_the_shares() -> None:
    known = [report for report in reports(3.0) if report.replica == 0]
    assert replica_times(known, EQUAL, STAGES) is None
    assert actuator(Job(known)).propose(10) is None


def test_the_slow_replica_gets_less() -> None:
    job = Job(reports(3.0))
    proposal = actuator(job).propose(10)
    assert proposal is not None
    assert proposal.change == (7, 1)
    assert job.shares_change, "no schedule is chosen for the old ones"
    actuator(job).apply(proposal.change)
    assert job.called == [(7, 1), "run again"]
    record = proposal.record(None).to_json()
    assert (record["what"], record["switched"], record["from"], record["to"]) == ("shares", True, [4, 4], [7, 1])
    assert record["predicted_best_s"] < record["predicted_now_s"]


def test_a_schedule_that_needs_many_has_them() -> None:
    for counts, shares in (
        (MicroBatchCounts(least=2), (6, 2)),
        (MicroBatchCounts(2, 2), (6, 2)),
        (MicroBatchCounts(4, 4), None),
    ):
        proposal = actuator(Job(reports(3.0)), counts).propose(10)
        assert proposal is not None
        assert proposal.change == shares


def test_what_saves_next_to_nothing_stays() -> None:
    job = Job(reports(1.01))
    proposal = actuator(job).propose(10)
    assert proposal is not None
    assert proposal.change is None
    assert not job.shares_change
    assert proposal.record(None).to_json()["to"] == [4, 4]


def test_only_the_first_rank_decides() -> None:
    assert actuator(Job(reports(3.0), decides=False)).propose(10) is None
