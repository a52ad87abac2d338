"""Notice that steps have become shorter or longer: then a new plan should not wait for its turn."""

from __future__ import annotations

from collections import deque
from statistics import median

CHANGED, LEAST_S, DEVIATIONS = 0.2, 0.005, 5.0
"""A step differs if it is longer or shorter by this share, by so many seconds, and by so many times what steps usually
deviate from their median (in the median: two thirds of a standard deviation)."""

IN_A_ROW = 2
"""Steps that must differ in the same direction: one may have met a checkpoint, or a pause of the host."""

SETTLED = 3
"""Steps, but for the first, which tell what is usual."""

REMEMBERED, LONGEST_WAIT = 16, 64


class StepWatch:
    """Compares each step with those before. One that knows of a change waits until it is told of a planning.

    Attributes:
        has_changed: whether the last steps were unlike those before.
    """

    def __init__(self) -> None:
        self.has_changed = False
        self._usual: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds for what a step of size 1 has."""
        self._unlike: list[float] = []
        self._skipped, self._wait = 0, 1

    def add(self, seconds: float, size: float = 1.0) -> None:
        """A step took so long. Steps of different sizes, in tokens, take times in proportion."""
        each = seconds / size
        if self._skipped < self._wait:
            self._skipped += 1
        elif len(self._usual) < SETTLED:
            self._usual.append(each)
        elif not self.has_changed:
            usual = median(self._usual)
            deviation = median(abs(one - usual) for one in self._usual)
            difference = each - usual
            if abs(difference) <= max(CHANGED * usual, LEAST_S / size, DEVIATIONS * deviation):
                self._usual.append(each)
                self._unlike = []
                return
            if self._unlike and (self._unlike[-1] > 0) != (difference > 0):
                self._unlike = []
            self._unlike.append(difference)
            self.has_changed = len(self._unlike) == IN_A_ROW

    def planned(self, *, switched: bool) -> None:
        """Forget what was usual, if something is different now. After an alarm the next one comes later, twice as late
        each time, until a planning comes without one.
        """
        self._wait = min(2 * self._wait, LONGEST_WAIT) if self.has_changed else 1
        if self.has_changed or switched:
            self._usual.clear()
            self._skipped = 0
        self.has_changed, self._unlike = False, []
