"""Reports of the ranks on their last steps, brought together: costs for the simulator, timelines for people."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing
from ..comm.transport import Record, lanes_of
from ..measure.clock import host_seconds
from ..measure.device_memory import room_bytes
from ..measure.host_names import host_name, machine_name
from ..measure.layer_timer import ItemTimes
from ..measure.recorder import StepTimes
from ..optim.sharded import ShardedOptimizer
from ..planning.rebalance import Uneven
from ..schedules.directions import chunks_of
from ..schedules.lower import PAIRED
from ..schedules.schedule import BACKWARD, BACKWARD_INPUT, FORWARD
from ..schedules.timeline import Span, Timeline, Transfer

if TYPE_CHECKING:
    from .meter import Meter
    from .pipeline_links import Links

WAIT = "wait"
"""Kind of a span in which a rank waits for what another sends."""

_MAKERS = {FORWARD: "activation", BACKWARD: "gradient", BACKWARD_INPUT: "gradient"}
"""By the kind of a computation, the kind of message that it makes."""

PINGS = 4
COMPARISONS = 3
"""Comparisons of clocks on one machine, which are one clock: they find the latency when nobody is busy."""
UNSETTLED = 4
"""Messages at the end of a lane's records that one end may have noted and the other not yet: they are on their way,
where steps run into each other."""


Routes = Sequence[Sequence[int]]
"""Device of each stage, one route a direction."""


class LaneKey(NamedTuple):
    """A lane's end at a stage; see :func:`~paceline.comm.transport.lanes_of`."""

    direction: int
    stage: int
    name: str


@dataclass
class Report:
    """One rank's view. Times in seconds of its own clock."""

    device: int
    """Number of the rank along its pipeline."""
    replica: int
    host: str
    steps: list[StepTimes]
    records: dict[LaneKey, list[Record[float]]]
    saved_bytes: dict[int, dict[int, float]]
    """Bytes that a live micro-batch keeps, by micro-batch size and chunk."""
    room_bytes: float
    clock_s: float = 0.0
    """The next device's clock minus this one's."""
    latency_s: float = 0.0
    """To the next device; from the last one to the first, if messages go that way."""
    layers: dict[int, LayerReport] = field(default_factory=dict)
    """By item, of a step whose layers were timed."""
    state_bytes: float = 0.0
    """Bytes of each parameter on this rank: value, gradient, master, states."""
    moved_bytes: float = 0.0
    """Those of them that go with a parameter to another stage."""
    paused_bytes: float = 0.0
    """Those of these that training waits for; see :mod:`.migration`."""
    deferred_bytes: dict[int, dict[int, float]] = field(default_factory=dict)
    """Bytes of a micro-batch between the backward of the inputs and that of the weights, as those that it keeps; what
    they are at most, before any was split."""
    again_bytes: dict[int, dict[int, float]] = field(default_factory=dict)
    """Bytes of what a micro-batch keeps more where its layers are not recomputed, by micro-batch size and chunk."""
    again_layers: dict[int, int] = field(default_factory=dict)
    """How many layers these are, by chunk."""
    keeps_all_or_nothing: bool = False
    again_room_bytes: float = 0.0
    """Bytes that all that was alive might take in the last step."""
    uneven_s: dict[int, Uneven] | None = field(default_factory=dict)
    """Of a sample, by item; None: not known yet."""


class LayerReport(NamedTuple):
    """One item of a rank, as it computed a micro-batch."""

    kinds: tuple[str, str]
    """See :meth:`~paceline.runtime.movable_layers.Layers.kind`."""
    num_parameters: int
    times: ItemTimes
    size: int = 1
    """Samples of the micro-batches that were timed."""


