"""A cluster as its ranks measure it, all of them computing and sending at the same time, as they do in training."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..measure.collectives import BUCKET_NUMEL, measure_fabric, slowest_s
from ..optim.max_change import sum_of_squares
from ..planning.cluster import Cluster, Fabric
from ..planning.strategy_costs import state_bytes_per_parameter


def ranks_of_node() -> int:
    """Ranks on each node, as the launcher says; without one all are on this node."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(told) if told else dist.get_world_size()


def measure_cluster(device: torch.device, per_node: int, memory_bytes: float) -> Cluster:
    """The links inside the first node, those between the first ranks of all nodes, and the optimizer's speed.

    Collective, and the same on all ranks.

    Args:
        device: of this rank.
        per_node: ranks on each node.
        memory_bytes: that each rank may take.
    """
    size = dist.get_world_size()
    states = _state_bytes_per_s(device)
    found = []
    for ranks in (range(min(per_node, size)), range(0, size, per_node)):
        group = dist.new_group(list(ranks))
        mine: list[Fabric | None] = [None]
        if len(ranks) > 1 and dist.get_rank() in ranks:
            mine = [measure_fabric(group, device)]
        dist.broadcast_object_list(mine, src=0)
        found.append(mine[0] or Fabric())
    return Cluster(
        size,
        per_node,
        memory_bytes=memory_bytes,
        state_bytes_per_s=states,
        inside=found[0],
        across=found[1],
    )


def _state_bytes_per_s(device: torch.device) -> float:
    """Bytes a second at which all ranks at once take the norm of gradients and step AdamW's states; the slowest's."""
    parameter = torch.nn.Parameter(torch.randn(BUCKET_NUMEL // 1024, 1024, device=device))
    gradient = parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter])

    def step() -> None:
        sum_of_squares([gradient], device)
        optimizer.step()

    return state_bytes_per_parameter() * parameter.numel() / slowest_s(step, dist.group.WORLD, device)
