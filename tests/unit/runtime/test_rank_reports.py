"""Messages with both their ends, from what the ranks report: hand-made reports of a pipeline whose times are known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.transport import Record
from paceline.measure.clock import Clock
from paceline.optim.sharded import ShardedOptimizer
from paceline.runtime import rank_reports
from paceline.runtime.meter import Meter
from paceline.runtime.rank_reports import COMPARISONS, LaneKey, ReportGatherer, in_turn, messages
from support.reports import MICRO_BATCHES, ROUTES, STAGES, Run, lane


def test_a_message_is_seen_once() -> None:
    after: dict[tuple[int, LaneKey], int] = {}
    reports = Run().reports()
    assert len(messages(reports, ROUTES, after)) == 2 * MICRO_BATCHES * 2 * (STAGES - 1)
    assert messages(reports, ROUTES, after) == []
    assert len(messages(Run(steps=3).reports(), ROUTES, after)) == MICRO_BATCHES * 2 * (STAGES - 1)


def test_messages_are_on_the_first_stages_clock_and_begin_when_both_ends_are_ready() -> None:
    run = Run(offsets_s=(5.0, -70.0, 12.5))
    reports = run.reports()
    late = reports[1].records[lane(1, "activations_in")][0]
    ready = late.done_s - 0.003  # its receive was posted three milliseconds before it had come
    reports[1].records[lane(1, "activations_in")][0] = replace(late, begun_s=ready)
    first, second, *_ = [seen for seen in messages(reports, ROUTES) if (seen.kind, seen.source) == ("activation", 0)]
    assert first.record.begun_s == pytest.approx(ready + 70.0 + 5.0)
    assert first.record.done_s - first.record.begun_s == pytest.approx(0.003)
    assert second.record.done_s - second.record.begun_s == pytest.approx(0.005)
    assert {(s.kind, s.source, s.target) for s in messages(reports, ROUTES)} == {
        *(("activation", stage, stage + 1) for stage in range(STAGES - 1)),
        *(("gradient", stage + 1, stage) for stage in range(STAGES - 1)),
    }


def test_numbers_that_are_missing_at_one_end_are_left_out() -> None:
    reports = Run().reports()
    sent = reports[0].records[lane(0, "activations_out")]
    del sent[0], sent[-1]  # forgotten, and not noted yet
    del reports[1].records[lane(1, "activations_in")][3]
    after: dict[tuple[int, LaneKey], int] = {}
    seen = [s.record.number for s in messages(reports, ROUTES, after) if (s.kind, s.source) == ("activation", 0)]
    assert seen == [2, 3, 5, 6, 7]
    # What the sender notes a moment later is seen at the next look.
    late = [
        s.record.number for s in messages(Run().reports(), ROUTES, after) if (s.kind, s.source) == ("activation", 0)
    ]
    assert late == [8]


def test_what_ended_in_one_batch_began_when_the_last_of_it_could() -> None:
    """NCCL carries out a batch as one: a message that was ready waits in it for one that was not."""
    reports = Run().reports()
    arrived = reports[1].records[lane(1, "activations_in")]
    alone = next(seen for seen in messages(reports, ROUTES) if (seen.kind, seen.source) == ("activation", 0))
    # Stage 1 receives the first micro-batch in a batch in which it sends a gradient that is there half a second later.
    late_s = 0.5
    gradient = reports[1].records[lane(1, "gradients_out")][0]
    end_s = gradient.begun_s + 0.002
    batch_end_s = max(end_s, alone.record.begun_s + late_s)
    reports[1].records[lane(1, "gradients_out")][0] = replace(gradient, begun_s=batch_end_s - 0.002, done_s=batch_end_s)
    received = reports[0].records[lane(0, "gradients_in")][0]
    reports[0].records[lane(0, "gradients_in")][0] = replace(received, done_s=batch_end_s)
    arrived[0] = replace(arrived[0], done_s=batch_end_s)
    first = next(seen for seen in messages(reports, ROUTES) if (seen.kind, seen.source) == ("activation", 0))
    assert first.record.done_s - first.record.begun_s == pytest.approx(0.002)


def test_a_call_that_waits_for_the_one_before_begins_when_that_ends() -> None:
    """As NCCL's calls do: the second one is short, though it was issued with the first."""
    first, second = Record(1, 0, 10, 1.0, 5.0), Record(1, 0, 10, 1.0, 5.5)
    together = Record(2, 1, 10, 2.0, 5.5)
    out, gradients = lane(0, "activations_out"), lane(0, "gradients_in")
    assert in_turn({out: [first, together], gradients: [second]}) == {
        out: [first, replace(together, begun_s=5.0)],
        gradients: [replace(second, begun_s=5.0)],
    }


