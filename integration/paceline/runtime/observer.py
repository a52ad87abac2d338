"""What the ranks of a run saw of its last steps, brought together: costs for the simulator, timelines for people."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..measure.links import Links, Message
from ..measure.memory import room_bytes
from ..measure.recorder import StepTimes
from ..schedules.costs import Costs, Link
from ..schedules.schedule import BACKWARD, FORWARD
from ..schedules.timeline import Span, Timeline, Transfer
from .control import ControlPlane
from .staging import ranks_sharing
from .transport import Record, lanes_of

PINGS = 4
COMPARISONS = 3
"""Of the clocks of one machine, which are one clock: what is left to find is the latency when nobody is busy."""
UNSETTLED = 4
"""Messages at the end of a lane's records that one end may have noted and the other not yet."""


@dataclass
class Report:
    """One rank's view. Times in seconds of its own clock."""

    stage: int
    replica: int
    host: str
    steps: list[StepTimes]
    records: dict[str, list[Record]]
    """By lane."""
    saved_bytes: dict[int, float]
    """What a live micro-batch keeps, by micro-batch size."""
    room_bytes: float
    clock_s: float = 0.0
    """The next stage's clock minus this one's."""
    latency_s: float = 0.0
    """To the next stage."""


def machine_name() -> str:
    """The same for two ranks if and only if they have one clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def host_name() -> str:
    """The same for two ranks if and only if they send through the same interfaces."""
    try:
        return f"{machine_name()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return machine_name()


def compare_clocks(control: ControlPlane, pipe: Sequence[int]) -> tuple[float, float]:
    """What the next stage's clock shows beyond this one's, and half of the fastest round trip to it, in seconds.

    Every rank of the pipeline calls it; a few small messages go over the control plane, edge after edge.
    """
    stage = pipe.index(dist.get_rank())
    found = (0.0, 0.0)
    for first in (0, 1):  # edges that share no stage at a time
        for one in range(first, len(pipe) - 1, 2):
            if stage == one:
                found = _ask(control, pipe[one + 1])
            elif stage == one + 1:
                _answer(control, pipe[one])
    return found


def _ask(control: ControlPlane, peer: int) -> tuple[float, float]:
    best = (inf, 0.0)
    shown = torch.zeros(1, dtype=torch.float64)
    for _ in range(PINGS):
        begun = time.perf_counter()
        dist.send(shown, peer, group=control.world)
        dist.recv(shown, peer, group=control.world)
        done = time.perf_counter()
        best = min(best, (done - begun, shown.item() - (begun + done) / 2))
    return best[1], best[0] / 2


def _answer(control: ControlPlane, peer: int) -> None:
    shown = torch.zeros(1, dtype=torch.float64)
    for _ in range(PINGS):
        dist.recv(shown, peer, group=control.world)
        shown.fill_(time.perf_counter())
        dist.send(shown, peer, group=control.world)


def gather_reports(engine: Any, after: dict[str, int], memory_bytes: int | None = None) -> list[Report]:
    """What every rank of ``engine`` saw of its last steps, on rank 0. Collective, between steps.

    Args:
        after: by lane, the last message that was reported; brought up to date.
    """
    device = torch.device(engine.device)
    if len(engine.clocks) < COMPARISONS or not engine.is_one_machine:
        engine.clocks.append(compare_clocks(engine.control, engine.pipe_ranks))
    clock_s, latency_s = engine.clocks[-1][0], min(latency for _, latency in engine.clocks)
    records = {}
    for name, lane in engine.transport.lanes().items():
        records[name] = [record for record in list(lane.records) if record.number > after.get(name, 0)]
        if records[name]:
            # A message of the very end may be known at one end only; it is reported again.
            after[name] = records[name][-1].number - UNSETTLED
    report = Report(
        stage=engine.stage_id,
        replica=engine.pipe_number,
        host=host_name(),
        steps=engine.recorder.steps(),
        records=records,
        saved_bytes=dict(engine.saved_bytes),
        room_bytes=float(memory_bytes if memory_bytes is not None else room_bytes(device, ranks_sharing(device))),
        clock_s=clock_s,
        latency_s=latency_s,
    )
    reports: list[Report] = engine.control.gather_at_first(report)
    return reports


class Seen(NamedTuple):
    """A message with both its ends; seconds of the first stage's clock."""

    kind: str
    source: int
    target: int
    record: Record


def messages(reports: Sequence[Report], after: dict[tuple[int, int, str], int] | None = None) -> list[Seen]:
    """The messages of one pipeline, its reports in the order of the stages, on the clock of its first stage.

    Args:
        after: by replica, sending stage and lane, the last message seen; it is brought up to date, and older ones are
            left out.
    """
    clocks = _clocks(reports)
    found = []
    for report in reports:
        for name, source, target in lanes_of(report.stage, len(reports)):
            if source != report.stage:
                continue
            other = reports[target].records.get(name.replace("_out", "_in"), [])
            begun = {record.number: record.begun_s - clocks[source] for record in report.records.get(name, [])}
            key = (report.replica, source, name)
            last = -1 if after is None else after.get(key, -1)
            for record in other:
                if record.number <= last or record.number not in begun:
                    continue
                done = record.done_s - clocks[target]
                ready = min(max(begun[record.number], record.begun_s - clocks[target]), done)
                moved = record._replace(begun_s=ready, done_s=done)
                found.append(Seen(name.split("_")[0].removesuffix("s"), source, target, moved))
                if after is not None:
                    after[key] = record.number
    return found


