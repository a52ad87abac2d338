"""Costs of a run's steps, from the reports that its ranks make at each tuning interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import fmean, median

from ..measure.links import Links, Message
from ..measure.recorder import StepTimes
from ..measure.recurring import recurring_mean, without_once
from ..measure.speeds import Speeds
from ..measure.work import Seen as SeenItem
from ..measure.work import Separated, separate
from ..planning.repartition import ItemCosts, Layout, item_costs
from ..schedules.costs import Costs, Link
from ..schedules.schedule import BACKWARD, FORWARD
from .rank_reports import WAIT, LayerReport, Report, Seen, clocks_of, messages

MOST_TIMED = 4096
"""Times of layers that are kept, the newest."""

_OF_SCHEDULE = (FORWARD, BACKWARD, WAIT)


@dataclass
class MeasuredCosts:
    """Costs of a run's steps as measured so far, on the rank that decides; each tuning interval adds to them.

    Args:
        num_stages: of each pipeline.
    """

    num_stages: int
    forward_s: dict[int, list[float]] = field(default_factory=dict)
    """By micro-batch size, one number a stage."""
    backward_s: dict[int, list[float]] = field(default_factory=dict)
    message_bytes: dict[int, list[float]] = field(default_factory=dict)
    saved_bytes: dict[int, list[float]] = field(default_factory=dict)
    room_bytes: list[float] = field(default_factory=list)
    step_s: float = 0.0
    """Seconds of a step besides its schedule."""
    measured_s: float = 0.0
    """A step, as it was in the last tuning interval."""
    parts: tuple[int, ...] = ()
    """Boundaries over the items, if a partition is chosen."""
    items: tuple[ItemCosts, ...] = ()
    """Costs of each item, once layers were timed."""
    guessed: tuple[int, ...] = ()
    """Stages whose device could be compared with the others' by sizes only."""
    state_bytes: list[float] = field(default_factory=list)
    """For each parameter of a stage, on each of its ranks."""
    moved_bytes: float = 0.0
    """Bytes that go with a parameter to another stage."""
    _slowness: Speeds | None = None
    _timed: list[tuple[int, int, LayerReport]] = field(default_factory=list)
    """Stage, item and times of every layer that was timed."""
    _links: dict[int, Links] = field(default_factory=dict)
    _latency_s: list[float] = field(default_factory=list)
    _after: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def update(self, reports: Sequence[Report]) -> None:
        """Take in a report of every rank. Where replicas differ, the slowest counts."""
        replicas: dict[int, list[Report]] = {}
        for report in sorted(reports, key=lambda report: report.stage):
            replicas.setdefault(report.replica, []).append(report)
        before = [{size: list(each) for size, each in known.items()} for known in (self.forward_s, self.backward_s)]
        measured = self._compute(reports)
        self._learn_items(reports)
        self._smooth(replicas)
        self._scale_others(before, measured)
        self.state_bytes = [max(r.state_bytes for r in reports if r.stage == s) for s in self._stages]
        self.moved_bytes = max(r.moved_bytes for r in reports)
        self.room_bytes = [min(r.room_bytes for r in reports if r.stage == s) for s in range(self.num_stages)]
        for size in {size for report in reports for size in report.saved_bytes}:
            per_stage = [max(r.saved_bytes.get(size, 0.0) for r in reports if r.stage == s) for s in self._stages]
            self.saved_bytes[size] = per_stage
        self._latency_s = [max(r.latency_s for r in reports if r.stage == s) for s in range(self.num_stages - 1)]
        for replica, pipe in replicas.items():
            self._take_links(replica, pipe)
        self._step(replicas)

    @property
    def _stages(self) -> range:
        return range(self.num_stages)

    def _compute(self, reports: Sequence[Report]) -> set[int]:
        """Take in the times of the stages; the micro-batch sizes that they are of."""
        measured: set[int] = set()
        for kind, known in ((FORWARD, self.forward_s), (BACKWARD, self.backward_s)):
            found: dict[int, list[float]] = {}
            for report in reports:
                by_size: dict[int, list[StepTimes]] = {}
                for step in report.steps:
                    if step.mean(kind) is not None:
                        by_size.setdefault(step.key[1], []).append(step)
                for size, steps in by_size.items():
                    stages = found.setdefault(size, [0.0] * self.num_stages)
                    stages[report.stage] = max(stages[report.stage], _seconds(steps, kind))
            for size, stages in found.items():
                before = known.get(size, stages)
                known[size] = [now or then for now, then in zip(stages, before, strict=True)]
            measured |= found.keys()
        return measured

    def _scale_others(self, before: Sequence[dict[int, list[float]]], measured: set[int]) -> None:
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

    def _learn_items(self, reports: Sequence[Report]) -> None:
        """Cost of each item, from the step in which the layers were timed."""
        timed = [(r.stage, item, layer) for r in reports for item, layer in r.layers.items()]
        if not timed or not self.parts:
            return
        # A layer that was timed on two stages tells how their devices compare.
        size = timed[0][2].size
        self._timed = [*(entry for entry in self._timed if entry[2].size == size), *timed][-MOST_TIMED:]
        found = _separated(self._timed)
        others = {
            item: (layer.times.saved_bytes, layer.times.output_bytes, float(layer.num_parameters))
            for _, item, layer in self._timed
        }
        self.items = item_costs(found.work, others, self.parts[-1])
        self.guessed = found.guessed
        self._slowness = Speeds(self.num_stages)

    def _smooth(self, replicas: dict[int, list[Report]]) -> None:
        """Follow each stage's seconds for its work over the intervals: steady under noise, at once when they change."""
        if self._slowness is None:
            return
        work = [sum(item.work_s for item in self.items[a:b]) for a, b in pairwise(self.parts)]
        sizes = [step.key[1] for pipe in replicas.values() for step in pipe[0].steps]
        if not sizes:
            return
        size = sizes[-1]
        per_stage: list[list[float]] = []
        for stage, own in enumerate(work):
            per_replica = [_whole_times(pipe[stage].steps, size) for pipe in replicas.values()]
            slowest = [max(of_step) for of_step in zip(*per_replica, strict=False)]
            per_stage.append([seconds / own for seconds in slowest] if own > 0 else [])
        self._slowness.update(per_stage)
        for stage, (own, each) in enumerate(zip(work, self._slowness.values, strict=True)):
            now = self.forward_s[size][stage] + self.backward_s[size][stage]
            if per_stage[stage] and now > 0:
                self.forward_s[size][stage] *= own * each / now
                self.backward_s[size][stage] *= own * each / now

    def layout(self, cuts: Sequence[int], memory_bytes: int | None) -> Layout:
        """Describe the partition that runs, for a search of another one.

        Args:
            cuts: where the items may be cut.
            memory_bytes: of each device; None: what the stage has, and what is free.
        """
        parameters = [sum(item.num_parameters for item in self.items[a:b]) for a, b in pairwise(self.parts)]
        limits = [
            float(memory_bytes) if memory_bytes is not None else room + each * count
            for room, each, count in zip(self.room_bytes, self.state_bytes, parameters, strict=True)
        ]
        return Layout(
            self.items, self.parts, tuple(cuts), tuple(limits), tuple(self.state_bytes), moved_bytes=self.moved_bytes
        )

    def has_moved(self, parts: Sequence[int]) -> None:
        """Layers lie otherwise from now on; until it is measured, what was predicted counts."""
        if not self.items:
            for known in (self.forward_s, self.backward_s, self.message_bytes, self.saved_bytes):
                known.clear()
        for size in self.sizes():
            costs = self.layout((), None).costs(self.costs(size), parts)
            self.forward_s[size], self.backward_s[size] = list(costs.forward_s), list(costs.backward_s)
            if size in self.message_bytes:
                self.message_bytes[size] = list(costs.message_bytes)
            if size in self.saved_bytes:
                self.saved_bytes[size] = list(costs.activation_bytes)
        self.parts = tuple(parts)

    def _take_links(self, replica: int, pipe: list[Report]) -> None:
        names = [report.host for report in pipe]
        links = self._links.setdefault(replica, Links([names.index(name) for name in names]))
        seen = messages(pipe, self._after)
        latency = {}
        for stage, report in enumerate(pipe[:-1]):
            latency[stage, stage + 1] = latency[stage + 1, stage] = report.latency_s
        links.update(
            (Message(s.source, s.target, s.record.num_bytes, s.record.begun_s, s.record.done_s) for s in seen), latency
        )
        self._take_sizes(pipe[0].steps, seen)

    def _take_sizes(self, steps: Sequence[StepTimes], seen: Sequence[Seen]) -> None:
        """Take in the sizes of training's messages; an evaluation's micro-batches may be of another size."""
        found: dict[tuple[int, int], list[int]] = {}
        for kind, source, _, record in seen:
            step = next((step for step in steps if step.begun_s <= record.done_s <= step.ended_s), None)
            if step is not None and kind == "activation":
                found.setdefault((step.key[1], source), []).append(record.num_bytes)
        for (size, boundary), sizes in found.items():
            self.message_bytes.setdefault(size, [0.0] * (self.num_stages - 1))[boundary] = median(sizes)

    def _step(self, replicas: dict[int, list[Report]]) -> None:
        beside, whole = [], []
        for pipe in replicas.values():
            clocks = clocks_of(pipe)
            for index in range(min(len(report.steps) for report in pipe)):
                steps = [(report.steps[index], clock) for report, clock in zip(pipe, clocks, strict=True)]
                spans = [
                    (start - c, end - c) for s, c in steps for kind, _, start, end in s.spans if kind in _OF_SCHEDULE
                ]
                wall = max(s.ended_s - c for s, c in steps) - min(s.begun_s - c for s, c in steps)
                if spans:
                    beside.append(wall - (max(end for _, end in spans) - min(start for start, _ in spans)))
                    whole.append(wall)
        if beside:
            self.step_s = recurring_mean([max(seconds, 0.0) for seconds in beside])
            self.measured_s = recurring_mean(whole)

    def sizes(self) -> list[int]:
        """Micro-batch sizes whose steps were measured."""
        return sorted(size for size in self.forward_s if size in self.backward_s)

    def costs(self, size: int) -> Costs:
        """Costs of one micro-batch of ``size`` samples, which was measured."""
        stages, boundaries = self._stages, range(self.num_stages - 1)
        hosts = next(iter(self._links.values())).hosts if self._links else [0] * self.num_stages
        down, up, egress = [], [], {}
        for boundary in boundaries:
            latency = self._latency_s[boundary]
            down.append(Link(self._edge(boundary, boundary + 1), latency))
            up.append(Link(self._edge(boundary + 1, boundary), latency))
        for host in set(hosts):
            egress[host] = min(_rate(links.egress.get(host)) for links in self._links.values())
        return Costs(
            forward_s=tuple(self.forward_s[size]),
            backward_s=tuple(self.backward_s[size]),
            message_bytes=self._message_bytes(size),
            down=tuple(down),
            up=tuple(up),
            hosts=tuple(hosts),
            egress_bytes_per_s=tuple(egress.get(host, inf) for host in range(max(hosts) + 1)),
            activation_bytes=tuple(self.saved_bytes[size]) if size in self.saved_bytes else (0.0,) * len(stages),
            step_s=self.step_s,
        )

    def _edge(self, source: int, target: int) -> float:
        return min((_rate(links.edges.get((source, target))) for links in self._links.values()), default=inf)

    def _message_bytes(self, size: int) -> tuple[float, ...]:
        if size in self.message_bytes:
            return tuple(self.message_bytes[size])
        known = next(iter(self.message_bytes), None)
        if known is None:
            return (0.0,) * (self.num_stages - 1)
        return tuple(num_bytes * size / known for num_bytes in self.message_bytes[known])


