"""Seconds of the computations of stages, from the steps that ranks have reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import fmean, median

from ..measure.recorder import Recorded, StepTimes
from ..measure.recurring import recurring_mean, without_once
from ..schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from .cells import Cells
from .rank_reports import WAIT, Report
from .step_spans import OF_SCHEDULE

MOST_SPLIT = 2.0
"""How many times as long as a whole backward a split one is believed to take, at most."""


@dataclass
class StageTimes:
    """Seconds of forwards and backwards as measured so far, by micro-batch size, one number a cell."""

    cells: Cells
    forward_s: dict[int, list[float]] = field(default_factory=dict)
    backward_s: dict[int, list[float]] = field(default_factory=dict)
    weight_shares: dict[int, list[float]] = field(default_factory=dict)
    """Share of a backward that is the gradients of weights, where backwards were split."""
    ahead_shares: dict[int, list[float]] = field(default_factory=dict)
    """Share of a backward that ran before its gradient was there."""
    again_parts: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of what one micro-batch computed again, as a part of its forward; 0 where that was never measured by
    itself."""
    kept_shares: dict[int, list[float]] = field(default_factory=dict)
    """Share of what may be computed again that was kept in the steps whose backwards were measured, one number a
    stage."""
    split_factor: float = 1.0
    """How many times as long as a whole backward the two parts of a split one take."""
    _by_forward: dict[int, list[float]] = field(default_factory=dict)
    """Whole backwards by their forwards."""
    _split_by_forward: dict[int, list[float]] = field(default_factory=dict)
    """Likewise of both parts of split ones."""

    @property
    def sizes(self) -> list[int]:
        """Micro-batch sizes whose steps were measured."""
        return sorted(size for size in self.forward_s if size in self.backward_s)

    def take(self, reports: Sequence[Report]) -> set[int]:
        """Take in reports; the micro-batch sizes that they have times of."""
        measured: set[int] = set()
        forwards, backwards = self._means(reports, FORWARD), self._means(reports, BACKWARD)
        ahead = self._ahead(reports)
        for size, cells in backwards.items():
            is_first = not any(self._by_forward.get(size, ()))
            self._by_forward[size] = _ratios(_less(cells, ahead.get(size)), forwards.get(size, ()))
            if is_first:  # they may have been split from the start
                self._take_split_factor(size)
        weights = self._means(reports, BACKWARD_WEIGHT)
        for size, inputs in self._means(reports, BACKWARD_INPUT).items():
            pairs = list(zip(inputs, weights.get(size, inputs), strict=True))
            split = [sum(pair) for pair in pairs]
            # By the forward of the same steps: the device may have been another one when backwards were whole.
            self._split_by_forward[size] = _ratios(_less(split, ahead.get(size)), forwards.get(size, ()))
            self._take_split_factor(size)
            backwards[size] = [seconds / self.split_factor for seconds in split]
            self.weight_shares[size] = [own / sum(pair) if (own := pair[1]) else 0.0 for pair in pairs]
        for size, cells in backwards.items():
            self.ahead_shares[size] = _ratios(ahead.get(size, [0.0] * len(cells)), cells)
        for size, cells in self._means(reports, RECOMPUTE).items():
            parts, before = _ratios(cells, forwards.get(size, ())), self.again_parts.get(size, [0.0] * len(cells))
            self.again_parts[size] = [now or then for now, then in zip(parts or before, before, strict=True)]
        for found, known in ((forwards, self.forward_s), (backwards, self.backward_s)):
            for size, cells in found.items():
                before = known.get(size, cells)
                known[size] = [now or then for now, then in zip(cells, before, strict=True)]
            measured |= found.keys()
        self.kept_shares.update((size, self._kept(reports, size)) for size in backwards)
        return measured

    def _kept(self, reports: Sequence[Report], size: int) -> list[float]:
        """Share of the activations that steps kept, the mean of those with a micro-batch size, one number a stage."""
        shares: list[list[float]] = [[] for _ in range(self.cells.num_stages)]
        for report in reports:
            for chunk, cell in enumerate(self.cells.held(report.device)):
                steps = (step for step in report.steps if step.key[1] == size)
                shares[cell % self.cells.num_stages] += [step.kept_shares.get(chunk, 0.0) for step in steps]
        return [fmean(own or [0.0]) for own in shares]

    def _ahead(self, reports: Sequence[Report]) -> dict[int, list[float]]:
        """Seconds of a mean backward that ran before its gradient was there, by micro-batch size, one number a cell."""
        found = self._means(reports, RECOMPUTE)
        for size, cells in found.items():
            counts = {kind: [0] * len(cells) for kind in (RECOMPUTE, BACKWARD, BACKWARD_INPUT)}
            for report in reports:
                for step in report.steps:
                    for kind, of_cells in counts.items() if step.key[1] == size else ():
                        for chunk, cell in enumerate(self.cells.held(report.device)):
                            of_cells[cell] += len(step.durations(kind, chunk))
            again, whole, split = counts.values()
            found[size] = [
                seconds * early / (one + other) if early else 0.0
                for seconds, early, one, other in zip(cells, again, whole, split, strict=True)
            ]
        return found

    def _take_split_factor(self, size: int) -> None:
        """Compare split backwards with whole ones, if both were measured."""
        both = _ratios(self._split_by_forward.get(size, ()), self._by_forward.get(size, ()))
        if factors := [factor for factor in both if factor]:
            self.split_factor = min(max(median(factors), 1.0), MOST_SPLIT)

    def _means(self, reports: Sequence[Report], kind: str) -> dict[int, list[float]]:
        """Seconds of computations of a kind, by micro-batch size, one number a cell; 0 where there were none."""
        found: dict[int, list[float]] = {}
        for report in reports:
            for chunk, cell in enumerate(self.cells.held(report.device)):
                by_size: dict[int, list[StepTimes]] = {}
                for step in report.steps:
                    if step.mean(kind, chunk) is not None:
                        by_size.setdefault(step.key[1], []).append(step)
                for size, steps in by_size.items():
                    cells = found.setdefault(size, [0.0] * len(self.cells.numbers))
                    cells[cell] = max(cells[cell], _seconds(steps, kind, chunk))
        return found

    def scale_others(self, before: Sequence[dict[int, list[float]]], measured: set[int]) -> None:
        """A device that has become slower is slower at every size; those not measured now were measured before.

        By what is known now, not by what was seen: noise that is smoothed away must not add up here.
        """
        for known, then in zip((self.forward_s, self.backward_s), before, strict=True):
            factors = [
                [now / was if now and was else 1.0 for now, was in zip(known[size], then[size], strict=True)]
                for size in measured & known.keys() & then.keys()
            ]
            slower = [median(of_stage) for of_stage in zip(*factors, strict=True)]
            for other in known.keys() - measured if slower else ():
                known[other] = [seconds * factor for seconds, factor in zip(known[other], slower, strict=True)]


