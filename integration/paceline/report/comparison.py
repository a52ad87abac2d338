"""Breakdown of a step's time by rank, and the largest difference from the prediction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from paceline.schedules.timeline import Span, Timeline

_DIGITS = 9  # of seconds: sums of floats, no clock shows more


class RankTime(NamedTuple):
    """One rank's share of a step; the three add up to the step. Seconds.

    ``other_s`` is what ran besides the computation (reduction, optimizer), as far as it did not overlap with it.
    """

    rank: int
    compute_s: float
    other_s: float
    idle_s: float


class Difference(NamedTuple):
    """A difference from the prediction on one rank: of the wait before ``action``, or of ``action`` itself. Seconds."""

    rank: int
    is_wait: bool
    action: str
    predicted_s: float
    measured_s: float

    def __str__(self) -> str:
        what = f"waited before {self.action}" if self.is_wait else f"took for {self.action}"
        predicted, measured = format_duration(self.predicted_s), format_duration(self.measured_s)
        return f"rank {self.rank} {what} {measured}, predicted {predicted}"


def largest_difference(predicted: Timeline, measured: Timeline) -> Difference | None:
    """Set two timelines of the same step side by side: the wait or the action that differs most; None without any.

    A late start is blamed on the one wait that grew, not on all that came after it: what is compared is how long each
    action took and how long its rank stood still before it.

    Raises:
        ValueError: they have different numbers of ranks.
    """
    if predicted.num_ranks != measured.num_ranks:
        raise ValueError(
            f"{predicted.num_ranks} ranks were predicted and {measured.num_ranks} measured: compare timelines of one "
            "pipeline."
        )
    expected = _waits(predicted)
    found = []
    # In order of time: of equal differences the first, which is nearer to the cause.
    for key, (wait_s, span) in sorted(_waits(measured).items(), key=lambda item: item[1][1].start_s):
        if key in expected and is_compute(span):  # what ends a step is predicted for all ranks at once
            expected_s, other = expected[key]
            found.append(Difference(span.rank, True, label(span), expected_s, wait_s))
            took_s = other.end_s - other.start_s, span.end_s - span.start_s
            found.append(Difference(span.rank, False, label(span), *took_s))
    return max(found, key=lambda one: round(abs(one.measured_s - one.predicted_s), _DIGITS), default=None)


def rank_times(timeline: Timeline) -> tuple[RankTime, ...]:
    """Seconds that each rank computed, did something else, and stood idle until the step ended."""
    by_rank: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        by_rank[span.rank].append(span)
    times = []
    for rank, spans in enumerate(by_rank):
        compute_s, busy_s = _covered_s(filter(is_compute, spans)), _covered_s(spans)
        times.append(RankTime(rank, compute_s, max(0.0, busy_s - compute_s), max(0.0, timeline.end_s - busy_s)))
    return tuple(times)


def bubble_share(timeline: Timeline) -> float:
    """The part of all ranks' time in which nothing ran, 0 to 1."""
    total_s = timeline.num_ranks * timeline.end_s
    return sum(time.idle_s for time in rank_times(timeline)) / total_s if total_s else 0.0


def is_compute(span: Span) -> bool:
    """Whether ``span`` is a forward or a backward, or a part of one, rather than a reduction or the like."""
    return span.kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE)


def label(span: Span) -> str:
    """``F3``, ``B3.1`` (of chunk 1), ``reduce``."""
    if not is_compute(span):
        return span.kind
    return f"{span.kind}{span.micro_batch}" + (f".{span.chunk}" if span.chunk else "")


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit for times up to ``longest_s``: how many of it make a second, and its name."""
    if longest_s >= 1:
        return 1.0, "s"
    return (1e3, "ms") if longest_s >= 1e-3 else (1e6, "µs")


def format_figure(value: float, digits: int = 4) -> str:
    """Format with so many digits, trailing zeros too, so that figures side by side show their precision.

    >>> format_figure(2.7), format_figure(11.0), format_figure(0.000812), format_figure(84310.2)
    ('2.700', '11.00', '0.0008120', '84,310')
    """
    is_whole = 10 ** (digits - 1) <= abs(float(f"{value:.{digits}g}")) < 1e12
    return f"{value:,.0f}" if is_whole else f"{value:#.{digits}g}"


def format_duration(seconds: float) -> str:
    """``1.270 s``, ``20.4 ms``, ``3.0 µs``."""
    per_s, unit = time_unit(abs(seconds) or 1e-3)
    return f"{seconds * per_s:.{3 if unit == 's' else 1}f} {unit}"


def _covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of ``spans`` ran."""
    covered = until = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        covered += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return covered


def _waits(timeline: Timeline) -> dict[tuple[int, str, int, int], tuple[float, Span]]:
    """Idle seconds before every action, and its span."""
    idle_since = [0.0] * timeline.num_ranks
    waits = {}
    for span in sorted(timeline.spans, key=lambda span: (span.rank, span.start_s, span.end_s)):
        wait_s = max(0.0, span.start_s - idle_since[span.rank])
        waits[span.rank, span.kind, span.micro_batch, span.chunk] = (wait_s, span)
        idle_since[span.rank] = max(idle_since[span.rank], span.end_s)
    return waits
