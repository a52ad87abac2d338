"""Reports of the ranks on their last steps, brought together: costs for the simulator, timelines for people."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing
from ..comm.transport import Record, Transport, lanes_of
from ..measure.clock import host_seconds
from ..measure.device_memory import room_bytes
from ..measure.layer_timer import ItemTimes
from ..measure.recorder import StepTimes
from ..optim.sharded import ShardedOptimizer
from ..schedules.timeline import Span, Timeline, Transfer

if TYPE_CHECKING:
    from .meter import Meter

WAIT = "wait"
"""Kind of a span in which a rank waits for what another sends."""

PINGS = 4
COMPARISONS = 3
"""Comparisons of clocks on one machine, which are one clock: they find the latency when nobody is busy."""
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
    """Bytes that a live micro-batch keeps, by micro-batch size."""
    room_bytes: float
    clock_s: float = 0.0
    """The next stage's clock minus this one's."""
    latency_s: float = 0.0
    """To the next stage."""
    layers: dict[int, LayerReport] = field(default_factory=dict)
    """By item, of a step whose layers were timed."""
    state_bytes: float = 0.0
    """Bytes of each parameter of the stage on this rank: value, gradient, master, states."""
    moved_bytes: float = 0.0
    """Those of them that go with a parameter to another stage."""


class LayerReport(NamedTuple):
    """One item of a stage, as it computed a micro-batch."""

    kinds: tuple[str, str]
    """See :meth:`~paceline.runtime.movable_layers.Layers.kind`."""
    num_parameters: int
    times: ItemTimes
    size: int = 1
    """Samples of the micro-batches that were timed."""


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
    """Measure the next stage's clock minus this one's, and half of the fastest round trip to it, in seconds.

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


class ReportGatherer:
    """Brings the reports of all ranks together. All ranks make one at the same time.

    Args:
        pipe_ranks: global ranks of this rank's pipeline, by device.
        stage: of this rank.
        replica: number of its pipeline.
        transport: lanes to its neighbours.
        module: of its stage.
        optimizer: that trains it, if it is one of ours.
    """

    def __init__(
        self,
        control: ControlPlane,
        meter: Meter,
        device: torch.device,
        *,
        pipe_ranks: Sequence[int],
        stage: Callable[[], int],
        replica: int,
        transport: Transport,
        module: nn.Module,
        optimizer: Any,
    ) -> None:
        self._control, self._meter, self._device = control, meter, device
        self._pipe_ranks, self._stage, self._replica = pipe_ranks, stage, replica
        self._transport, self._module, self._optimizer = transport, module, optimizer
        self.clocks: deque[tuple[float, float]] = deque(maxlen=COMPARISONS)
        """The next stage's clock minus this one's, and the latency to it, as compared last."""
        self._is_one_machine = len(set(control.gather(machine_name()))) == 1

    def gather(
        self,
        after: dict[str, int],
        *,
        layers: Mapping[int, LayerReport] | None = None,
        memory_bytes: int | None = None,
    ) -> list[Report]:
        """Gather the reports of the last steps on rank 0. Collective, between steps.

        Args:
            after: by lane, the last message that was reported; brought up to date.
            layers: of this rank, if a step's layers were timed.
            memory_bytes: that activations may take; None: what the device has free.
        """
        if len(self.clocks) < COMPARISONS or not self._is_one_machine:
            self.clocks.append(compare_clocks(self._control, self._pipe_ranks))
        state_bytes, moved_bytes = bytes_per_parameter(self._module, self._optimizer)
        if memory_bytes is None:
            memory_bytes = room_bytes(self._device, ranks_sharing(self._device))
        report = Report(
            stage=self._stage(),
            replica=self._replica,
            host=host_name(),
            steps=self._meter.recorder.steps(),
            records=self._messages(after),
            saved_bytes=dict(self._meter.saved_bytes),
            room_bytes=float(memory_bytes),
            clock_s=self.clocks[-1][0],
            latency_s=min(latency for _, latency in self.clocks),
            layers=dict(layers or {}),
            state_bytes=state_bytes,
            moved_bytes=moved_bytes,
        )
        reports: list[Report] = self._control.gather_at_first(report)
        return reports

    def _messages(self, after: dict[str, int]) -> dict[str, list[Record]]:
        """Messages of this rank's lanes beyond ``after``, in seconds of the host's clock."""
        records = {}
        seconds = host_seconds(self._meter.clock.now)
        for name, lane in self._transport.lanes().items():
            records[name] = [
                record._replace(begun_s=seconds(record.begun_s), done_s=seconds(record.done_s))
                for record in list(lane.records)
                if record.number > after.get(name, 0)
            ]
            if records[name]:
                # A message of the very end may be known at one end only; it is reported again.
                after[name] = records[name][-1].number - UNSETTLED
        return records


def bytes_per_parameter(module: nn.Module, optimizer: Any) -> tuple[float, float]:
    """Bytes that each parameter of a stage takes on this rank, with all that belongs to it.

    Returns:
        All of it, and what goes along when the parameter moves to another stage: all but its gradient.
    """
    parameters = list(module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    if not count:
        return 0.0, 0.0
    own, gradients = (
        (optimizer.num_bytes(), optimizer.gradients.num_bytes()) if isinstance(optimizer, ShardedOptimizer) else (0, 0)
    )
    whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters) + own
    return whole / count, (whole - gradients) / count


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
            skipped.
    """
    clocks = clocks_of(reports)
    matched: list[tuple[str, int, int, Record, Record]] = []
    together: dict[tuple[int, float], float] = {}
    """By rank and end, when the last of what ended there at that moment could begin: a batch of NCCL ends as one."""

    def ready(source: int, target: int, sent: Record, received: Record) -> float:
        return float(max(sent.begun_s - clocks[source], received.begun_s - clocks[target]))

    for report in reports:
        for name, source, target in lanes_of(report.stage, len(reports)):
            if source != report.stage:
                continue
            own = {record.number: record for record in report.records.get(name, [])}
            for record in reports[target].records.get(name.replace("_out", "_in"), []):
                if sent := own.get(record.number):
                    matched.append((name, source, target, sent, record))
                    could = ready(source, target, sent, record)
                    for batch in ((source, sent.done_s), (target, record.done_s)):
                        together[batch] = max(together.get(batch, could), could)
    found = []
    for name, source, target, _, record in matched:
        key = (reports[source].replica, source, name)
        if after is not None:
            if record.number <= after.get(key, -1):
                continue
            after[key] = record.number
        done = record.done_s - clocks[target]
        begun = min(together[target, record.done_s], done)
        moved = record._replace(begun_s=begun, done_s=done)
        found.append(Seen(name.split("_")[0].removesuffix("s"), source, target, moved))
    return found


def clocks_of(reports: Sequence[Report]) -> list[float]:
    """Each stage's clock minus the first one's."""
    clocks = [0.0]
    for report in reports[:-1]:
        clocks.append(clocks[-1] + report.clock_s)
    return clocks


def timeline(reports: Sequence[Report], index: int = -1) -> Timeline:
    """One of the last steps of one pipeline, as it was. Reports in the order of the stages."""
    clocks = clocks_of(reports)
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
