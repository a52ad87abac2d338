"""Whether something grows: a line through noisy samples that a few outliers do not turn. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_BYTES = 30e6
MOST_SHARE = 0.03
MOST_MORE = 2.0
"""Of descriptors, and of threads."""

LEAST_SAMPLES = 20
LEAST_SECONDS = 15.0
LEAST_SECONDS_OF_MEMORY = 60.0
"""Before that it is filled for the first time: heaps, caches, what is imported late."""

BINS = 100


@dataclass(frozen=True)
class Trend:
    """Of the second half of a series: its level, and by how much it kept growing in ``seconds``."""

    level: float
    growth: float
    seconds: float
    samples: int

    @property
    def is_judged(self) -> bool:
        """Whether it was watched for long enough to tell."""
        return self.samples >= LEAST_SAMPLES and self.seconds >= LEAST_SECONDS

    @property
    def leaks_memory(self) -> bool:
        """Of bytes: whether they grow by 3 % or 30 MB."""
        long_enough = self.is_judged and self.seconds >= LEAST_SECONDS_OF_MEMORY
        return long_enough and self.growth >= min(MOST_SHARE * self.level, MOST_BYTES)

    @property
    def leaks(self) -> bool:
        """Of descriptors or threads."""
        return self.is_judged and self.growth >= MOST_MORE


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes through all pairs. Right while less than 29 % of the values are not.

    >>> slope([0, 1, 2, 3, 4, 5], [5, 7, 9, 1000, 13, 15])
    2.0
    """
    pairs = combinations(zip(times, values, strict=True), 2)
    slopes = [(b - a) / (u - t) for (t, a), (u, b) in pairs if u != t]
    return statistics.median(slopes) if slopes else 0.0


def medians(values: Sequence[float], most: int) -> list[float]:
    """Of as many neighbours as it takes to get ``most`` values at most.

    >>> medians([1, 2, 9, 4, 5, 6], 2)
    [2, 5]
    """
    size = max(-(-len(values) // most), 1)
    return [statistics.median(values[start : start + size]) for start in range(0, len(values), size)]


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Of the second half of the time. What leaks grows in all of it: it counts twice what the quarter with less has.

    Something that is filled once, however late, is in one of the quarters only.
    """
    if not times:
        return Trend(0.0, 0.0, 0.0, 0)
    middle = (times[0] + times[-1]) / 2
    late = [(t, v) for t, v in zip(times, values, strict=True) if t >= middle]
    seconds = late[-1][0] - late[0][0]
    cut = late[0][0] + seconds / 2
    quarters = [[(t, v) for t, v in late if t <= cut], [(t, v) for t, v in late if t >= cut]]
    steepness = min(_steepness(quarter) for quarter in quarters)
    return Trend(statistics.median(v for _, v in late), steepness * seconds, seconds, len(late))


def _steepness(points: Sequence[tuple[float, float]]) -> float:
    times, values = [t for t, _ in points], [v for _, v in points]
    return slope(medians(times, BINS), medians(values, BINS))
