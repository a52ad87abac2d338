"""Copies of experts give what they learn to their owners."""

from __future__ import annotations

import torch
from torch import nn

from support.ranks import run_ranks


def learned() -> list[float]:
    """The first of three ranks owns two experts, the others one, and each has room for two.

    The ranks 1 and 2 have copies of the first one, whose rows count 10 and 100 times.
    """
    import torch.distributed as dist

    from paceline.moe.replica_sync import Replicas
    from paceline.planning.experts import Placement

    dist.init_process_group("gloo")
    weight = nn.Parameter(torch.ones(2, 2))
    replicas = Replicas([weight], dist.group.WORLD, 1, lambda: True)
    replicas.take_on(Placement(((0, 3), (1, 0), (2, 0)), (2, 1, 1)))
    replicas.fetch()
    _, (own,), (copies,) = replicas.slot_weights(torch.ones(1, requires_grad=True))
    (own.sum() + 10 ** dist.get_rank() * copies.sum()).backward()
    assert weight.grad is not None
    return weight.grad[:, 0].tolist()


def test_an_expert_learns_from_all_its_copies() -> None:
    assert run_ranks(learned, 3) == [[111.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