def _seconds(steps: Sequence[StepTimes], kind: str, chunk: int) -> float:
    """Seconds of a forward or backward and of the host beside it: the mean of what repeats from step to step."""
    usual = without_once(steps, lambda step: step.mean(kind, chunk) or 0.0)
    own = recurring_mean(seconds for step in usual for seconds in step.durations(kind, chunk))
    # What ran before a backward's gradient was there is a computation of its own.
    parts = 2 if kind in (BACKWARD, BACKWARD_INPUT) and usual[-1].durations(RECOMPUTE, chunk) else 1
    return own + parts * fmean(map(_overhead, usual))


def _ratios(values: Sequence[float], by: Sequence[float]) -> list[float]:
    """``values`` by others; 0 where one of both was not measured. Empty: none of one kind were."""
    return [value / other if other else 0.0 for value, other in zip(values, by, strict=bool(values and by))]


def _less(values: Sequence[float], others: Sequence[float] | None) -> list[float]:
    return [max(value - other, 0.0) for value, other in zip(values, others or [0.0] * len(values), strict=True)]


def whole_times(steps: Sequence[StepTimes], size: int, chunk: int, split_factor: float) -> list[float]:
    """Seconds of a forward, a backward and what comes between, for each step with micro-batches of a size.

    Args:
        split_factor: how many times as long as a whole backward a split one takes.
    """
    found = []
    for step in steps:
        for kinds in ((FORWARD, BACKWARD), (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)):
            seconds = [mean for kind in kinds if (mean := step.mean(kind, chunk)) is not None]
            if step.key[1] == size and len(seconds) == len(kinds):
                factor = split_factor if len(kinds) > 2 else 1.0
                found.append(seconds[0] + fsum(seconds[1:]) / factor + len(kinds) * _overhead(step))
                break
    return found


def _overhead(step: StepTimes) -> float:
    """Seconds of the host beside each computation: time between them in which nothing was waited for."""
    spans, begun_s, ended_s = _schedule_of(step)
    busy = sum(span.end - span.start for span in spans) + _updates_s(step, begun_s, ended_s)
    count = sum(span.kind != WAIT for span in spans)
    return float(max(ended_s - begun_s - busy, 0.0)) / count


def _schedule_of(step: StepTimes) -> tuple[list[Recorded[float]], float, float]:
    """Computations and waits of a step, when the first of them began and the last one ended."""
    spans = [span for span in step.spans if span.kind in OF_SCHEDULE]
    return spans, min(span.start for span in spans), max(span.end for span in spans)


def _updates_s(step: StepTimes, begun_s: float, ended_s: float) -> float:
    """Seconds of updates between two moments: without a flush they are made among the computations."""
    own = (span for span in step.spans if span.kind not in OF_SCHEDULE)
    return fsum(span.end - span.start for span in own if begun_s <= span.start and span.end <= ended_s)


def beside_s(step: StepTimes) -> float:
    """Seconds of a rank's step beside its computations, its waits, and the host's work between them."""
    _, begun_s, ended_s = _schedule_of(step)
    whole = step.ended_s - step.begun_s
    return float(max(whole - (ended_s - begun_s) + _updates_s(step, begun_s, ended_s), 0.0))
