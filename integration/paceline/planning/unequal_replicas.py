"""Micro-batches of a step for each of several replicas, by how fast they are.

Replicas wait for each other once a step, to add up their gradients: a step takes as long as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple


class ReplicaTimes(NamedTuple):
    """Seconds of one replica's part of a step: ``fixed_s + micro_batch_s`` times its micro-batches."""

    micro_batch_s: float
    fixed_s: float = 0.0

    def step_s(self, micro_batches: int) -> float:
        """Seconds with so many micro-batches."""
        return self.fixed_s + self.micro_batch_s * micro_batches


class MicroBatchCounts(NamedTuple):
    """Numbers of micro-batches of a step: ``least`` and more, in multiples of ``unit``."""

    least: int = 1
    unit: int = 1

    def allow(self, micro_batches: int) -> bool:
        """Whether a step may have so many."""
        return micro_batches >= self.least and micro_batches % self.unit == 0

    @property
    def rule(self) -> str:
        """The numbers in words: ``"at least 4 micro-batches, in multiples of 2"``."""
        return f"at least {self.least} micro-batches" + (f", in multiples of {self.unit}" if self.unit > 1 else "")


ANY_NUMBER = MicroBatchCounts()


def fastest_shares(times: Sequence[ReplicaTimes], total: int, counts: MicroBatchCounts = ANY_NUMBER) -> tuple[int, ...]:
    """Micro-batches of each replica with which the slowest takes least time.

    Every micro-batch goes to the replica that ends first with it, which is optimal: an exchange between two replicas
    never helps.

    >>> fastest_shares([ReplicaTimes(1.0), ReplicaTimes(3.0)], 8)
    (6, 2)

    Args:
        total: micro-batches of a step, of all replicas.
        counts: numbers that a replica can have; equal shares are among them.

    Raises:
        ValueError: too few micro-batches for the replicas.
    """
    least, unit = counts
    if total < least * len(times):
        raise ValueError(
            f"{total} micro-batches for {len(times)} replicas: each needs {least} at least; raise the batch size."
        )
    shares = [least] * len(times)
    ends = [(replica.step_s(least + unit), number) for number, replica in enumerate(times)]
    heapify(ends)
    for _ in range((total - sum(shares)) // unit):
        number = ends[0][1]
        shares[number] += unit
        heapreplace(ends, (times[number].step_s(shares[number] + unit), number))
    assert sum(shares) == total, (total, least, unit)
    return tuple(shares)


def slowest_s(times: Sequence[ReplicaTimes], shares: Sequence[int]) -> float:
    """Seconds of a step: those of the slowest replica."""
    return max(replica.step_s(share) for replica, share in zip(times, shares, strict=True))


def dealt(shares: Sequence[int]) -> tuple[int, ...]:
    """Replica of each micro-batch of a step, evenly mixed: in equal shares they take turns.

    >>> dealt((2, 2))
    (0, 1, 0, 1)
    >>> dealt((3, 1))
    (0, 0, 1, 0)
    """
    places = [((2 * own + 1) / (2 * share), replica) for replica, share in enumerate(shares) for own in range(share)]
    return tuple(replica for _, replica in sorted(places))