# -- what a rank reports ---------------------------------------------------------------------------------------------


def gatherer(lanes: dict[str, Any], machines: int = 1) -> ReportGatherer:
    """A gatherer on the first rank of a job, whose one stage has these lanes."""
    control: Any = SimpleNamespace(
        gather=lambda value: [f"{value} {number}" for number in range(machines)],
        gather_at_first=lambda report: [report],
    )
    links: Any = SimpleNamespace(
        **{"chunks": ((0, 0),), "transports": [SimpleNamespace(lanes=lambda stage: lanes)], "order": "free"},
        **{"ranks": (0, 1), "routes": ((0, 1),), "device_number": 0, "pipe_number": 0},
    )
    module, device = nn.Linear(1, 1), torch.device("cpu")
    meter = Meter(Clock(device), module, device)
    return ReportGatherer(control, meter, device, links=links, module=module, optimizer=None)


def test_gradients_of_a_step_leave_less_room_for_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where autograd makes them in each step anew."""
    monkeypatch.setattr(rank_reports, "compare_clocks", lambda *args: (0.0, 0.0))
    monkeypatch.setattr(rank_reports, "ranks_sharing", lambda device: 1)
    monkeypatch.setattr(rank_reports, "room_bytes", lambda *args: 1000)
    monkeypatch.setattr(rank_reports, "bytes_per_parameter", lambda *args: (12.0, 8.0, 4.0))
    reports = gatherer({})
    optimizer: Any = ShardedOptimizer.__new__(ShardedOptimizer)
    optimizer.gradients = SimpleNamespace(coming_bytes=lambda: 8)
    for own, room in ((None, 1000), (optimizer, 992)):
        reports._optimizer = own
        (report,) = reports.gather({})
        assert report.room_bytes == room


def test_messages_that_are_skipped_are_not_reported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step beside which layers moved."""
    monkeypatch.setattr(rank_reports, "compare_clocks", lambda *args: (0.0, 0.0))
    end = SimpleNamespace(records=[Record(number, 0, 10, 1.0, 2.0) for number in range(1, 7)])
    reports, after = gatherer({"activations_out": end}), dict[LaneKey, int]()
    seen = []
    reports.skip_messages(after)
    for number in (7, 8):
        end.records.append(Record(number, 0, 10, 1.0, 2.0))
        (report,) = reports.gather(after, memory_bytes=1)
        seen.append([record.number for record in report.records[lane(0, "activations_out")]])
    assert seen == [[7], [7, 8]], "the last ones that were reported are reported again, as the other end may lack them"


@pytest.mark.parametrize(("machines", "found"), [(1, 0.001), (2, 0.03)])
def test_clocks_of_one_machine_are_compared_when_fewest_are_busy(
    machines: int, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last comparison holds for all of the run; clocks of two machines drift, and the newest one counts."""
    compared = iter([(0.002, 0.004), (0.001, 0.002), (0.03, 0.05), *[(0.03, 0.05)] * COMPARISONS])
    monkeypatch.setattr(rank_reports, "compare_clocks", lambda *args: next(compared))
    reports = gatherer({}, machines)
    for _ in range(COMPARISONS + 2):
        (report,) = reports.gather({}, memory_bytes=1)
    assert report.clock_s == found
