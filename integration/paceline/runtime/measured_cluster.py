"""A cluster as its ranks measure it, all of them computing and sending at the same time, as they do in training."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist

from ..comm.control import ControlPlane
from ..comm.staging import staging_for
from ..measure.collectives import BUCKET_NUMEL, measure_fabric, slowest_s
from ..measure.host_names import host_name
from ..optim.buckets import Domain, exchange_shards
from ..optim.max_change import sum_of_squares
from ..optim.torch_optimizers import make_optimizer
from ..planning.cluster import Cluster, Fabric
from ..planning.gradient_costs import state_bytes_per_parameter

MANY_BUCKETS = 16
"""Buckets in an optimizer's step that is measured on a GPU: 1.1 GB with gradients, masters and moments."""


def measure_cluster(control: ControlPlane, device: torch.device, memory_bytes: float) -> Cluster:
    """The links inside the first host, those between the first ranks of all hosts, and the optimizer's speed.

    A host has as many devices as the one with fewest; one, where ranks go round the hosts: neighbours are then on two
    of them. Collective, and the same on all ranks.

    Args:
        device: of this rank.
        memory_bytes: that each rank may take.
    """
    hosts = control.gather(host_name())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    first_ranks = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
    states = _state_bytes_per_s(device)
    found = []
    for ranks in (here, first_ranks):
        group = dist.new_group(ranks)
        mine: list[Fabric | None] = [None]
        if len(ranks) > 1 and dist.get_rank() in ranks:
            staged = torch.device("cpu") if staging_for(device, group) is not None else None
            mine = [measure_fabric(group, device, staged, partial(exchange_shards, Domain.of(group)))]
        dist.broadcast_object_list(mine, src=0)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
        found.append(mine[0] or Fabric())
    is_in_order = sum(1 for _ in groupby(hosts)) == len(first_ranks)
    return Cluster(
        len(hosts),
        min(Counter(hosts).values()) if is_in_order else 1,
        memory_bytes=memory_bytes,
        state_bytes_per_s=states,
        inside=found[0],
        across=found[1],
    )


def _state_bytes_per_s(device: torch.device) -> float:
    """Bytes a second at which all ranks at once take the norm of gradients and step AdamW's states; the slowest's."""
    seconds = partial(_step_s, device=device)
    if device.type == "cpu":
        return state_bytes_per_parameter() * BUCKET_NUMEL / seconds(BUCKET_NUMEL)
    # To issue a step takes a while whatever its size is: longer than a GPU takes for a bucket.
    few, many = BUCKET_NUMEL, MANY_BUCKETS * BUCKET_NUMEL
    more_s = max(seconds(many) - seconds(few), 1e-6)
    return state_bytes_per_parameter() * (many - few) / more_s


def _step_s(numel: int, device: torch.device) -> float:
    parameter = torch.nn.Parameter(torch.randn(numel // 1024, 1024, device=device))
    gradient = parameter.grad = torch.randn_like(parameter)
    optimizer = make_optimizer("AdamW", [parameter], {}, device)

    def step() -> None:
        sum_of_squares([gradient], device)
        optimizer.step()

    return slowest_s(step, dist.group.WORLD, device)
