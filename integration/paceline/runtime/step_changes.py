"""Steps that have become shorter or longer: the first rank notices, and all ranks plan soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..planning.step_watch import StepWatch

MEASURED = 2
"""Steps that are measured after a change was noticed, before a planning."""

FEW = 4 * MEASURED
"""Steps from one planning to the next up to which it counts for a change just before it."""


class Notice(Protocol):
    """Flags that go along with what the ranks tell each other when a step begins."""

    notices_change: bool
    """Whether this rank has noticed that steps are not what they were."""

    change_is_noticed: bool
    """Whether any rank had, when the last step began; the same on all ranks."""


class StepChanges:
    """Compares the steps between two plannings. Every rank has one; only the one that decides looks at its clock.

    Args:
        forget: drops, on all ranks, what was measured since the last planning.
    """

    def __init__(self, notice: Notice, forget: Callable[[], None], *, decides: bool) -> None:
        self._notice, self._forget, self._decides = notice, forget, decides
        self._watch = StepWatch()
        self._has_planned = self._is_told = False
        self._steps = 0
        """Since the last planning."""

    def step_took(self, seconds: float, size: float = 1.0) -> None:
        """A step of ``size`` tokens, or samples, is over, which took so long on this rank's host."""
        self._steps += 1
        if self._has_planned and self._decides:
            self._watch.add(seconds, size)
            self._notice.notices_change = self._watch.has_changed and not self._is_told

    def planned(self, *, switched: bool) -> None:
        """A planning is over: what steps take from now on is usual, but after a change that not all have heard of."""
        self._has_planned = True
        steps, self._steps = self._steps, 0
        if self._watch.has_changed and not self._is_told and steps > FEW:
            return  # what was planned with is mostly of the steps before
        self._watch.planned(switched=switched)
        self._is_told = self._notice.notices_change = False

    def planning_by(self, done: int, next_planning: int) -> int | None:
        """When everything is to be planned anew, after ``done`` steps, if a change was noticed. The same on all ranks.

        Args:
            next_planning: when the next planning of anything is to be. One that is near counts for all, if it is not
                mostly of the steps before the change.
        """
        is_noticed, self._notice.change_is_noticed = self._notice.change_is_noticed, False
        if not is_noticed:
            return None
        self._is_told, self._notice.notices_change = True, False
        ahead = next_planning - done
        if ahead <= MEASURED and self._steps + ahead <= FEW:
            return next_planning
        self._forget()
        return done + MEASURED
