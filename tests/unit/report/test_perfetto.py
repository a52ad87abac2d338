"""Traces for Perfetto: the structure that its importer and chrome://tracing need."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.report.perfetto import write_trace
from paceline.schedules.costs import Costs
from paceline.schedules.families import interleaved, kfkb
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import zbh1
from paceline.schedules.timeline import Span, Timeline, Transfer
from support.timelines import gpipe_timeline

Event = dict[str, Any]


@pytest.fixture
def trace(tmp_path: Path):
    def write(*timelines: Timeline) -> list[Event]:
        write_trace(timelines, tmp_path / "trace.json")
        values = json.loads((tmp_path / "trace.json").read_text())
        assert values["displayTimeUnit"] == "ms"
        return values["traceEvents"]

    return write


def named(events: Sequence[Event], what: str) -> dict[int, str]:
    key = "pid" if what == "process" else "tid"
    return {event[key]: event["args"]["name"] for event in events if event["name"] == f"{what}_name"}


def ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def test_a_process_a_timeline_and_a_track_a_rank(trace) -> None:
    events = trace(gpipe_timeline(3, name="predicted"), replace(gpipe_timeline(2), name=""))
    assert named(events, "process") == {1: "predicted", 2: "timeline 2"}
    tracks = named(events, "thread")
    assert list(tracks.values()) == [
        *("rank 0", "rank 1", "rank 2", "0→1 activation", "1→0 gradient", "1→2 activation", "2→1 gradient"),
        *("rank 0", "rank 1", "0→1 activation", "1→0 gradient"),
    ]
    order = [event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"]
    assert order == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert {event["tid"] for event in events if event["ph"] != "M"} <= set(tracks)


def test_slices(trace) -> None:
    timeline = gpipe_timeline(3, 4)
    events = trace(timeline)
    tracks = named(events, "thread")
    found = sorted(
        (tracks[event["tid"]], event["name"], ns(event["ts"]), ns(event["dur"]))
        for event in events
        if event["ph"] == "X"
    )
    expected = [
        (f"rank {s.rank}", s.kind if s.micro_batch < 0 else f"{s.kind} {s.micro_batch}", s.start_s, s.end_s)
        for s in timeline.spans
    ]
    expected += [
        (f"{t.source}→{t.target} {t.kind}", f"{t.kind} {t.micro_batch}", t.start_s, t.end_s) for t in timeline.transfers
    ]
    assert found == sorted(
        (track, name, round(start_s * 1e9), round(end_s * 1e9) - round(start_s * 1e9))
        for track, name, start_s, end_s in expected
    )
    sent = next(event for event in events if event["name"] == "gradient 2")
    assert sent["args"] == {"micro_batch": 2, "chunk": 0, "bytes": 1024.0}
    assert sent["cat"] == "transfer"


def check_tracks(events: Sequence[Event]) -> None:
    """Sorted, and nothing overlaps on any track."""
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    until: dict[int, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "X":
            assert ns(event["ts"]) >= until[event["tid"]]
            until[event["tid"]] = ns(event["ts"]) + ns(event["dur"])


def check_flows(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Every flow starts and ends once, in order, inside of a slice."""
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            assert any(
                slice_["ph"] == "X"
                and (slice_["pid"], slice_["tid"]) == (event["pid"], event["tid"])
                and ns(slice_["ts"]) <= ns(event["ts"]) < ns(slice_["ts"]) + ns(slice_["dur"])
                for slice_ in events
            )
    for points in flows.values():
        assert "".join(point["ph"] for point in points) in ("sf", "stf")
        assert points[-1]["bp"] == "e"
        assert len({point["name"] for point in points}) == len({point["cat"] for point in points}) == 1
    return flows


def test_tracks_and_flows(trace) -> None:
    timelines = [gpipe_timeline(3, 4), gpipe_timeline(2, 3, transfer_s=0.0)]
    events = trace(*timelines)
    check_tracks(events)
    flows = check_flows(events)
    assert len(flows) == sum(len(timeline.transfers) for timeline in timelines)
    tracks = named(events, "thread")
    ways = {tuple(tracks[point["tid"]] for point in points) for points in flows.values()}
    assert ("rank 0", "0→1 activation", "rank 1") in ways
    assert ("rank 2", "2→1 gradient", "rank 1") in ways
    assert ("rank 0", "rank 1") in ways  # a transfer that took no time has no slice to pass through


