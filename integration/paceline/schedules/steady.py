"""How long a step of a stream takes when the run has left its start behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Costs
from .events import Visits, replay
from .simulate import simulate
from .stream import Stream

# Two steps that differ by less of the time since the start are equal: sums in another order differ by rounding.
_ROUNDING = 1e-10
_LONGEST_PATTERN = 4
# What is simulated at most, a few seconds. Unequal stages may settle later than any bound; what is found then is the
# mean of the later half.
_MOST_ACTIONS = 100_000


@dataclass(frozen=True)
class Steady:
    """A predicted step of the steady state.

    Attributes:
        period_s: from a step's end to the next one's, ``step_s`` of the costs included.
        first_s: of the first step alone, from the start of the run to the end of its last backward.
        busy_s: by rank, what it computes in a step, ``step_s`` included.
        peak_activations: by rank, most micro-batches (of all its chunks) whose forward has begun and whose backward
            has not ended.
        peak_bytes: by rank, most memory at a time.
    """

    period_s: float
    first_s: float
    busy_s: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """By rank, the rest of the period."""
        return tuple(max(0.0, self.period_s - busy) for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time."""
        return sum(self.idle_s) / (len(self.busy_s) * self.period_s) if self.period_s else 0.0


def period(stream: Stream, costs: Costs) -> float:
    """Seconds of a step in the steady state: :attr:`Steady.period_s`."""
    return steady(stream, costs).period_s


def drained_s(stream: Stream, costs: Costs) -> float:
    """Seconds that a drain costs: the run ends its steps, and begins anew without what would lag."""
    found = steady(stream, costs)
    return max(0.0, found.first_s - found.period_s)


def steady(stream: Stream, costs: Costs) -> Steady:
    """Simulate the beginning of a run until its steps repeat.

    That is exact up to rounding where all stages and all links are alike, and mostly elsewhere. Updates are taken to be
    there when they are due; ``step_s`` is added in full, as if no bubble could hide any of it.

    Args:
        stream: any.
        costs: one value a stage of one direction.

    Raises:
        ValueError: costs and stream do not fit.
    """
    costs = costs.without_ahead()
    one_step = simulate(stream.unrolled(1), costs)
    some_steps = simulate(stream.unrolled(stream.most_lag + 2), costs)
    num_actions = sum(map(len, stream.windows))
    num_steps = 4 * (stream.most_lag + 1)
    while True:
        ends_s = _ends_s(stream, costs, num_steps)
        found = _repeated(ends_s, stream.most_lag + 1)
        if found is not None or 2 * num_steps * num_actions > _MOST_ACTIONS:
            break
        num_steps *= 2
    if found is None:
        half = len(ends_s) // 2
        found = (max(ends_s[-1]) - max(ends_s[half - 1])) / (len(ends_s) - half)
    return Steady(
        found + costs.step_s,
        max(ends_s[0]) + costs.step_s,
        one_step.busy_s,
        some_steps.peak_activations,
        some_steps.peak_bytes,
    )


def _ends_s(stream: Stream, costs: Costs, num_steps: int) -> list[list[float]]:
    """When the actions of each step end, in one order for all steps; without the steps that the drain has changed."""
    schedule = stream.unrolled(num_steps)
    visits = Visits(schedule, costs)
    arrived_s = replay(schedule, costs, visits).arrived_s
    ends_s: list[list[float]] = [[] for _ in range(num_steps)]
    for rank, order in enumerate(schedule.orders):
        now = 0.0
        for kind, number, chunk in order:
            visit = visits.of[kind][rank][chunk]
            now = max(now, arrived_s[visit][number]) + visits.seconds[kind][rank][chunk]
            ends_s[number // stream.num_micro_batches].append(now)
    return ends_s[: num_steps - stream.most_lag - 1]


def _repeated(ends_s: Sequence[Sequence[float]], num_steps: int) -> float | None:
    """Seconds of a step, if the last ``num_steps`` are, shifted in time, those shortly before them."""
    within_s = _ROUNDING * max(ends_s[-1])
    for pattern in range(1, _LONGEST_PATTERN + 1):
        if num_steps + pattern > len(ends_s):
            break
        shifts = [
            now - before
            for step in range(len(ends_s) - num_steps, len(ends_s))
            for now, before in zip(ends_s[step], ends_s[step - pattern], strict=True)
        ]
        if max(shifts) - min(shifts) <= within_s:
            return sum(shifts) / len(shifts) / pattern
    return None
