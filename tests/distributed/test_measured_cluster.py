"""What is measured of a cluster is what a run does on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.planning.cluster import Cluster
from support.ranks import run_ranks

OPERATIONS = ("isend", "irecv", "reduce", "broadcast", "all_reduce", "all_to_all_single", "all_gather_into_tensor")
WIDTH, SLOW_S = 64, 0.5
"""Much longer than a whole exchange takes, also where busy cores are shared."""
TRIES = 20


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Operations of torch.distributed on more than a few numbers."""
    calls: Counter[str] = Counter()

    def count(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.numel() > WIDTH:
                calls[name] += 1
            return act(tensor, *args, **options)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(dist, name, count(name, getattr(dist, name)))
        yield calls


def step_operations() -> Counter[str]:
    """Of a step of ZeRO 1 with one bucket."""
    from paceline.optim.sharded import ShardedOptimizer
    from paceline.optim.step_options import StepOptions

    model = nn.Linear(WIDTH, WIDTH)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = ShardedOptimizer(torch.optim.Adam(names), names, StepOptions(dist.group.WORLD))
    assert len(optimizer.gradients.buffers) == 1
    with counted() as calls:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    optimizer.destroy()
    return calls


def measured() -> tuple[Cluster, Counter[str], int]:
    """The cluster, operations of ZeRO 1's exchange while it is measured, and how often that is."""
    from paceline.comm.control import ControlPlane
    from paceline.runtime import measured_cluster

    found: Counter[str] = Counter()
    times, act = 0, measured_cluster.exchange_shards

    def exchange(*args: Any) -> None:
        nonlocal times
        with counted() as calls:
            act(*args)
        found.update(calls)
        times += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_cluster, "exchange_shards", exchange)
        cluster = measured_cluster.measure_cluster(ControlPlane.create(), torch.device("cpu"), 1e9)
    return cluster, found, times


def slow_bytes_per_s(num_ranks: int) -> float:
    """The most that an exchange of ZeRO 1 gets through, if every message takes so long."""
    from paceline.measure.collectives import BUCKET_NUMEL

    num_bytes = 2 * (num_ranks - 1) / num_ranks * 4 * BUCKET_NUMEL
    return num_bytes / (2 * (num_ranks - 1) * SLOW_S)


def look() -> tuple[dict[str, int], dict[str, float], Cluster, Cluster]:
    """Operations of a step and of a measurement; the cluster as it is, and where every message takes longer.

    Both are measured again where other work on this machine took longer than what is measured.
    """
    import deepspeed

    deepspeed.init_distributed("gloo")
    taken = step_operations()
    for _ in range(TRIES):
        cluster, calls, times = measured()
        if cluster.inside.zero1_bytes_per_s > slow_bytes_per_s(dist.get_world_size()):
            break
    act = dist.isend

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(SLOW_S)
        return act(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", slow)
        for _ in range(TRIES):
            slowed, _, _ = measured()
            if slowed.inside.reduction_bytes_per_s > slowed.inside.zero1_bytes_per_s:
                break
    return dict(taken), {name: count / times for name, count in calls.items()}, cluster, slowed


def on_hosts(names: str) -> int:
    """Devices of a host, where rank r is on that of its letter."""
    import deepspeed

    from paceline.comm.control import ControlPlane
    from paceline.runtime import measured_cluster

    deepspeed.init_distributed("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_cluster, "host_name", lambda: names[dist.get_rank()])
        return measured_cluster.measure_cluster(ControlPlane.create(), torch.device("cpu"), 1e9).devices_per_node


def on_hosts_in_turn(all_names: list[str]) -> list[int]:
    return [on_hosts(names) for names in all_names]


def test_neighbours_are_on_one_host_where_ranks_are_numbered_host_by_host() -> None:
    """Slurm's cyclic distribution and ``mpirun --map-by node`` number them round the hosts."""
    for found in run_ranks(on_hosts_in_turn, 4, ["aaaa", "aabb", "aaab", "abab", "abba"]):
        assert found == [4, 2, 1, 1, 1]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_zero_1_is_measured_as_it_is_run(num_ranks: int) -> None:
    for taken, measured, cluster, slowed in run_ranks(look, num_ranks):
        assert taken == measured
        assert taken
        known, late = cluster.inside.zero1_bytes_per_s, slowed.inside.zero1_bytes_per_s
        assert known is not None
        assert late is not None
        assert late < slow_bytes_per_s(num_ranks) < known
        assert slowed.inside.reduction_bytes_per_s > late
