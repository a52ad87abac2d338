"""How long a step takes where messages do not all take the same: replayed over what links did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean

from .costs import Costs, Link
from .events import Visits, replay
from .schedule import Schedule
from .stream import Stream

_STEPS = 6
"""Of a stream, from the first one's end on."""

_OF_STREAM = 4
"""Beginnings of a stream."""

_MATTERS = 0.01
"""Share of a forward that a message must take, at its slowest, for its variation to be looked at."""


def varies(costs: Costs) -> bool:
    """Whether messages take different times that a step could notice."""
    links = zip(2 * costs.message_bytes, (*costs.down, *costs.up), strict=False)
    least_s = _MATTERS * max(costs.forward_s)
    return any(
        max(link.variation) * size > least_s * _bytes_per_s(costs, link.bytes_per_s)
        for size, link in links
        if link.variation and min(link.variation) < max(link.variation)
    )


def without_variation(costs: Costs, factor: float = 1.0) -> Costs:
    """With messages that all take ``factor`` times as long as they do in the mean."""
    return replace(
        costs,
        down=tuple(Link(link.bytes_per_s / factor, link.latency_s) for link in costs.down),
        up=tuple(Link(link.bytes_per_s / factor, link.latency_s) for link in costs.up),
        egress_bytes_per_s=tuple(rate / factor for rate in costs.egress_bytes_per_s),
    )


def _bytes_per_s(costs: Costs, of_link: float) -> float:
    return min(of_link, *costs.egress_bytes_per_s) if costs.egress_bytes_per_s else of_link


def phases(count: int) -> list[float]:
    """Evenly spread beginnings of a step in the links' variation: the same for all schedules that are compared.

    No number is drawn: a schedule is no better than another because of its luck. They go back and forth over the
    whole, so that the first few are spread as well (van der Corput).
    """
    return [_reversed_bits(number) for number in range(count)]


def _reversed_bits(number: int) -> float:
    value, unit = 0.0, 0.5
    while number:
        value += unit * (number & 1)
        number, unit = number >> 1, unit / 2
    return value


def resampled_s(order: Schedule | Stream, costs: Costs, beginnings: Sequence[float]) -> list[float]:
    """Seconds of a step that begins at each of these phases of the links' variation; ``step_s`` included.

    Of a stream it is the mean of some steps after the first one; of the first few beginnings, since that takes longer.
    """
    if isinstance(order, Schedule):
        visits = Visits(order, costs)
        return [replay(order, costs, visits, phase).end_s + costs.step_s for phase in beginnings]
    costs = costs.without_ahead()
    first, run = order.unrolled(1), order.unrolled(1 + _STEPS)
    of_first, of_run = Visits(first, costs), Visits(run, costs)
    return [
        (replay(run, costs, of_run, phase).end_s - replay(first, costs, of_first, phase).end_s) / _STEPS + costs.step_s
        for phase in beginnings[:_OF_STREAM]
    ]


def expected(seconds: Sequence[float], risk: float | None = None) -> float:
    """Mean, or the quantile ``risk``: a step that is longer in one of 1 / (1 - risk) cases."""
    if risk is None:
        return fmean(seconds)
    return sorted(seconds)[max(0, ceil(risk * len(seconds)) - 1)]
