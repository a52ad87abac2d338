"""Where the time of a step went, and where it differs from the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.report.comparison import bubble_share, format_duration, largest_difference, rank_times, time_unit
from paceline.schedules.costs import Costs
from paceline.schedules.families import kfkb
from paceline.schedules.simulate import simulate
from paceline.schedules.timeline import Span, Timeline
from support.timelines import gpipe_timeline


def delayed(timeline: Timeline, rank: int, from_s: float, by_s: float) -> Timeline:
    """``timeline`` with all that ``rank`` starts at ``from_s`` or later delayed."""
    spans = (
        span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s)
        if span.rank == rank and span.start_s >= from_s
        else span
        for span in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


def test_times_add_up_to_the_step() -> None:
    timeline = gpipe_timeline(2, 3)  # 0.29 s
    first, second = rank_times(timeline)
    assert first == pytest.approx((0, 0.18, 0.03, 0.08))
    assert second == pytest.approx((1, 0.18, 0.08, 0.03))
    assert bubble_share(timeline) == pytest.approx(0.11 / 0.58)
    assert bubble_share(Timeline(2, ())) == 0


def test_agrees_with_the_simulator() -> None:
    costs = replace(Costs.uniform(4, 0.02, 0.04, transfer_s=0.021), step_s=0.03)
    simulation = simulate(kfkb(4, 16, 2), costs, timeline=True)
    assert simulation.timeline is not None
    assert simulation.timeline.end_s == pytest.approx(simulation.makespan_s)
    assert bubble_share(simulation.timeline) == pytest.approx(simulation.bubble_fraction)
    assert [time.idle_s for time in rank_times(simulation.timeline)] == pytest.approx(simulation.idle_s)


def test_what_overlaps_counts_once() -> None:
    spans = (Span(0, "F", 0, 0, 0.0, 2.0), Span(0, "reduce", -1, 0, 1.0, 4.0), Span(0, "B", 0, 0, 2.0, 3.0))
    assert rank_times(Timeline(2, spans)) == ((0, 3.0, 1.0, 0.0), (1, 0.0, 0.0, 4.0))


def test_a_late_start_is_blamed_on_the_wait_that_grew() -> None:
    predicted = gpipe_timeline(3, 4)
    third = next(span for span in predicted.spans if (span.rank, span.kind, span.micro_batch) == (1, "B", 2))
    largest = largest_difference(predicted, delayed(predicted, 1, third.start_s, 0.05))
    assert str(largest) == "rank 1 waited before B2 50.0 ms, predicted 0.0 ms"
    late, later = (largest_difference(predicted, delayed(predicted, 1, third.start_s, by_s)) for by_s in (0.001, 0.002))
    assert late is not None
    assert later is not None
    assert late.is_wait
    assert (late.rank, late.action) == (later.rank, later.action) == (1, "B2")
    assert later.measured_s - late.measured_s == pytest.approx(0.001)


def test_a_slow_action_is_found() -> None:
    predicted = Timeline(1, (Span(0, "F", 0, 1, 0.0, 1.0), Span(0, "B", 0, 1, 1.0, 3.0)))
    measured = Timeline(1, (Span(0, "F", 0, 1, 0.5, 1.5), Span(0, "B", 0, 1, 1.5, 2.5), Span(0, "step", -1, 0, 9, 10)))
    assert str(largest_difference(predicted, measured)) == "rank 0 took for B0.1 1.000 s, predicted 2.000 s"
    assert rank_times(predicted) == ((0, 3.0, 0.0, 0.0),)
    assert rank_times(measured) == ((0, 2.0, 1.0, 7.0),)


def test_nothing_in_common() -> None:
    assert largest_difference(Timeline(1, ()), Timeline(1, (Span(0, "F", 0, 0, 0.0, 1.0),))) is None
    with pytest.raises(ValueError, match="2 ranks were predicted and 3 measured: compare timelines of one pipeline"):
        largest_difference(gpipe_timeline(2), gpipe_timeline(3))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.27, "1.270 s"), (0.0204, "20.4 ms"), (3e-6, "3.0 µs"), (0.0, "0.0 ms"), (-0.5, "-500.0 ms")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_units() -> None:
    assert [time_unit(longest) for longest in (2.0, 0.5, 1e-4)] == [(1.0, "s"), (1e3, "ms"), (1e6, "µs")]
