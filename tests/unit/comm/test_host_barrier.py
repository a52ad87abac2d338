"""Barriers of hosts: real processes, gloo."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from paceline.comm.host_barrier import host_barrier, wait_for_hosts
from support.ranks import run_ranks


def waits(ranks: list[int], late: int, rounds: int) -> list[tuple[float, float]]:
    """When this rank came and went, of each round; ``late`` comes later than the others."""
    dist.init_process_group("gloo")
    world, group = dist.group.WORLD, dist.new_group(ranks)
    assert world is not None
    found = []
    for number in range(rounds if dist.get_rank() in ranks else 0):
        if dist.get_rank() == late:
            time.sleep(0.05 * (number + 1))
        came = time.monotonic()
        wait_for_hosts(world, group)
        found.append((came, time.monotonic()))
    return found


@pytest.mark.parametrize("ranks", [[0, 1], [1, 2, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("late", [1, 2])
def test_nobody_goes_before_all_have_come(ranks: list[int], late: int) -> None:
    found = [times for times in run_ranks(waits, 5, ranks, late, 4) if times]
    assert len(found) == len(ranks)
    for times in zip(*found, strict=True):
        assert max(came for came, _ in times) <= min(gone for _, gone in times)


def test_a_group_of_one_waits_for_nobody() -> None:
    world = dist.ProcessGroup(0, 1)
    wait_for_hosts(world, None)
    host_barrier(world, torch.device("cpu"))(world)  # nor do ranks whose collectives leave no device waiting
