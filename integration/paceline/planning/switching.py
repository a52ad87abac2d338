"""The switch rule: one for schedules, partitions and expert placements."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Decision:
    """Whether to switch, with the numbers that decided it.

    Args:
        switch: whether it pays.
        why: one line for the log.
        now_s: seconds of a step as it runs.
        best_s: seconds of a step with the best option.
        switch_s: seconds that switching costs, once.
        gain_s: seconds that the best option saves over the horizon.
        suffered_s: seconds lost so far by not having switched since a better option appeared.
    """

    switch: bool
    why: str
    now_s: float
    best_s: float
    switch_s: float
    gain_s: float
    suffered_s: float


class SwitchRule:
    """Switch when the loss suffered so far and the gain over the horizon together exceed what the switch costs.

    With nothing suffered that is ``now_s * K > best_s * K + switch_s`` for a horizon of K steps. A switch too dear for
    one horizon may still pay over a run whose length nobody knows, as skis are bought once the rents would exceed their
    price: so what the better option would have saved is added up. For re-planning at most K steps apart
    and an option that stays as much better as it is, the job loses at most ``switch_s`` before it pays ``switch_s``:
    never more than twice what knowing the future would have cost. (Adding the coming horizon to the sum is what keeps
    that bound exact: with the past alone, up to two periods more would be lost before the sum is seen to exceed.)

    The sum starts anew when what runs is the best again, and after a switch.

    Args:
        horizon_steps: K, steps that a gain is counted for: as a rule the tuning interval.

    Raises:
        ValueError: the horizon is less than one step.
    """

    def __init__(self, horizon_steps: int) -> None:
        if horizon_steps < 1:
            raise ValueError(
                f"horizon_steps is {horizon_steps}: it must be at least 1, give the steps between plannings."
            )
        self.horizon_steps = horizon_steps
        self.suffered_s = 0.0
        self._was_better = False

    def consider(self, now_s: float, best_s: float, switch_s: float, steps: int) -> Decision:
        """Decide once, and remember what staying has cost.

        Args:
            now_s: seconds of a step as it runs, by the newest measurements.
            best_s: seconds of a step with the best option, by the same.
            switch_s: seconds that switching to it would cost, once.
            steps: done since the last decision.

        Raises:
            ValueError: a number is negative, infinite or none.
        """
        for name, value in (("now_s", now_s), ("best_s", best_s), ("switch_s", switch_s), ("steps", steps)):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: it must be a number from 0 upwards; measure it again.")
        gain = now_s - best_s
        if gain <= 0:
            self._forget()
            return Decision(False, "what runs is the best", now_s, best_s, switch_s, 0.0, 0.0)
        if self._was_better:
            self.suffered_s += gain * steps
        self._was_better = True
        ahead, suffered = gain * self.horizon_steps, self.suffered_s
        switch = suffered + ahead > switch_s
        saving = f"saves {ahead:.4g} s in {self.horizon_steps} steps"
        lost = f"; {suffered:.4g} s lost so far" if suffered else ""
        why = f"{saving}{lost}, {'more' if switch else 'no more'} than the {switch_s:.4g} s of switching"
        if switch:
            self._forget()
        return Decision(switch, why, now_s, best_s, switch_s, ahead, suffered)

    def could_pay(self, gain_s: float, switch_s: float, steps: int) -> bool:
        """Whether :meth:`consider` would switch for this gain of a step; nothing is remembered."""
        suffered = self.suffered_s + (gain_s * steps if self._was_better else 0.0)
        return gain_s > 0 and suffered + gain_s * self.horizon_steps > switch_s

    def _forget(self) -> None:
        self.suffered_s = 0.0
        self._was_better = False
