"""Barriers of hosts before collectives of their GPUs.

A GPU that has been given a collective waits for the GPUs of the other ranks, and its host may wait with it: memory is
pinned, for one, when the GPU has done all that it was given, and no other thread reaches the GPU meanwhile. If another
rank needs a message from this host before it comes to the collective, neither goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .transport import TIMEOUT

TAG = 0x3EE7
"""Tag of these messages. Other messages in the same group have other tags."""

HostBarrier = Callable[[Any], None]
"""Returns when all ranks of a process group have called it; None is a group of one."""


def host_barrier(world: dist.ProcessGroup, device: torch.device) -> HostBarrier:
    """For collectives on ``device`` that are issued beside what the model computes.

    Args:
        world: gloo's group of all ranks. One thread of each rank has a barrier in it at a time.
    """
    if device.type == "cuda" and dist.get_backend() != "gloo":  # gloo's collectives leave the device alone
        return partial(wait_for_hosts, world)
    return lambda group: None


def wait_for_hosts(world: dist.ProcessGroup, group: dist.ProcessGroup | None) -> None:
    """Wait until all ranks of ``group`` have come here, through messages in ``world``.

    In round r each rank hears from the one 2ʳ before it, and so of twice as many as in the round before.
    """
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    distance = 1
    while distance < len(ranks):
        own = ranks.index(dist.get_rank())
        after, before = ranks[(own + distance) % len(ranks)], ranks[own - distance]
        heard = dist.irecv(torch.empty(1), before, group=world, tag=TAG)
        told = dist.isend(torch.zeros(1), after, group=world, tag=TAG)
        for work in (heard, told):
            assert work is not None, "a rank outside of the group"
            work.wait(TIMEOUT)
        distance *= 2
