"""The average of what repeats, for sums: how long many computations take together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

ONCE = 3.0
"""A value so many times the next largest happened once: a compilation, a step beside somebody else's work."""


def without_once(entries: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """``entries`` in the order of their values, without the largest if no other comes near it; at least one is left.

    Args:
        value: of an entry, from 0 upwards.
    """
    found = sorted(entries, key=value)
    if len(found) > 1 and value(found[-1]) > ONCE * value(found[-2]):
        found.pop()
    return found


def recurring_mean(values: Iterable[float]) -> float:
    """Mean of ``values``, without the largest if no other comes near it.

    Where ranks share cores, durations are skewed: most are short, and some, again and again, twice as long. The median
    does not see those, and a step that is a sum of them takes longer than it says. What comes once does not come in
    the next step.

    Args:
        values: durations in seconds, or anything else from 0 upwards; at least one.

    Example::

        recurring_mean([1.0, 1.0, 2.0, 2.0])  # 1.5
        recurring_mean([1.0, 1.0, 9.0])  # 1.0
    """
    return fmean(without_once(values, float))
