"""The choice among candidates: simulate each with what was measured, then ask whether a switch pays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..schedules.costs import Costs
from ..schedules.schedule import Schedule
from ..schedules.simulate import simulate
from ..schedules.steady import steady
from ..schedules.stream import Stream
from .candidates import Candidate
from .format_costs import AS_IT_IS, FormatCosts, with_format
from .switching import Decision, SwitchRule

# Two predictions this close (relatively) are equal: sums in another order differ by rounding.
TIE = 1e-9

NO_FORMATS: Mapping[str, FormatCosts] = {"": AS_IT_IS}

MADE = 0.01
"""Share of a step that an order made for the costs must save to be chosen: they will not be so again."""

ROUNDS = 0.02
"""Share of a step that a format must save to be chosen: it costs precision."""


class Prediction(NamedTuple):
    """A predicted step with one candidate.

    Args:
        candidate: which.
        step_s: seconds of the step.
        peak_bytes: in memory on the fullest device: live activations and all else.
    """

    candidate: Candidate
    step_s: float
    peak_bytes: float


@dataclass(frozen=True)
class Choice:
    """The outcome of one re-planning.

    Args:
        best: the candidate with the shortest step; what runs, if nothing is shorter.
        current: what ran.
        predictions: of all candidates with known costs, shortest first.
        decision: whether to switch to ``best``.
    """

    best: Candidate
    current: Candidate
    predictions: tuple[Prediction, ...]
    decision: Decision

    @property
    def next(self) -> Candidate:
        """The candidate that runs from now on."""
        return self.best if self.decision.switch else self.current


class Planner:
    """The candidates of a run. Their schedules are built once and simulated at every re-planning.

    The same costs give the same predictions: nothing here looks at a clock or draws a number.

    Args:
        candidates: as of :func:`~paceline.planning.candidates`.
        num_stages: of the pipeline.
        samples: of a step of one pipeline.
        before: with other candidates, whose schedules are kept.
        formats: by name, costs of what candidates may send in, and of nothing (``""``).
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        num_stages: int,
        samples: int,
        before: Planner | None = None,
        formats: Mapping[str, FormatCosts] = NO_FORMATS,
    ) -> None:
        self.candidates = tuple(candidates)
        self.num_stages = num_stages
        self.samples = samples
        self._formats = formats
        self.running_format = ""
        """With which costs were measured."""
        self._schedules: dict[Candidate, Schedule | Stream] = {}
        if before is not None and (before.num_stages, before.samples) == (num_stages, samples):
            self._schedules = {c: before._schedules[c] for c in self.candidates if c in before._schedules}

    def schedule(self, candidate: Candidate) -> Schedule | Stream:
        """The order that a candidate runs, built when first asked for."""
        if candidate not in self._schedules:
            self._schedules[candidate] = candidate.schedule(self.num_stages, self.samples)
        return self._schedules[candidate]

    def predict(self, candidate: Candidate, costs: Costs) -> Prediction:
        """A step with ``candidate`` at these costs (of one micro-batch of its size)."""
        order = self.schedule(candidate)
        costs = with_format(costs, self._formats[self.running_format], self._formats[candidate.boundary])
        if isinstance(order, Stream):
            found = steady(order, costs)
            return Prediction(candidate, found.period_s, max(found.peak_bytes, default=0.0))
        simulation = simulate(order, costs)
        return Prediction(candidate, simulation.makespan_s, max(simulation.peak_bytes, default=0.0))

    def choose(
        self, costs: Mapping[int, Costs], current: Candidate, rule: SwitchRule, *, switch_s: float, steps: int
    ) -> Choice:
        """Predict all candidates and decide whether to switch to the best.

        A candidate whose micro-batch size has no costs yet is skipped. Among equally fast ones what runs is the best,
        then what is never late and not rounded, then what needs the least memory.

        Args:
            costs: by micro-batch size, those of one micro-batch.
            current: what runs; it need not be one of the candidates.
            rule: decides, and remembers what was lost so far.
            switch_s: seconds that a switch costs.
            steps: done since the last re-planning.

        Raises:
            ValueError: the micro-batch size of what runs has no costs.
        """
        if current.micro_batch_size not in costs:
            raise ValueError(
                f"there are no costs for the running micro-batch size {current.micro_batch_size} (there are "
                f"{sorted(costs)}): measure a step before a choice."
            )
        self.running_format = current.boundary
        known = [c for c in dict.fromkeys((current, *self.candidates)) if c.micro_batch_size in costs]
        predictions = [self.predict(candidate, costs[candidate.micro_batch_size]) for candidate in known]
        now = predictions[0]
        shortest = min(_claimed_s(p, current) for p in predictions)
        ties = [p for p in predictions if _claimed_s(p, current) <= shortest * (1 + TIE)]
        best = now if now in ties else min(ties, key=self._rank)
        decision = rule.consider(now.step_s, best.step_s, switch_s, steps)
        return Choice(
            best.candidate, current, tuple(sorted(predictions, key=lambda p: (p.step_s, p.candidate.key))), decision
        )

    def _rank(self, prediction: Prediction) -> tuple[bool, float, int, tuple[Any, ...]]:
        candidate = prediction.candidate
        # Where activations were not measured, samples alive stand for their bytes.
        alive = sum(candidate.peak_activations(self.num_stages, self.samples)) * candidate.micro_batch_size
        return candidate.is_late or bool(candidate.boundary), prediction.peak_bytes, alive, candidate.key


def _claimed_s(prediction: Prediction, current: Candidate) -> float:
    """A step as it counts in a comparison: what is new and has a price must save more than others."""
    candidate = prediction.candidate
    is_made = candidate.made is not None and candidate.made != current.made
    rounds = bool(candidate.boundary) and candidate.boundary != current.boundary
    return prediction.step_s * (1 + MADE * is_made + ROUNDS * rounds)