def _separated(timed: Sequence[tuple[int, int, LayerReport]]) -> Separated:
    """Work of the items and speed of the stages, by what certainly is alike, or if that tells too little, probably."""

    def by(which: int) -> Separated:
        seen = [
            SeenItem(item, stage, layer.kinds[which], layer.times.forward_s, layer.times.backward_s)
            for stage, item, layer in timed
        ]
        return separate(seen, {layer.kinds[which]: float(layer.num_parameters) for _, _, layer in timed})

    certain = by(0)
    if not certain.guessed:
        return certain
    probable = by(1)
    own: dict[int, list[tuple[float, float]]] = {}  # of each replica
    for stage, item, layer in timed:
        speed = probable.speeds[stage]
        own.setdefault(item, []).append((layer.times.forward_s * speed, layer.times.backward_s * speed))
    work = {item: (median(f for f, _ in each), median(b for _, b in each)) for item, each in own.items()}
    return Separated(work, probable.speeds, probable.guessed)


def _seconds(steps: Sequence[StepTimes], kind: str) -> float:
    """Seconds of a forward or backward and of the host beside it: the mean of what repeats from step to step."""
    usual = without_once(steps, lambda step: step.mean(kind) or 0.0)
    return recurring_mean(seconds for step in usual for seconds in step.durations(kind)) + fmean(map(_overhead, usual))


def _whole_times(steps: Sequence[StepTimes], size: int) -> list[float]:
    """Seconds of a forward, a backward and what comes between, for each step with micro-batches of a size."""
    found = []
    for step in steps:
        forward, backward = step.mean(FORWARD), step.mean(BACKWARD)
        if step.key[1] == size and forward is not None and backward is not None:
            found.append(forward + backward + 2 * _overhead(step))
    return found


def _rate(seconds_per_byte: float | None) -> float:
    return inf if not seconds_per_byte else 1 / seconds_per_byte


def _overhead(step: StepTimes) -> float:
    """Seconds of the host beside each computation: time between them in which nothing was waited for."""
    spans = [(kind, start, end) for kind, _, start, end in step.spans if kind in _OF_SCHEDULE]
    busy = sum(end - start for _, start, end in spans)
    count = sum(kind != WAIT for kind, _, _ in spans)
    whole = max(end for *_, end in spans) - min(start for _, start, _ in spans)
    return float(max(whole - busy, 0.0)) / count
