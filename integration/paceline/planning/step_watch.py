"""Notice that steps have become shorter or longer: then a new plan should not wait for its turn."""

from __future__ import annotations

from collections import deque
from statistics import median

CHANGED, LEAST_S = 0.2, 0.005
"""A step differs if it is longer or shorter by this share, and by so many seconds."""

IN_A_ROW = 2
"""Steps that must differ in the same direction: one may have met a checkpoint, or a pause of the host."""

SETTLED = 3
"""Steps after a planning, but for the first, which tell what is usual."""

REMEMBERED = 16


class StepWatch:
    """Compares each step with those since the last planning. One that knows of a change waits until it is told of the
    next planning.

    Attributes:
        has_changed: whether the last steps were unlike those before.
    """

    def __init__(self) -> None:
        self.has_changed = False
        self._usual: deque[float] = deque(maxlen=REMEMBERED)
        self._unlike: list[float] = []
        self._skipped, self._wait = 0, 1

    def add(self, seconds: float) -> None:
        """A step took so long."""
        if self._skipped < self._wait:
            self._skipped += 1
        elif len(self._usual) < SETTLED:
            self._usual.append(seconds)
        elif not self.has_changed:
            usual = median(self._usual)
            difference = seconds - usual
            if abs(difference) <= max(CHANGED * usual, LEAST_S):
                self._usual.append(seconds)
                self._unlike = []
                return
            if self._unlike and (self._unlike[-1] > 0) != (difference > 0):
                self._unlike = []
            self._unlike.append(difference)
            self.has_changed = len(self._unlike) == IN_A_ROW

    def planned(self, *, switched: bool) -> None:
        """Forget what was usual. After a change that led to nothing the next is looked for twice as late."""
        was_alarm = self.has_changed
        wait = 2 * self._wait if was_alarm and not switched else 1
        self.has_changed, self._unlike, self._skipped, self._wait = False, [], 0, wait
        self._usual.clear()