def compare_clocks(control: ControlPlane, pipe: Sequence[int], is_ring: bool = False) -> tuple[float, float]:
    """Measure the next device's clock minus this one's, and half of the fastest round trip to it, in seconds.

    Every rank of the pipeline calls it; a few small messages go over the control plane, edge after edge.

    Args:
        pipe: global ranks by device.
        is_ring: the first device is next to the last one.
    """
    own, last = pipe.index(dist.get_rank()), len(pipe) - 1
    found = (0.0, 0.0)
    edges = [(one, one + 1) for first in (0, 1) for one in range(first, last, 2)]  # few share a device at a time
    for asks, answers in [*edges, *([(last, 0)] if is_ring else [])]:
        if own == asks:
            found = _ask(control, pipe[answers])
        elif own == answers:
            _answer(control, pipe[asks])
    return found


def is_ring(routes: Routes) -> bool:
    """Whether messages go between the last and the first device, which are not neighbours otherwise."""
    last = max(routes[0])
    return last > 1 and any({a, b} == {0, last} for route in routes for a, b in pairwise(route))


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
        links: of this rank's stages to their neighbours.
        module: of its stages.
        optimizer: that trains it, if it is one of ours.
    """

    def __init__(
        self,
        control: ControlPlane,
        meter: Meter,
        device: torch.device,
        *,
        links: Links,
        module: nn.Module,
        optimizer: object,
    ) -> None:
        self._control, self._meter, self._device = control, meter, device
        self._links, self._module, self._optimizer = links, module, optimizer
        self.clocks: deque[tuple[float, float]] = deque(maxlen=COMPARISONS)
        """The next device's clock minus this one's, and the latency to it, as compared last."""
        self._is_one_machine = len(set(control.gather(machine_name()))) == 1

    @property
    def _clock_s(self) -> float:
        """The next device's clock minus this one's: on one machine as found when fewest were busy, since the last
        comparison there holds for the rest of the run; elsewhere the newest, since clocks drift."""
        return (min(self.clocks, key=lambda found: found[1]) if self._is_one_machine else self.clocks[-1])[0]

    def gather(
        self,
        after: dict[LaneKey, int],
        *,
        layers: Mapping[int, LayerReport] | None = None,
        uneven_s: Mapping[int, Uneven] | None = None,
        memory_bytes: int | None = None,
    ) -> list[Report]:
        """Gather the reports of the last steps on rank 0. Collective, between steps.

        Args:
            after: by lane, the last message that was reported; brought up to date.
            layers: of this rank, if a step's layers were timed.
            uneven_s: see :class:`Report`.
            memory_bytes: that activations may take; None: what the device has free.
        """
        if len(self.clocks) < COMPARISONS or not self._is_one_machine:
            self.clocks.append(compare_clocks(self._control, self._links.ranks, is_ring(self._links.routes)))
        state_bytes, moved_bytes, paused_bytes = bytes_per_parameter(self._module, self._optimizer)
        if memory_bytes is None:
            memory_bytes = step_room_bytes(self._device, self._optimizer)
        report = Report(
            device=self._links.device_number,
            replica=self._links.pipe_number,
            host=host_name(),
            steps=self._meter.recorder.steps(),
            records=self._messages(after),
            saved_bytes={size: dict(chunks) for size, chunks in self._meter.saved_bytes.items()},
            room_bytes=float(memory_bytes),
            deferred_bytes=self._meter.deferred_bytes,
            again_bytes={
                size: {chunk: each.num_bytes for chunk, each in chunks.items()}
                for size, chunks in self._meter.recomputed_bytes.items()
            },
            again_layers={
                chunk: each.layers for chunks in self._meter.recomputed_bytes.values() for chunk, each in chunks.items()
            },
            keeps_all_or_nothing=self._meter.keeps_all_or_nothing,
            again_room_bytes=self._meter.again_room_bytes,
            clock_s=self._clock_s,
            latency_s=min(latency for _, latency in self.clocks),
            layers=dict(layers or {}),
            state_bytes=state_bytes,
            moved_bytes=moved_bytes,
            paused_bytes=paused_bytes,
            uneven_s=None if uneven_s is None else dict(uneven_s),
        )
        reports: list[Report] = self._control.gather_at_first(report)
        return reports

    def skip_messages(self, after: dict[LaneKey, int]) -> None:
        """Report none of the messages that are there now; ``after`` as of :meth:`gather`."""
        self._messages(after, again=0)

    def _messages(self, after: dict[LaneKey, int], again: int = UNSETTLED) -> dict[LaneKey, list[Record[float]]]:
        """Messages of this rank's lanes beyond ``after``, in seconds of the host's clock.

        Args:
            again: the last ones of each lane that are reported again.
        """
        records = {}
        seconds = host_seconds(self._meter.clock.now)
        for direction, stage in self._links.chunks:
            for name, lane in self._links.transports[direction].lanes(stage).items():
                key = LaneKey(direction, stage, name)
                records[key] = [
                    replace(record, begun_s=seconds(record.begun_s), done_s=seconds(record.done_s))
                    for record in list(lane.records)
                    if record.number > after.get(key, 0)
                ]
                if records[key]:
                    # A message of the very end may be known at one end only; it is reported again.
                    after[key] = max(after.get(key, 0), records[key][-1].number - again)
        if self._links.order == PAIRED and self._device.type == "cuda":
            return in_turn(records)
        return records


def in_turn(records: Mapping[LaneKey, Sequence[Record[float]]]) -> dict[LaneKey, list[Record[float]]]:
    """Messages of a rank whose calls run one after another, as NCCL's do: none begins before the one before it ends.

    Without that, a call behind one whose peer is busy would seem to take as long as both.
    """
    ends = sorted({record.done_s for own in records.values() for record in own})
    before = dict(zip(ends, [-inf, *ends], strict=False))
    return {
        key: [replace(record, begun_s=max(record.begun_s, before[record.done_s])) for record in own]
        for key, own in records.items()
    }


def step_room_bytes(device: torch.device, optimizer: object) -> int:
    """Bytes of what is free between steps that a step's activations may take: its gradients take some, too."""
    coming = optimizer.gradients.coming_bytes() if isinstance(optimizer, ShardedOptimizer) else 0
    return room_bytes(device, ranks_sharing(device)) - coming


