"""Costs and timelines of ranks that hold several stages: what was simulated, reported, and measured is the same."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from paceline.runtime.measured_costs import MeasuredCosts
from paceline.runtime.rank_reports import is_ring, messages, timeline
from paceline.schedules import asynchronous
from paceline.schedules.costs import Costs, Link
from paceline.schedules.directions import routes as routes_of
from paceline.schedules.families import chunked_route, dualpipev, interleaved
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import zbh1
from support.reports import simulated

OFFSETS = (0.0, 7.5, -3.25, 11.0)

CASES: dict[str, tuple[Schedule, tuple[tuple[int, ...], ...]]] = {
    "interleaved": (interleaved(3, 6, 2), (chunked_route("interleaved", 3, 2),)),
    "dualpipev": (dualpipev(3, 6), (chunked_route("dualpipev", 3, 2),)),
    "four directions": (asynchronous.multidirection(4, 8).unrolled(1), routes_of(4)),
    "one stage": (interleaved(3, 6, 1), ((0, 1, 2),)),
}


def costs_of(schedule: Schedule) -> Costs:
    """Every stage takes its own time, and every boundary has its own link."""
    stages = range(schedule.num_stages)
    links = tuple(Link(1e6 * (1 + stage), 0.0) for stage in stages[1:])
    return Costs(
        tuple(0.01 * (1 + stage) for stage in stages),
        tuple(0.03 * (1 + stage % 3) for stage in stages),
        tuple(1000.0 * (2 + stage) for stage in stages[1:]),
        links,
        links,
        speeds=(1.0, 0.5, 2.0, 1.5)[: schedule.num_ranks] if schedule.num_directions > 1 else (),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_timeline_is_that_of_the_run_by_whatever_clocks(name: str) -> None:
    schedule, routes = CASES[name]
    truth = simulate(schedule, costs_of(schedule), timeline=True).timeline
    assert truth is not None
    reports = simulated(schedule, costs_of(schedule), offsets_s=OFFSETS)
    found = timeline(reports, routes, schedule.num_micro_batches)
    assert (found.num_ranks, found.name, found.stages) == (truth.num_ranks, truth.name, truth.stages)
    for kind in ("spans", "transfers"):
        wanted, got = (sorted(getattr(line, kind), key=lambda one: (one[:5], one.start_s)) for line in (truth, found))
        assert [one[:4] for one in got] == [one[:4] for one in wanted]
        assert [one.end_s for one in got] == pytest.approx([one.end_s for one in wanted])


@pytest.mark.parametrize("name", CASES)
def test_costs_are_those_of_every_stage(name: str) -> None:
    schedule, routes = CASES[name]
    truth = costs_of(schedule)
    measured = MeasuredCosts(routes)
    measured.update(simulated(schedule, truth, offsets_s=OFFSETS))
    found = measured.costs(2)
    assert simulate(schedule, found).makespan_s == pytest.approx(simulate(schedule, truth).makespan_s, rel=0.05)
    # Where a stage is on several devices, only the products are known: of its work and a device's speed.
    for rank, held in enumerate(schedule.stages):
        speed, other = (costs.speeds[rank] if costs.speeds else 1.0 for costs in (found, truth))
        for stage in held:
            assert found.forward_s[stage] / speed == pytest.approx(truth.forward_s[stage] / other)
            assert found.backward_s[stage] / speed == pytest.approx(truth.backward_s[stage] / other)
    for boundary in range(schedule.num_stages - 1):
        places = {(route[boundary], route[boundary + 1]) for route in routes}
        if all(a != b for a, b in places):
            assert found.message_bytes[boundary] == truth.message_bytes[boundary]
            assert 0 < found.down[boundary].bytes_per_s < inf
    cells = [
        [cell for held in schedule.cells for cell in held if cell % schedule.num_stages == s]
        for s in range(schedule.num_stages)
    ]
    assert found.activation_bytes == tuple(10.0 + max(own) for own in cells)
    assert len(measured.room_bytes) == len(found.hosts) == schedule.num_ranks


def test_steps_that_run_into_each_other_are_looked_at_by_rank() -> None:
    """A rank's window begins when it likes: the time from the first one's begin to the last one's end is no step."""
    stream = asynchronous.multidirection(4, 8)
    truth = Costs.uniform(4, 0.01, 0.02, transfer_s=0.001)
    reports = simulated(stream.unrolled(6), truth, num_windows=6)
    for report in reports:
        for step in report.steps:  # a wait for an update among the computations
            where = len(step.spans) // 2
            step.spans.insert(where, replace(step.spans[where], kind="step", number=-1, end=step.spans[where].start))
    measured = MeasuredCosts(stream.routes, has_flush=False)
    measured.update([replace(report, steps=report.steps[2:5]) for report in reports])
    assert measured.measured_s == pytest.approx(0.24, rel=0.15)
    assert measured.step_s == pytest.approx(0.0, abs=1e-9)
    assert measured.costs(2).forward_s == pytest.approx((0.01,) * 4)


def test_updates_among_the_computations_are_beside_them() -> None:
    stream = asynchronous.one_direction(2, 4)
    reports = simulated(stream.unrolled(3), Costs.uniform(2, 0.01, 0.02), num_windows=3)
    for report in reports:
        for step in report.steps:  # everything after the second span comes later, by what an update takes
            late = [replace(span, start=span.start + 0.05, end=span.end + 0.05) for span in step.spans[2:]]
            update = replace(step.spans[1], kind="step", number=-1, start=step.spans[1].end, end=late[0].start)
            step.spans[2:] = [update, *late]
            step.ended_s += 0.05
    measured = MeasuredCosts(stream.routes, has_flush=False)
    measured.update(reports)
    assert measured.step_s == pytest.approx(0.05, abs=0.011)
    assert measured.costs(2).forward_s == pytest.approx((0.01, 0.01)), "the host's time beside them is none of it"


def test_a_window_is_numbered_from_its_oldest_step() -> None:
    stream = asynchronous.one_direction(4, 4)
    reports = simulated(stream.unrolled(5), Costs.uniform(4, 0.01, 0.02), num_windows=5)
    found = timeline(reports, stream.routes, 4, index=3)
    numbers = {span.micro_batch for span in found.spans}
    assert min(numbers) >= 0
    assert max(numbers) < 4 * (stream.most_lag + 1) + 4
    assert len(found.transfers) < len(messages(reports, stream.routes)), "those of other steps are in other timelines"


def test_who_is_next_to_whom() -> None:
    assert is_ring((chunked_route("interleaved", 3, 2),))
    assert not is_ring((chunked_route("interleaved", 2, 2),)), "they are neighbours as it is"
    assert not is_ring((chunked_route("dualpipev", 3, 2),))
    assert is_ring(routes_of(8))
    assert not is_ring(routes_of(6))


def test_a_split_backward_is_its_two_parts() -> None:
    schedule, routes = zbh1(3, 6), ((0, 1, 2),)
    truth = replace(Costs.uniform(3, 0.01, 0.03, transfer_s=0.001), weight_s=(0.01, 0.02, 0.01))
    measured, reports = MeasuredCosts(routes), simulated(schedule, truth)
    measured.update(reports)
    found = measured.costs(2)
    assert found.backward_s == pytest.approx(truth.backward_s)
    assert found.weight_s == pytest.approx(truth.weight_s)
    assert simulate(schedule, found).makespan_s == pytest.approx(simulate(schedule, truth).makespan_s, rel=0.02)
    sent = timeline(reports, routes, 6).transfers
    assert [one.kind for one in sent].count("gradient") == [one.kind for one in sent].count("activation") == 12
