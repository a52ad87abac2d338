"""How long a step of a stream takes when the run has left its start behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .costs import Costs
from .simulate import simulate
from .stream import UPDATE, Stream

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


class _Run(NamedTuple):
    """Of the start of a run: the ends of all actions of its steps, and the memory that it takes."""

    ends_s: list[list[float]]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]


def period(stream: Stream, costs: Costs) -> float:
    """Seconds of a step in the steady state: :attr:`Steady.period_s`."""
    return steady(stream, costs).period_s


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
    schedule_costs = replace(costs, step_s=0.0)
    num_actions = sum(map(len, stream.windows))
    num_steps = 4 * (stream.most_lag + 1)
    while True:
        run = _run(stream, schedule_costs, num_steps)
        found = _repeated(run.ends_s, stream.most_lag + 1)
        if found is not None or 2 * num_steps * num_actions > _MOST_ACTIONS:
            break
        num_steps *= 2
    if found is None:
        half = len(run.ends_s) // 2
        found = (max(run.ends_s[-1]) - max(run.ends_s[half - 1])) / (len(run.ends_s) - half)
    return Steady(
        found + costs.step_s,
        max(run.ends_s[0]) + costs.step_s,
        simulate(stream.unrolled(1), costs).busy_s,
        run.peak_activations,
        run.peak_bytes,
    )


def _run(stream: Stream, costs: Costs, num_steps: int) -> _Run:
    simulation = simulate(stream.unrolled(num_steps), costs, timeline=True)
    assert simulation.timeline is not None
    place: dict[tuple[int, str, int, int], int] = {}
    for rank, window in enumerate(stream.windows):
        for kind, micro_batch, chunk, _ in window:
            if kind != UPDATE:
                place[rank, kind, micro_batch, chunk] = len(place)
    ends_s = [[0.0] * len(place) for _ in range(num_steps)]
    for rank, kind, number, chunk, _, end_s in simulation.timeline.spans:
        step, micro_batch = divmod(number, stream.num_micro_batches)
        ends_s[step][place[rank, kind, micro_batch, chunk]] = end_s
    # What the drain has changed is left out.
    return _Run(ends_s[: num_steps - stream.most_lag - 1], simulation.peak_activations, simulation.peak_bytes)


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
