"""How fast ranks exchange, before a run: for the search over parallel strategies. All of it is collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..planning.cluster import Fabric

MESSAGE_NUMEL = 1 << 20
"""Of a message between two ranks, in fp32: an activation."""

BUCKET_NUMEL = 1 << 22
"""Of a collective, in fp32: the optimizer's buckets have so many elements at least."""

REPEATS = 7

PROBE_NUMEL, AT_MOST_S = 1 << 16, 0.25
"""A smaller message, and how long the whole one may take by it."""

ENOUGH_S = 2.0
"""Repeats of a measurement take no longer together, on a slow link."""


def measure_fabric(
    group: Any,
    device: torch.device,
    messages_on: torch.device | None = None,
    zero1: Callable[[torch.Tensor], None] | None = None,
) -> Fabric:
    """Between the ranks of ``group``, two at least: all call it, and all get the same answer.

    Args:
        zero1: brings gradients to their owners and new values back as the optimizer does, both in the memory that it is
            given; None: that is not measured.
        messages_on: where messages come from; None: ``device``, on which collectives are.
    """
    ranks = dist.get_process_group_ranks(group)
    size, rank = len(ranks), dist.get_rank(group)
    buffer = torch.zeros(BUCKET_NUMEL, device=device)
    messages = buffer if messages_on is None else buffer.to(messages_on)
    received = torch.zeros(BUCKET_NUMEL, device=device)

    def there_and_back(values: torch.Tensor) -> None:
        if rank == 0:
            dist.send(values, ranks[1], group=group)
            dist.recv(values, ranks[1], group=group)
        elif rank == 1:
            dist.recv(values, ranks[0], group=group)
            dist.send(values, ranks[0], group=group)

    latency_s = slowest_s(lambda: there_and_back(messages[:1]), group, device) / 2
    probe_s = slowest_s(lambda: there_and_back(messages[:PROBE_NUMEL]), group, device) / 2
    # Over a slow link less is sent, or measuring would take minutes.
    share = min(1.0, AT_MOST_S * PROBE_NUMEL / probe_s / MESSAGE_NUMEL)
    message = messages[: max(PROBE_NUMEL, int(share * MESSAGE_NUMEL))]
    buffer = buffer[: max(size * PROBE_NUMEL, int(share * BUCKET_NUMEL))]
    message_s = slowest_s(lambda: there_and_back(message), group, device) / 2 - latency_s
    reduce_s = slowest_s(lambda: dist.all_reduce(buffer, group=group), group, device)
    shares = buffer[: len(buffer) // size * size]
    exchange_s = slowest_s(lambda: dist.all_to_all_single(received[: len(shares)], shares, group=group), group, device)
    num_bytes = buffer.element_size() * len(buffer)
    there_and_back_bytes = 2 * (size - 1) / size * num_bytes
    zero1_s = None if zero1 is None else slowest_s(partial(zero1, buffer), group, device)
    return Fabric(
        bytes_per_s=message.element_size() * len(message) / max(message_s, 1e-9),
        latency_s=latency_s,
        all_reduce_bytes_per_s=there_and_back_bytes / reduce_s,
        all_to_all_bytes_per_s=(size - 1) / size * num_bytes / exchange_s,
        zero1_bytes_per_s=None if zero1_s is None else there_and_back_bytes / zero1_s,
    )


def agreed(values: Sequence[float], device: torch.device) -> list[float]:
    """The mean over all ranks of each of ``values``."""
    together = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(together)
    return (together / dist.get_world_size()).tolist()


def slowest_s(work: Callable[[], object], group: Any, device: torch.device) -> float:
    """Median seconds of ``work`` on the rank of ``group`` where that is longest; all begin together."""

    def timed() -> float:
        dist.barrier(group)
        _wait(device)
        begun = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - begun

    def longest(seconds: float) -> float:
        together = torch.tensor(seconds, device=device)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        return float(together)

    work()  # connections are made
    first_s = longest(timed())
    if first_s >= ENOUGH_S:
        return first_s
    repeats = max(1, min(REPEATS, int(ENOUGH_S / first_s)))
    return longest(median([timed() for _ in range(repeats)]))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
