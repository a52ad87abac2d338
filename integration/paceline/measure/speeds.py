"""One number per stage, followed over a run: smooth while it is level, at once when the level has changed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median


@dataclass
class _Level:
    mean: float = 0.0
    num_intervals: int = 0
    last: list[float] = field(default_factory=list)
    """The values seen since the level changed, as many as it takes to notice a change."""


class Speeds:
    """An exponentially weighted mean of the values of each tuning interval, which starts anew at a changed level.

    An interval brings the values of its steps. With m their median, ``mean += a · (m - mean)``, where a is ``weight``,
    but ``1 / n`` at the n-th interval since the level changed while that is more: the first values are not worth more
    than those that follow.

    Values are off a level if they all exceed ``level · (1 + jump)`` or all fall below ``level / (1 + jump)``. The level
    has changed when the last ``confirm`` values, which may be of several intervals, are off the mean: one step that
    takes long, for whatever reason, is no change, nor is noise of ±10 %. The mean is then the median of the trailing
    run of values that are of the new level: it reaches back, value by value, until the ``confirm`` values before it are
    off the run's own median. The first interval, too, may end on another level than it began with.

    All is in ratios: values in other units give the same answer in those units, and values or their inverses (seconds
    or speeds) change at the same steps.

    Args:
        num_stages: numbers that are followed.
        weight: of the newest interval in the mean, above 0 and at most 1.
        jump: relative change that is a new level, above 0.
        confirm: values in a row that it takes, at least 1.

    Raises:
        ValueError: one of these is out of its range.
    """

    def __init__(self, num_stages: int, weight: float = 0.3, jump: float = 0.15, confirm: int = 2) -> None:
        if num_stages < 1:
            raise ValueError(f"num_stages is {num_stages}: there must be at least 1.")
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}: it must be above 0 and at most 1, for example 0.3.")
        if not 0 < jump < float("inf"):
            raise ValueError(f"jump is {jump}: it must be above 0, for example 0.15 for 15 %.")
        if confirm < 1:
            raise ValueError(f"confirm is {confirm}: it takes at least 1 value to notice a change, better 2.")
        self.weight, self.jump, self.confirm = weight, jump, confirm
        self._levels = [_Level() for _ in range(num_stages)]

    @property
    def values(self) -> tuple[float, ...]:
        """The mean of each stage; 0 where nothing was seen yet."""
        return tuple(level.mean for level in self._levels)

    def update(self, per_step: Sequence[Sequence[float]]) -> tuple[int, ...]:
        """Take in the values of an interval.

        Args:
            per_step: for each stage the values of the steps, oldest first; may be empty. A value that is 0, or not
                finite, says that the step was not measured.

        Returns:
            The stages whose level has changed.

        Raises:
            ValueError: not as many sequences as stages, or a negative value.
        """
        if len(per_step) != len(self._levels):
            raise ValueError(f"values of {len(per_step)} stages: give one sequence for each of {len(self._levels)}.")
        lowest = min((value for values in per_step for value in values), default=0.0)
        if lowest < 0:
            raise ValueError(f"a value is {lowest}: seconds and speeds are not negative, leave it out or give 0.")
        return tuple(
            stage
            for stage, values in enumerate(per_step)
            if self._follow(self._levels[stage], [value for value in values if value > 0 and isfinite(value)])
        )

    def _follow(self, level: _Level, values: list[float]) -> bool:
        if not values:
            return False
        is_first = not level.num_intervals
        if is_first:
            level.mean = median(values)
        seen = [*level.last, *values]
        changed = len(seen) >= self.confirm and self._are_off(seen[-self.confirm :], level.mean)
        if changed:
            run = self._last_level(seen)
            level.mean, level.num_intervals, seen = median(run), 1, seen[-len(run) :]
        else:
            level.num_intervals += 1
            level.mean += max(self.weight, 1 / level.num_intervals) * (median(values) - level.mean)
        level.last = seen[-self.confirm :]
        return changed and not is_first

    def _are_off(self, values: Sequence[float], mean: float) -> bool:
        return min(values) > mean * (1 + self.jump) or max(values) < mean / (1 + self.jump)

    def _last_level(self, values: Sequence[float]) -> list[float]:
        run = [values[-1]]
        for stop in range(len(values) - 1, 0, -1):
            if self._are_off(values[max(0, stop - self.confirm) : stop], median(run)):
                break
            insort(run, values[stop - 1])
        return run
