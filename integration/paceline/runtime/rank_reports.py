"""What the ranks of a run saw of its last steps, brought together: costs for the simulator, timelines for people."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing
from ..comm.transport import Record, lanes_of
from ..measure.clock import host_seconds
from ..measure.device_memory import room_bytes
from ..measure.layer_timer import ItemTimes
from ..measure.recorder import StepTimes
from ..optim.sharded import ShardedOptimizer
from ..schedules.timeline import Span, Timeline, Transfer

WAIT = "wait"
"""Kind of a span in which a rank waits for what another sends."""

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
    layers: dict[int, LayerReport] = field(default_factory=dict)
    """By item, of a step whose layers were timed."""
    state_bytes: float = 0.0
    """What each parameter of the stage takes on this rank: value, gradient, master, states."""
    moved_bytes: float = 0.0
    """Of these, what goes with a parameter to another stage."""


class LayerReport(NamedTuple):
    """One item of a stage, as it computed a micro-batch."""

    kinds: tuple[str, str]
    """Of :meth:`~paceline.runtime.movable_layers.Layers.kind`."""
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
    seconds = host_seconds(engine.clock.now)
    for name, lane in engine.transport.lanes().items():
        records[name] = [
            record._replace(begun_s=seconds(record.begun_s), done_s=seconds(record.done_s))
            for record in list(lane.records)
            if record.number > after.get(name, 0)
        ]
        if records[name]:
            # A message of the very end may be known at one end only; it is reported again.
            after[name] = records[name][-1].number - UNSETTLED
    state_bytes, moved_bytes = bytes_per_parameter(engine.module, engine.optimizer)
    report = Report(
        stage=engine.stage_id,
        replica=engine.pipe_number,
        host=host_name(),
        steps=engine.meter.recorder.steps(),
        records=records,
        saved_bytes=dict(engine.meter.saved_bytes),
        room_bytes=float(memory_bytes if memory_bytes is not None else room_bytes(device, ranks_sharing(device))),
        clock_s=clock_s,
        latency_s=latency_s,
        layers=engine.meter.take_layer_reports(),
        state_bytes=state_bytes,
        moved_bytes=moved_bytes,
    )
    reports: list[Report] = engine.control.gather_at_first(report)
    return reports


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
        (optimizer.num_bytes(), optimizer.gradient_bytes()) if isinstance(optimizer, ShardedOptimizer) else (0, 0)
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
            left out.
    """
    clocks = clocks_of(reports)
    matched: list[tuple[str, int, int, Record, Record]] = []
    together: dict[tuple[int, float], float] = {}
    """By rank and end, when the last of what ended there at that moment could begin: a batch of NCCL ends as one."""

    def ready(source: int, target: int, sent: Record, received: Record) -> float:
        return max(sent.begun_s - clocks[source], received.begun_s - clocks[target])

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
    """What each stage's clock shows beyond the first one's."""
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