@pytest.mark.parametrize(
    "schedule", [kfkb(3, 6, 2), interleaved(2, 4, 2), zbh1(3, 5)], ids=lambda schedule: schedule.name
)
def test_simulated(trace, schedule: Schedule) -> None:
    costs = Costs.uniform(schedule.num_stages, 0.02, 0.04, transfer_s=0.05, latency_s=0.01)
    timeline = simulate(schedule, costs, timeline=True).timeline
    assert timeline is not None
    events = trace(timeline)
    check_tracks(events)
    assert (
        len(check_flows(events))
        == len(timeline.transfers)
        == 2 * (schedule.num_stages - 1) * schedule.num_micro_batches
    )


def test_what_overlaps_gets_a_track_of_its_own(trace) -> None:
    spans = (Span(0, "reduce", -1, 0, 1.0, 3.0), Span(0, "B", 0, 0, 1.0, 2.0), Span(1, "F", 0, 0, 0.0, 1.0))
    queued = tuple(Transfer("activation", 0, 1, m, 0, 0.1 * m, 1.0 + m, 8.0) for m in range(3))
    events = trace(Timeline(2, spans, queued))
    check_tracks(events)
    tracks = named(events, "thread")
    assert [name for name in tracks.values() if "→" in name] == [
        "0→1 activation",
        "0→1 activation (2)",
        "0→1 activation (3)",
    ]
    places = {event["name"]: tracks[event["tid"]] for event in events if event["ph"] == "X"}
    assert places["B 0"] == "rank 0"  # compute stays where it is looked for
    assert places["reduce"] == "rank 0 (2)"


def test_touching_slices_do_not_overlap_by_a_rounding(trace) -> None:
    edges = [0.1 * m / 3 for m in range(200)]
    spans = tuple(Span(0, "F", m, 0, edges[m], edges[m + 1]) for m in range(199))
    events = trace(Timeline(1, spans))
    check_tracks(events)
    assert list(named(events, "thread").values()) == ["rank 0"]


def test_interleaved_messages_lead_to_the_next_chunk(trace) -> None:
    spans = (
        Span(0, "F", 0, 0, 0.0, 1.0),
        Span(1, "F", 0, 0, 2.0, 3.0),
        Span(0, "F", 0, 1, 4.0, 5.0),
        Span(0, "B", 0, 1, 5.0, 6.0),
        Span(1, "B", 0, 0, 7.0, 8.0),
    )
    transfers = (
        Transfer("activation", 1, 0, 0, 0, 3.0, 4.0, 8.0),
        Transfer("gradient", 0, 1, 0, 1, 6.0, 7.0, 8.0),
        Transfer("gradient", 1, 0, 0, 0, 8.0, 9.0, 8.0),  # nothing there uses it: no arrow
    )
    events = trace(Timeline(2, spans, transfers))
    flows = check_flows(events)
    assert [(ns(points[0]["ts"]), ns(points[-1]["ts"])) for points in flows.values()] == [
        (3_000_000_000 - 1, 4_000_000_000),
        (6_000_000_000 - 1, 7_000_000_000),
    ]
    assert "F 0 chunk 1" in {event["name"] for event in events}


def test_clocks_that_differ(trace) -> None:
    """A receiver whose clock is behind: the arrow ends in its slice, or is left out."""
    early = Transfer("activation", 0, 1, 0, 0, 1.0, 1.1, 8.0)
    inside = (Span(0, "F", 0, 0, 0.0, 1.0), Span(1, "F", 0, 0, 0.9, 1.9))
    assert len(check_flows(trace(Timeline(2, inside, (early,))))) == 1
    before = (Span(0, "F", 0, 0, 0.0, 1.0), Span(1, "F", 0, 0, 0.1, 0.9))
    assert not check_flows(trace(Timeline(2, before, (early,))))