def bytes_per_parameter(module: nn.Module, optimizer: object) -> tuple[float, float, float]:
    """Bytes that each parameter takes on this rank, with all that belongs to it.

    Returns:
        All of it; what goes along when the parameter moves to another rank: all but its gradient; and what training
        waits for then.
    """
    parameters = list(module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    if not count:
        return 0.0, 0.0, 0.0
    values = sum(parameter.nbytes for parameter in parameters)
    if not isinstance(optimizer, ShardedOptimizer):
        return values / count, values / count, values / count
    whole = values + optimizer.num_bytes()
    moved = whole - optimizer.gradients.num_bytes()
    is_beside = optimizer.may_wait_for_states
    trained = sum(parameter.nbytes for parameter in parameters if optimizer.layout.trains(parameter))
    return whole / count, moved / count, (trained if is_beside else moved) / count


class Seen(NamedTuple):
    """A message with both its ends; seconds of the first device's clock."""

    lane: LaneKey
    """The sender's end."""
    source: int
    """Device that sent it."""
    target: int
    record: Record[float]

    @property
    def kind(self) -> str:
        """``"activation"`` or ``"gradient"``."""
        return self.lane.name.split("_")[0].removesuffix("s")


def messages(
    reports: Sequence[Report], routes: Routes, after: dict[tuple[int, LaneKey], int] | None = None
) -> list[Seen]:
    """The messages of one pipeline, its reports in the order of the devices, on the clock of the first one.

    Args:
        after: by replica and sender's end of a lane, the last message seen; it is brought up to date, and older ones
            are skipped.
    """
    clocks = clocks_of(reports)
    matched: list[tuple[LaneKey, int, int, Record[float], Record[float]]] = []
    together: dict[tuple[int, float], float] = {}
    """By device and end, when the last of what ended there at that moment could begin: a batch of NCCL ends as one."""

    def ready(source: int, target: int, sent: Record[float], received: Record[float]) -> float:
        return max(sent.begun_s - clocks[source], received.begun_s - clocks[target])

    for sends, receives, source, target in _lanes(routes):
        own = {record.number: record for record in reports[source].records.get(sends, [])}
        for record in reports[target].records.get(receives, []):
            if sent := own.get(record.number):
                matched.append((sends, source, target, sent, record))
                could = ready(source, target, sent, record)
                for batch in ((source, sent.done_s), (target, record.done_s)):
                    together[batch] = max(together.get(batch, could), could)
    found = []
    for lane, source, target, _, record in matched:
        key = (reports[source].replica, lane)
        if after is not None:
            if record.number <= after.get(key, -1):
                continue
            after[key] = record.number
        done = record.done_s - clocks[target]
        begun = min(together[target, record.done_s], done)
        found.append(Seen(lane, source, target, replace(record, begun_s=begun, done_s=done)))
    return found


def _lanes(routes: Routes) -> Iterator[tuple[LaneKey, LaneKey, int, int]]:
    """Both ends of each lane between devices, with the device that sends and the one that receives."""
    for direction, route in enumerate(routes):
        for stage in range(len(route)):
            for name, sends, receives in lanes_of(stage, len(route)):
                if sends == stage and route[sends] != route[receives]:
                    other = LaneKey(direction, receives, name.replace("_out", "_in"))
                    yield LaneKey(direction, stage, name), other, route[sends], route[receives]


def clocks_of(reports: Sequence[Report]) -> list[float]:
    """Each device's clock minus the first one's."""
    clocks = [0.0]
    for report in reports[:-1]:
        clocks.append(clocks[-1] + report.clock_s)
    return clocks


def timeline(reports: Sequence[Report], routes: Routes, num_micro_batches: int, index: int = -1) -> Timeline:
    """One of the last steps of one pipeline, as it was. Reports in the order of the devices.

    Where steps run into each other, it is what ran in that step, whichever step it was of: micro-batches are numbered
    on from those of the oldest of them.
    """
    clocks = clocks_of(reports)
    steps = [report.steps[index] for report in reports]
    zero = min(step.begun_s - clock for step, clock in zip(steps, clocks, strict=True))
    until = max(step.ended_s - clock for step, clock in zip(steps, clocks, strict=True))
    oldest = min((span.number for step in steps for span in step.spans if span.number >= 0), default=0)
    first = oldest - oldest % num_micro_batches
    chunks = [chunks_of(device, routes) for device in range(len(reports))]
    spans = tuple(
        Span(
            *(report.device, span.kind, max(span.number - first, -1), span.chunk),
            *(max(moment - clock - zero, 0.0) for moment in (span.start, span.end)),
        )
        for report, step, clock in zip(reports, steps, clocks, strict=True)
        for span in step.spans
        if span.kind != WAIT
    )
    made = {(span.rank, _MAKERS.get(span.kind), span.micro_batch, span.chunk) for span in spans}
    transfers = []
    for seen in messages(reports, routes):
        micro_batch, chunk = seen.record.micro_batch - first, chunks[seen.source].index(seen.lane[:2])
        if (
            (seen.source, seen.kind, micro_batch, chunk) in made
            and zero <= seen.record.begun_s
            and seen.record.done_s <= until
        ):
            ends = seen.record.begun_s - zero, seen.record.done_s - zero
            transfers.append(
                Transfer(seen.kind, seen.source, seen.target, micro_batch, chunk, *ends, seen.record.num_bytes)
            )
    stages = tuple(tuple(stage for _, stage in held) for held in chunks)
    return Timeline(len(reports), spans, tuple(transfers), str(steps[0].key[0]), stages)
