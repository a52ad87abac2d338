"""How a run's costs may be by the next planning: as they were before, as often as they have changed so far.

A schedule that is the fastest by what links do now may be the slowest of all a moment later, and the next planning
comes too late for it. Where tenants come and go, what counts is the mean over what comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

CHANGED = 0.1
"""A step that is longer or shorter by this share is of another state of the cluster."""

MOST = 0.5
"""Share of the time until the next planning that other states count for, at most."""

CAUTION = 2
"""Plannings without a change that are added to what was seen: one change in two plannings is no habit."""

KEPT = 8
"""Plannings that are looked back on."""


class State(NamedTuple):
    """A state of the cluster that may come.

    Args:
        planning: number of the last one that found it.
        share: of the time until the next planning.
    """

    planning: int
    share: float


def outlook(seconds: Sequence[float]) -> list[State]:
    """States that may come before the next planning; the present one has the rest of the time.

    From one planning to the next it is another one as often as that has happened. Which one it is then, nobody knows:
    each counts as often as it was there. It is noticed about an interval later.

    Args:
        seconds: of the same step, by what each planning measured; the last one is the present.
    """
    changes = sum(_differ(before, after) for before, after in pairwise(seconds))
    found: dict[int, int] = {}  # by the last planning with this state, how many had it
    for index in range(len(seconds) - 2, -1, -1):
        if _differ(seconds[index], seconds[-1]):
            same = next((known for known in found if not _differ(seconds[known], seconds[index])), index)
            found[same] = found.get(same, 0) + 1
    share = min(changes / (len(seconds) - 1 + CAUTION), MOST) if found else 0.0
    return [State(index, share * count / sum(found.values())) for index, count in found.items()]


def _differ(one: float, other: float) -> bool:
    return max(one, other) > (1 + CHANGED) * min(one, other)
