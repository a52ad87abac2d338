"""Collectives of a bucket on a backend that is not gloo: one each way, whatever the number of owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.optimizers import is_elementwise
from paceline.optim.buckets import Domain
from paceline.optim.corrections import Corrections
from paceline.optim.sharded import ShardedOptimizer
from paceline.optim.step_options import StepOptions

WORLD, WIDTH = 4, 64


class Collectives(TorchDispatchMode):
    """Counts operations of process groups, whatever function of torch issues them, and notes what dtype they send."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname.strip("_")] += 1
            first = args[0][0] if isinstance(args[0], list) else args[0]
            self.dtypes.add(first.dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """Four of which this is one; their collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    yield
    dist.destroy_process_group()


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)


def step(optimizer: Any, model: nn.Module, dtype: torch.dtype = torch.float32) -> Collectives:
    with Collectives() as found:
        with optimizer.gradients.backward():
            model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
        if optimizer.updates is None:
            optimizer.step()
        else:
            optimizer.updates.backward_complete(0)
            optimizer.updates.finish_step()
            optimizer.updates.apply()
    return found


@pytest.mark.parametrize("corrections", [None, Corrections()])
def test_one_each_way(corrections: Corrections | None) -> None:
    model = module()
    names = {parameter: name for name, parameter in model.named_parameters()}
    options = StepOptions(dist.group.WORLD, bucket_numel=9000, overlap=False, corrections=corrections)
    optimizer = ShardedOptimizer(torch.optim.Adam(names), names, options)
    num_buckets = len(optimizer.gradients.buffers)
    assert num_buckets == 2
    assert all(len(part.bucket.parts) == WORLD and all(part.bucket.parts) for part in optimizer.layout.buckets)
    calls = step(optimizer, model).calls
    assert calls.pop("allreduce") == 1  # the norm
    assert sorted(calls.values()) == [num_buckets] * 2, calls
    assert any("reduce_scatter" in name for name in calls)
    assert any("allgather" in name for name in calls)
    optimizer.destroy()


def test_an_optimizer_of_another_package_steps_whole_parameters() -> None:
    """bitsandbytes has an AdamW too, whose states have a scale for each block of a parameter."""
    model = module()
    names = {parameter: name for name, parameter in model.named_parameters()}
    kind = type("AdamW", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    assert not is_elementwise(kind(names))
    assert is_elementwise(torch.optim.AdamW(names))
    optimizer = ShardedOptimizer(kind(names), names, StepOptions(dist.group.WORLD, bucket_numel=9000))
    assert all(owned.master.shape == owned.parameter.shape for owned in optimizer.owned)


def test_one_owner_needs_no_more() -> None:
    """Of several directions one rank owns a stage: its mirrors send it their gradients, and get its values."""
    model = module()
    names = {parameter: name for name, parameter in model.named_parameters()}
    domain = Domain(dist.group.WORLD, WORLD, 1, owners=(2,))
    options = StepOptions(dist.group.WORLD, domain=lambda _: domain)
    optimizer = ShardedOptimizer(torch.optim.Adam(names), names, options)
    assert step(optimizer, model).calls == {"reduce": 1, "broadcast": 1, "allreduce": 1}
    optimizer.destroy()


@pytest.mark.parametrize(("sent", "dtypes"), [(None, {torch.float32}), (torch.bfloat16, {torch.bfloat16})])
def test_gradients_travel_in_their_dtype(sent: torch.dtype | None, dtypes: set[torch.dtype]) -> None:
    """Those of a bf16 model are accumulated in fp32 all the same."""
    model = module(torch.bfloat16)
    names = {parameter: name for name, parameter in model.named_parameters()}
    options = StepOptions(dist.group.WORLD, communication_dtype=sent, overlap=False)
    optimizer = ShardedOptimizer(torch.optim.Adam(names), names, options)
    assert {buffers.gradients.dtype for buffers in optimizer.gradients.buffers} == {torch.float32}
    model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
    with Collectives() as found:
        optimizer.reduce_gradients()
    assert found.dtypes == dtypes
    optimizer.destroy()
