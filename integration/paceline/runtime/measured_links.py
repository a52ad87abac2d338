"""Rates of the links between a pipeline's devices, and sizes of the messages on them, as ranks have reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from ..measure.links import Links, Message
from ..measure.recorder import StepTimes
from ..schedules.costs import Link
from .cells import Cells
from .rank_reports import LaneKey, Report, Seen, is_ring, messages


@dataclass
class MeasuredLinks:
    """Links as measured so far; where replicas or directions differ, the slowest counts."""

    cells: Cells
    message_bytes: dict[int, list[float]] = field(default_factory=dict)
    """Bytes of an activation, by micro-batch size, one number a boundary between stages."""
    gradient_share: float = 1.0
    """Bytes of a gradient's message, as a part of its activation's."""
    _replicas: dict[int, Links] = field(default_factory=dict)
    _latency_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Between two devices, both ways."""
    _after: dict[tuple[int, LaneKey], int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Replicas whose links are known."""
        return len(self._replicas)

    def update(self, replicas: Mapping[int, list[Report]]) -> None:
        """Take in reports of each replica, by device."""
        self._latency_s = {}
        for replica, pipe in replicas.items():
            self._take(replica, pipe)

    def _take(self, replica: int, pipe: list[Report]) -> None:
        names = [report.host for report in pipe]
        links = self._replicas.setdefault(replica, Links([names.index(name) for name in names]))
        seen = messages(pipe, self.cells.routes, self._after)
        latency = {}
        for device, report in enumerate(pipe if is_ring(self.cells.routes) else pipe[:-1]):
            there = (device + 1) % self.cells.num_devices
            latency[device, there] = latency[there, device] = report.latency_s
        for edge, seconds in latency.items():
            self._latency_s[edge] = max(self._latency_s.get(edge, 0.0), seconds)
        links.update(
            (Message(s.source, s.target, s.record.num_bytes, s.record.begun_s, s.record.done_s, s.lane) for s in seen),
            latency,
        )
        self._take_sizes(pipe[0].steps, seen)

    def _take_sizes(self, steps: Sequence[StepTimes], seen: Sequence[Seen]) -> None:
        """Take in the sizes of training's messages; an evaluation's micro-batches may be of another size."""
        found: dict[str, dict[tuple[int, int], list[int]]] = {"activation": {}, "gradient": {}}
        for one in seen:
            step = next((step for step in steps if step.begun_s <= one.record.done_s <= step.ended_s), None)
            if step is not None:
                boundary = one.lane.stage if one.kind == "activation" else one.lane.stage - 1
                found[one.kind].setdefault((step.key[1], boundary), []).append(one.record.num_bytes)
        shares = []
        for (size, boundary), sizes in found["activation"].items():
            self.message_bytes.setdefault(size, [0.0] * (self.cells.num_stages - 1))[boundary] = typical = median(sizes)
            if typical and (size, boundary) in found["gradient"]:
                shares.append(median(found["gradient"][size, boundary]) / typical)
        if shares:
            self.gradient_share = median(shares)

    def forget(self) -> None:
        """Let the next look at the links count alone."""
        for links in self._replicas.values():
            links.forget()

    def between_stages(self) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        """A link a boundary between stages, to the stage behind and back."""
        down, up = [], []
        for boundary in range(self.cells.num_stages - 1):
            ways = [(route[boundary], route[boundary + 1]) for route in self.cells.routes]
            latency = max(self._latency_s.get(way, 0.0) for way in ways)
            down.append(Link(min(self._edge(a, b) for a, b in ways), latency, self._variation(ways)))
            up.append(Link(min(self._edge(b, a) for a, b in ways), latency, self._variation([w[::-1] for w in ways])))
        return tuple(down), tuple(up)

    def of_hosts(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Host of each device; bytes per second that leave each host."""
        hosts = next(iter(self._replicas.values())).hosts if self._replicas else [0] * self.cells.num_devices
        egress = {host: min(_rate(links.egress.get(host)) for links in self._replicas.values()) for host in set(hosts)}
        return tuple(hosts), tuple(egress.get(host, inf) for host in range(max(hosts) + 1))

    def bytes_of(self, size: int) -> tuple[float, ...]:
        """Bytes of an activation of ``size`` samples, one number a boundary between stages."""
        if size in self.message_bytes:
            return tuple(self.message_bytes[size])
        known = next(iter(self.message_bytes), None)
        if known is None:
            return (0.0,) * (self.cells.num_stages - 1)
        return tuple(num_bytes * size / known for num_bytes in self.message_bytes[known])

    def _edge(self, source: int, target: int) -> float:
        return min((_rate(links.edges.get((source, target))) for links in self._replicas.values()), default=inf)

    def _variation(self, ways: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Multiples of the replica and direction in which messages vary most."""
        found = [links.variation.get(way, ()) for links in self._replicas.values() for way in ways]
        return max(found, key=lambda multiples: max(multiples, default=0.0), default=())


def _rate(seconds_per_byte: float | None) -> float:
    return inf if not seconds_per_byte else 1 / seconds_per_byte
