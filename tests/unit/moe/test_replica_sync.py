"""Copies of experts give what they learn to their owners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.moe.replica_sync import Replicas
from paceline.planning.experts import Placement
from support.ranks import run_ranks


def learned() -> list[float]:
    """The first of three ranks owns two experts, the others one, and each has room for two.

    The ranks 1 and 2 have copies of the first one, whose rows count 10 and 100 times.
    """
    import torch.distributed as dist

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


class Picks(TorchDispatchMode):
    """Numbers by which rows are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::index"):
            self.numbers += args[1] if isinstance(args[1], (list, tuple)) else [args[2]]
        return func(*args, **(kwargs or {}))


def test_numbers_of_rows_are_brought_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in each backward, where the host would wait for a GPU; the device "meta" stands for one."""
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("all_to_all_single", SimpleNamespace(wait=int))):
        monkeypatch.setattr(torch.distributed, name, lambda *args, value=value, **kwargs: value)
    weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    replicas = Replicas([weight], None, 1, lambda: True)
    replicas.take_on(Placement(((0, 1, 2), (2, 3, 0)), (2, 2)))
    steps = [Picks(), Picks()]
    for step in steps:
        with step:
            replicas.fetch()
            _, (own,), (copies,) = replicas.slot_weights(torch.ones(1, device="meta", requires_grad=True))
            (own.sum() + copies.sum()).backward()
    first, second = (step.numbers for step in steps)
    assert [numbers.device.type for numbers in first] == ["meta"] * 3
    assert all(numbers is others for numbers, others in zip(first, second, strict=True))
