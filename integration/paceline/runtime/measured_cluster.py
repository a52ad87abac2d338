"""A cluster as its ranks measure it, all of them computing and sending at the same time, as they do in training."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from ..comm.control import ControlPlane
from ..comm.staging import staging_for
from ..measure.collectives import BUCKET_NUMEL, measure_fabric, slowest_s
from ..optim.max_change import sum_of_squares
from ..planning.cluster import Cluster, Fabric
from ..planning.strategy_costs import state_bytes_per_parameter
from .rank_reports import host_name


def ranks_of_node(control: ControlPlane) -> int:
    """Ranks on each host, on the one with fewest where hosts differ. Collective, and the same on all ranks."""
    return min(Counter(control.gather(host_name())).values())


def measure_cluster(device: torch.device, per_node: int, memory_bytes: float) -> Cluster:
    """The links inside the first node, those between the first ranks of all nodes, and the optimizer's speed.

    Collective, and the same on all ranks.

    Args:
        device: of this rank.
        per_node: ranks on each node, the same on all ranks.
        memory_bytes: that each rank may take.
    """
    size = dist.get_world_size()
    states = _state_bytes_per_s(device)
    found = []
    for ranks in (range(min(per_node, size)), range(0, size, per_node)):
        group = dist.new_group(list(ranks))
        mine: list[Fabric | None] = [None]
        if len(ranks) > 1 and dist.get_rank() in ranks:
            staged = torch.device("cpu") if staging_for(device, group) is not None else None
            mine = [measure_fabric(group, device, staged)]
        dist.broadcast_object_list(mine, src=0)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
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
