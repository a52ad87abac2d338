"""What the links do, from the messages that a run sends anyway: no probes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class Message(NamedTuple):
    """One message between stages; seconds of one clock."""

    source: int
    target: int
    num_bytes: int
    begun_s: float
    """When it was sent, or, if that was later, when its receiver was ready for it."""
    done_s: float


def rate(messages: Iterable[Message], latency_s: float = 0.0) -> float:
    """Bytes per second while at least one of ``messages`` was under way; infinite if there is none to measure.

    Several that share a sender count together, so their sum is the sender's rate, however they took turns.
    """
    total, busy, until = 0, 0.0, -math.inf
    for message in sorted(messages, key=lambda message: message.begun_s):
        done = message.done_s - latency_s
        begun = max(message.begun_s, until)
        total += message.num_bytes
        busy += max(done - begun, 0.0)
        until = max(until, done)
    return total / busy if total and busy > 0 else math.inf


@dataclass
class Links:
    """What is known of the links of a pipeline: an exponentially weighted mean of what every look at them found.

    Args:
        hosts: of each stage. What leaves a host shares its sending side.
        weight: of the newest look.
    """

    hosts: Sequence[int]
    weight: float = 0.7
    edges: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds per byte from stage to stage, where both are on one host."""
    egress: dict[int, float] = field(default_factory=dict)
    """Seconds per byte of each host."""

    def update(self, messages: Iterable[Message], latency_s: Mapping[tuple[int, int], float] | None = None) -> None:
        """Take in the messages since the last look."""
        of_edge: dict[tuple[int, int], list[Message]] = {}
        of_host: dict[int, list[Message]] = {}
        for message in messages:
            source, target = self.hosts[message.source], self.hosts[message.target]
            if source != target:
                of_host.setdefault(source, []).append(message)
            else:
                of_edge.setdefault((message.source, message.target), []).append(message)
        latency = latency_s or {}
        for edge, found in of_edge.items():
            self._mix(self.edges, edge, rate(found, latency.get(edge, 0.0)))
        for host, found in of_host.items():
            least = min((latency.get((m.source, m.target), 0.0) for m in found), default=0.0)
            self._mix(self.egress, host, rate(found, least))

    def _mix(self, known: dict[Key, float], key: Key, bytes_per_s: float) -> None:
        now = 1 / bytes_per_s
        known[key] = now if key not in known else self.weight * now + (1 - self.weight) * known[key]
