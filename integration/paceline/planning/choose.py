"""The choice among candidates: simulate each with what was measured, then ask whether a switch pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from ..schedules.costs import Costs
from ..schedules.events import Visits, replay
from ..schedules.schedule import Schedule
from ..schedules.simulate import peak_bytes, simulate
from ..schedules.steady import steady
from ..schedules.stream import Stream
from ..schedules.variation import expected, phases, resampled_s, varies, without_variation
from .candidates import Candidate, schedule_of
from .format_costs import AS_IT_IS, FormatCosts, with_format
from .kept_activations import as_kept
from .outlook import outlook
from .switching import Decision, SwitchRule

# Two predictions this close (relatively) are equal: sums in another order differ by rounding.
TIE = 1e-9

NO_FORMATS: Mapping[str, FormatCosts] = {"": AS_IT_IS}

MADE = 0.01
"""Share of a step that an order made for the costs must save to be chosen: they will not be so again."""

ROUNDS = 0.02
"""Share of a step that a format must save to be chosen: it costs precision."""

FIRST, FINAL = 8, 32
"""Replays of a step where messages vary: of all candidates, and of the :data:`FINALISTS` and what runs."""

FINALISTS = 8

QUANTILE = 10
"""Replays at least that a quantile is taken of."""

REPLAY_SHARE, ACTION_S = 0.01, 5e-6
"""Replays take at most this share of the time until the next planning, at so many seconds a forward or backward: fewer
of them where plannings are frequent or steps short."""

OUTLOOK_UP_TO = 2048
"""Up to so many stages times micro-batches candidates are compared over what may come: a replay of more takes long."""

SLOW, SLOW_SHARE, NEAR = 4.0, 0.01, 0.01
"""Among candidates that differ by less than ``NEAR``, one step in a hundred counts as if messages took four times as
long in it: a network that is shared gets slower at times, and a longer warm-up costs memory only."""


class Past(NamedTuple):
    """Costs that a planning was made for, by micro-batch size, and the format that they were measured with.

    How single messages varied does not count.
    """

    costs: Mapping[int, Costs]
    boundary: str = ""


class Prediction(NamedTuple):
    """A predicted step with one candidate.

    Args:
        candidate: which.
        step_s: seconds of the step; where messages vary their mean, or the quantile that was asked for.
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
    """The candidates of a run. Their schedules are simulated at every re-planning.

    The same costs give the same predictions: nothing here looks at a clock or draws a number.

    Args:
        candidates: as of :func:`~paceline.planning.candidates`.
        num_stages: of the pipeline.
        samples: of a step of one pipeline.
        formats: by name, costs of what candidates may send in, and of nothing (``""``).
        risk: where messages vary, candidates are compared by this quantile of their steps; None: by the mean.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        num_stages: int,
        samples: int,
        formats: Mapping[str, FormatCosts] = NO_FORMATS,
        risk: float | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self._risk = risk
        self.num_stages = num_stages
        self.samples = samples
        self._formats = formats
        self.running_format = ""
        """With which costs were measured."""

    def schedule(self, candidate: Candidate) -> Schedule | Stream:
        """The order that a candidate runs."""
        return schedule_of(candidate, self.num_stages, self.samples)

    def predict(self, candidate: Candidate, costs: Costs, replays: int = FINAL) -> Prediction:
        """A step with ``candidate`` at these costs (of one micro-batch of its size).

        Args:
            replays: where messages vary, over how many beginnings in their variation.
        """
        order = self.schedule(candidate)
        costs = with_format(costs, self._formats[self.running_format], self._formats[candidate.boundary])
        costs = as_kept(costs, order)
        if varies(costs):
            seconds = resampled_s(order, costs, phases(replays))
            return Prediction(candidate, expected(seconds, self._risk), self._peak_bytes(order, costs))
        if isinstance(order, Stream):
            found = steady(order, costs)
            return Prediction(candidate, found.period_s, max(found.peak_bytes, default=0.0))
        simulation = simulate(order, costs)
        return Prediction(candidate, simulation.makespan_s, max(simulation.peak_bytes, default=0.0))

    def _peak_bytes(self, order: Schedule | Stream, costs: Costs) -> float:
        found = peak_bytes(order, costs) if isinstance(order, Schedule) else steady(order, costs).peak_bytes
        return max(found, default=0.0)

    def choose(
        self,
        costs: Mapping[int, Costs],
        current: Candidate,
        rule: SwitchRule,
        *,
        switch_s: float,
        steps: int,
        before: Sequence[Past] = (),
    ) -> Choice:
        """Predict all candidates and decide whether to switch to the best.

        Where costs come and go, the best is what is the fastest over those that may come
        (:func:`~paceline.planning.outlook.outlook`). A candidate whose micro-batch size has no costs yet is skipped.
        Among those that are nearly as fast the best is what slower messages would harm least. Among equally good ones
        what runs is the best, then what is never late and not rounded, then what needs the least memory.

        Args:
            costs: by micro-batch size, those of one micro-batch.
            current: what runs; it need not be one of the candidates.
            rule: decides, and remembers what was lost so far.
            switch_s: seconds that a switch costs.
            steps: done since the last re-planning.
            before: what the last plannings of the same layers were made for, oldest first.

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
        others = self._may_come(current, before, Past(costs, current.boundary))
        mean_s = self._mean_s(others)
        predictions, finalists = self._predictions(known, costs, rule.horizon_steps, mean_s)
        now = predictions[0]

        def claimed_s(prediction: Prediction) -> float:
            return mean_s(prediction) * _claim(prediction.candidate, current)

        shortest = min(map(claimed_s, finalists))
        near = [p for p in finalists if claimed_s(p) <= shortest * (1 + NEAR)]
        looked_at = {p.candidate: p for p in (*sorted(near, key=self._roomiest)[:FINALISTS], min(near, key=self._rank))}
        looked_at |= {p.candidate: p for p in near if p is now}
        near = [*looked_at.values()]
        slow_s = {p.candidate: self._slow_s(p, costs[p.candidate.micro_batch_size]) for p in near}

        def counts_s(prediction: Prediction) -> float:
            return claimed_s(prediction) + SLOW_SHARE * slow_s[prediction.candidate]

        least = min(map(counts_s, near))
        ties = [p for p in near if counts_s(p) <= least * (1 + TIE)]
        best = now if now in ties else min(ties, key=self._rank)
        decision = rule.consider(mean_s(now), mean_s(best), switch_s, steps)
        decision = replace(decision, now_s=now.step_s, best_s=best.step_s)
        if best is not now and now in near and not decision.switch:
            spared_s = slow_s[now.candidate] - slow_s[best.candidate]
            if (counts_s(now) - counts_s(best)) * rule.horizon_steps > switch_s:
                why = f"as fast, and {spared_s:.4g} s shorter where messages take {SLOW:g} times as long"
                decision = replace(decision, switch=True, why=why)
        if others and best is not now:
            decision = replace(decision, why=f"{decision.why}, over what the last plannings have measured")
        return Choice(
            best.candidate, current, tuple(sorted(predictions, key=lambda p: (p.step_s, p.candidate.key))), decision
        )

    def _may_come(self, current: Candidate, before: Sequence[Past], now: Past) -> list[tuple[float, Past]]:
        """Costs that may come, each with its share of the time until the next planning."""
        if not before or self.num_stages * self.samples > OUTLOOK_UP_TO * current.micro_batch_size:
            return []
        past = [each for each in before if current.micro_batch_size in each.costs] + [now]
        states = outlook([self._step_s(current, each) for each in past])
        return [(state.share, past[state.planning]) for state in states]

    def _mean_s(self, others: Sequence[tuple[float, Past]]) -> Callable[[Prediction], float]:
        """A function of a prediction: its step in the mean over what may come."""
        present = 1 - sum(share for share, _ in others)

        @cache
        def elsewhere_s(candidate: Candidate) -> float:
            return sum(share * self._step_s(candidate, past) for share, past in others)

        def mean_s(prediction: Prediction) -> float:
            size = prediction.candidate.micro_batch_size
            if not all(size in past.costs for _, past in others):
                return prediction.step_s
            return present * prediction.step_s + elsewhere_s(prediction.candidate)

        return mean_s

    def _step_s(self, candidate: Candidate, past: Past) -> float:
        """A step with ``candidate`` as costs were; messages all take what they took in the mean."""
        costs, then, now = past.costs[candidate.micro_batch_size], past.boundary, candidate.boundary
        costs = without_variation(with_format(costs, self._formats[then], self._formats[now]))
        order = self.schedule(candidate)
        costs = as_kept(costs, order)
        if isinstance(order, Stream):
            return steady(order, costs).period_s
        return replay(order, costs, Visits(order, costs)).end_s + costs.step_s

    def _predictions(
        self,
        known: Sequence[Candidate],
        costs: Mapping[int, Costs],
        steps: int,
        mean_s: Callable[[Prediction], float],
    ) -> tuple[list[Prediction], list[Prediction]]:
        """Predict all candidates, the first one first, and again those that may be the best.

        Args:
            steps: until the next planning.
            mean_s: of a prediction, over what may come.
        """
        if not any(varies(each) for each in costs.values()):
            predictions = [self.predict(candidate, costs[candidate.micro_batch_size]) for candidate in known]
            return predictions, predictions
        now_s = self.predict(known[0], costs[known[0].micro_batch_size], 1).step_s
        actions = 2 * self.num_stages * self.samples // min(costs)
        most = int(REPLAY_SHARE * steps * now_s / (2 * ACTION_S * actions))
        first = max(1, min(FIRST, most // len(known)))
        final = max(1 if self._risk is None else QUANTILE, min(FINAL, most // (FINALISTS + 1)))
        predictions = [self.predict(candidate, costs[candidate.micro_batch_size], first) for candidate in known]
        if final <= first:
            return predictions, predictions
        others = sorted(predictions[1:], key=lambda p: (mean_s(p) * _claim(p.candidate, known[0]), self._rank(p)))
        chosen = [p.candidate for p in (predictions[0], *others[:FINALISTS])]
        again = {candidate: self.predict(candidate, costs[candidate.micro_batch_size], final) for candidate in chosen}
        return [again.get(p.candidate, p) for p in predictions], list(again.values())

    def _roomiest(self, prediction: Prediction) -> tuple[float, int]:
        """The shortest first, of equals the one with the longest warm-up."""
        candidate = prediction.candidate
        alive = sum(candidate.peak_activations(self.num_stages, self.samples)) * candidate.micro_batch_size
        return float(f"{prediction.step_s:.6g}"), -alive

    def _slow_s(self, prediction: Prediction, costs: Costs) -> float:
        """Seconds of a step whose messages all take :data:`SLOW` times as long; without a flush, as it is."""
        order = self.schedule(prediction.candidate)
        if isinstance(order, Stream) or not costs.message_bytes:
            return prediction.step_s
        boundary = self._formats[prediction.candidate.boundary]
        slow = without_variation(with_format(costs, self._formats[self.running_format], boundary), SLOW)
        slow = as_kept(slow, order)
        return replay(order, slow, Visits(order, slow)).end_s + slow.step_s

    def _rank(self, prediction: Prediction) -> tuple[bool, float, int, tuple[Any, ...]]:
        candidate = prediction.candidate
        # Where activations were not measured, samples alive stand for their bytes.
        alive = sum(candidate.peak_activations(self.num_stages, self.samples)) * candidate.micro_batch_size
        return candidate.is_late or bool(candidate.boundary), prediction.peak_bytes, alive, candidate.key


def _claim(candidate: Candidate, current: Candidate) -> float:
    """How many times as long a step counts in a comparison: what is new and has a price must save more than others."""
    is_made = candidate.made is not None and candidate.made != current.made
    rounds = bool(candidate.boundary) and candidate.boundary != current.boundary
    return 1 + MADE * is_made + ROUNDS * rounds