def _clocks(reports: Sequence[Report]) -> list[float]:
    """What each stage's clock shows beyond the first one's."""
    clocks = [0.0]
    for report in reports[:-1]:
        clocks.append(clocks[-1] + report.clock_s)
    return clocks


def timeline(reports: Sequence[Report], index: int = -1) -> Timeline:
    """One of the last steps of one pipeline, as it was. Reports in the order of the stages."""
    clocks = _clocks(reports)
    steps = [report.steps[index] for report in reports]
    zero = min(step.begun_s - clock for step, clock in zip(steps, clocks, strict=True))
    until = max(step.ended_s - clock for step, clock in zip(steps, clocks, strict=True))
    spans = tuple(
        Span(report.stage, kind, micro_batch, 0, max(start - clock - zero, 0.0), max(end - clock - zero, 0.0))
        for report, step, clock in zip(reports, steps, clocks, strict=True)
        for kind, micro_batch, start, end in step.spans
        if kind != WAIT
    )
    transfers = tuple(
        Transfer(
            *(seen.kind, seen.source, seen.target, seen.record.micro_batch, 0),
            *(seen.record.begun_s - zero, seen.record.done_s - zero, seen.record.num_bytes),
        )
        for seen in messages(reports)
        if zero <= seen.record.begun_s and seen.record.done_s <= until
    )
    return Timeline(len(reports), spans, transfers, str(steps[0].key[0]))


WAIT = "wait"
_OF_SCHEDULE = (FORWARD, BACKWARD, WAIT)


@dataclass
class Knowledge:
    """What is known of the costs of a run's steps, on the rank that decides. Grows with every look.

    Args:
        num_stages: of each pipeline.
        configured: micro-batch size that the run was configured with.
    """

    num_stages: int
    forward_s: dict[int, list[float]] = field(default_factory=dict)
    """By micro-batch size, one number a stage."""
    backward_s: dict[int, list[float]] = field(default_factory=dict)
    message_bytes: dict[int, list[float]] = field(default_factory=dict)
    saved_bytes: dict[int, list[float]] = field(default_factory=dict)
    room_bytes: list[float] = field(default_factory=list)
    step_s: float = 0.0
    """What a step takes besides its schedule."""
    measured_s: float = 0.0
    """A step, as it was since the last look."""
    _links: dict[int, Links] = field(default_factory=dict)
    _latency_s: list[float] = field(default_factory=list)
    _after: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def update(self, reports: Sequence[Report]) -> None:
        """Take in one look at all ranks. What replicas see differently counts as the slowest of them sees it."""
        replicas: dict[int, list[Report]] = {}
        for report in sorted(reports, key=lambda report: report.stage):
            replicas.setdefault(report.replica, []).append(report)
        self._compute(reports)
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

    def _compute(self, reports: Sequence[Report]) -> None:
        for kind, known in ((FORWARD, self.forward_s), (BACKWARD, self.backward_s)):
            found: dict[int, list[float]] = {}
            for report in reports:
                by_size: dict[int, list[float]] = {}
                for step in report.steps:
                    typical = step.typical(kind)
                    if typical is not None:
                        by_size.setdefault(step.key[1], []).append(typical + _overhead(step))
                for size, seconds in by_size.items():
                    stages = found.setdefault(size, [0.0] * self.num_stages)
                    stages[report.stage] = max(stages[report.stage], median(seconds))
            factors = []
            for size, stages in found.items():
                before = known.get(size)
                if before is None:
                    known[size] = stages
                    continue
                factors.append([now / then if now and then else 1.0 for now, then in zip(stages, before, strict=True)])
                known[size] = [now or then for now, then in zip(stages, before, strict=True)]
            # A device that has become slower is slower at every size; the others were measured before.
            slower = [median(of_stage) for of_stage in zip(*factors, strict=True)]
            for other in known.keys() - found.keys() if slower else ():
                known[other] = [seconds * factor for seconds, factor in zip(known[other], slower, strict=True)]

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
        """Of what passes between stages in training; an evaluation's micro-batches may be of another size."""
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
            clocks = _clocks(pipe)
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
            self.step_s, self.measured_s = max(median(beside), 0.0), median(whole)

    def sizes(self) -> list[int]:
        """Micro-batch sizes whose steps were measured."""
        return sorted(size for size in self.forward_s if size in self.backward_s)

    def costs(self, size: int) -> Costs:
        """Of one micro-batch of ``size`` samples that was measured."""
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


def _rate(seconds_per_byte: float | None) -> float:
    return inf if not seconds_per_byte else 1 / seconds_per_byte


def _overhead(step: StepTimes) -> float:
    """What the host takes beside each computation: time between them in which nothing was waited for."""
    spans = [(kind, start, end) for kind, _, start, end in step.spans if kind in _OF_SCHEDULE]
    busy = sum(end - start for _, start, end in spans)
    count = sum(kind != WAIT for kind, _, _ in spans)
    whole = max(end for *_, end in spans) - min(start for _, start, _ in spans)
    return max(whole - busy, 0.0) / count
