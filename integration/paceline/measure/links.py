"""What the links do, from the messages that a run sends anyway: no probes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
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
    lane: Hashable = None
    """On one lane messages follow one another."""


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


STEADY = 0.15
"""Links whose messages deviate by less than this share (standard deviation) count as if all took the same."""

FEWEST, KEPT = 8, 128
"""Messages of a link that tell how they vary, and of which it is remembered, the newest: they are logged as well."""

LEAST, MOST = 0.05, 50.0
"""Multiples of the median that count as what they are: beyond, clocks and pauses play a part."""


def variation(
    messages: Iterable[Message], latency_s: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Measure how messages from stage to stage vary: seconds of each as a multiple of the mean for its bytes.

    On its lane a message waits for the one before it. Those on different lanes that share a sender each get a part:
    what counts for one is the rate of all of them, as long as it was under way.

    Args:
        messages: that share a sender, or a link.

    Returns:
        Nothing for edges that are steady, or of which little is known.
    """
    spans: list[_Span] = []
    free_s: dict[Hashable, float] = {}
    for message in sorted(messages, key=lambda message: message.begun_s):
        edge = (message.source, message.target)
        lane, done_s = (edge, message.lane), message.done_s - latency_s.get(edge, 0.0)
        begun_s = max(message.begun_s, free_s.get(lane, message.begun_s))
        if message.num_bytes:
            free_s[lane] = done_s = max(begun_s, done_s)
            spans.append(_Span(edge, begun_s, done_s, message.num_bytes))
    spans.sort(key=lambda span: span.begun_s)
    passed = [float(span.num_bytes) for span in spans]
    """Bytes of all messages while this one was under way."""
    under_way: list[int] = []
    for number, span in enumerate(spans):
        under_way = [other for other in under_way if spans[other].done_s > span.begun_s]
        for other in under_way:
            both_s = min(spans[other].done_s, span.done_s) - span.begun_s
            passed[number] += both_s * spans[other].bytes_per_s
            passed[other] += both_s * span.bytes_per_s
        under_way.append(number)
    found: dict[tuple[int, int], list[float]] = {}
    for span, num_bytes in zip(spans, passed, strict=True):
        found.setdefault(span.edge, []).append((span.done_s - span.begun_s) / num_bytes)
    return {edge: multiples for edge, each in found.items() if (multiples := _multiples(each))}


class _Span(NamedTuple):
    """A message on its link."""

    edge: tuple[int, int]
    begun_s: float
    done_s: float
    num_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """0 where it took no time that could be measured."""
        seconds = self.done_s - self.begun_s
        return self.num_bytes / seconds if seconds > 0 else 0.0


def _multiples(each: Sequence[float]) -> tuple[float, ...]:
    if len(each) < FEWEST:
        return ()
    usual = median(each)
    if usual <= 0:
        return ()
    kept = [min(max(one / usual, LEAST), MOST) for one in each[-KEPT:]]
    mean = fmean(kept)
    kept = [round(one / mean, 3) for one in kept]
    return tuple(kept) if pstdev(kept) >= STEADY else ()


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
    variation: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    """Multiples of the mean that successive messages of the newest look took, on edges that are not steady."""
    _counts_alone: bool = False
    """Whether the next look does."""

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
        if of_edge or of_host:
            together = [variation(found, latency) for found in (*of_edge.values(), *of_host.values())]
            self.variation = {edge: multiples for each in together for edge, multiples in each.items()}
        for edge, found in of_edge.items():
            self._mix(self.edges, edge, rate(found, latency.get(edge, 0.0)))
        for host, found in of_host.items():
            least = min((latency.get((m.source, m.target), 0.0) for m in found), default=0.0)
            self._mix(self.egress, host, rate(found, least))
        if of_edge or of_host:
            self._counts_alone = False

    def forget(self) -> None:
        """The next look counts alone; until then what is known holds."""
        self._counts_alone = True

    def _mix(self, known: dict[Key, float], key: Key, bytes_per_s: float) -> None:
        now = 1 / bytes_per_s
        weight = 1.0 if key not in known or self._counts_alone else self.weight
        known[key] = weight * now + (1 - weight) * known.get(key, 0.0)
