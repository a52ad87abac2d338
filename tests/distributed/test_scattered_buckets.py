"""A bucket's three ways to its owners and back, one of them on each backend: their numbers are those of ZeRO 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.ranks import run_ranks

STEPS, MICRO_BATCHES, WIDTH = 4, 2, 24
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, clipped": {"max_norm": 0.05},
    "sent in bf16": {"communication_dtype": torch.bfloat16},
    "bf16 model": {"dtype": torch.bfloat16},
    "bf16 model, sent in bf16": {"dtype": torch.bfloat16, "communication_dtype": torch.bfloat16},
    "no overlap": {"overlap": False},
    "no flush": {"asynchronous": True},
    "no flush, bf16 model": {"asynchronous": True, "dtype": torch.bfloat16, "max_norm": 0.05},
}
OPERATIONS = ("reduce", "broadcast", "isend", "_reduce_scatter", "_all_gather")
MESSAGES, ROOTED, SCATTERED = "messages", "rooted", "scattered"
"""Gloo's way on a CPU, its way on a shared GPU, and that of other backends."""


@contextmanager
def counted(way: str) -> Iterator[Counter[str]]:
    """Operations of buckets that go ``way``."""
    from paceline.optim import buckets

    calls: Counter[str] = Counter()

    def count(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            calls[name.lstrip("_")] += 1
            return act(*args, **options)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            place = buckets if name.startswith("_") else dist
            patch.setattr(place, name, count(name, getattr(place, name)))
        if way == ROOTED:
            patch.setattr(buckets, "sends_direct", lambda group, device: False)
        elif way == SCATTERED:
            patch.setattr(buckets, "has_reduce_scatter", lambda group: True)
        yield calls


def train(
    *,
    shard: bool,
    way: str,
    asynchronous: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[Tensor], Counter[str], int]:
    """Weights and norm of each step, operations of all steps, and the number of buckets."""
    from paceline.optim.corrections import Corrections
    from paceline.optim.gradient_buckets import Completes
    from paceline.optim.sharded import ShardedOptimizer
    from paceline.optim.step_options import StepOptions

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    names = {parameter: name for name, parameter in module.to(dtype).named_parameters()}
    world, rank = dist.get_world_size(), dist.get_rank()
    step_options = StepOptions(
        dist.group.WORLD,
        shard=shard,
        divisor=float(world * MICRO_BATCHES),
        bucket_numel=1000,
        corrections=Corrections() if asynchronous else None,
        **options,
    )
    optimizer = ShardedOptimizer(torch.optim.Adam(names, lr=1e-2), names, step_options)
    found = []
    with counted(way) as calls:
        for step in range(STEPS):
            for micro_batch in range(MICRO_BATCHES):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
                x = torch.randn(5, WIDTH, generator=generator).to(dtype)
                is_last = micro_batch == MICRO_BATCHES - 1
                with optimizer.gradients.backward(Completes.ALL if is_last else Completes.NOTHING):
                    module(x).square().mean().backward()
            if optimizer.updates is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                optimizer.updates.backward_complete(0)
                optimizer.updates.finish_step()
                optimizer.updates.apply()
            found += [parameter.detach().clone() for parameter in module.parameters()]
            found.append(torch.tensor(optimizer.outcome.grad_norm))
    num_buckets = len(optimizer.gradients.buffers)
    optimizer.destroy()
    return found, calls, num_buckets


def compare(exact: bool) -> list[str]:
    """Differences of all cases."""
    dist.init_process_group("gloo")
    world, wrong = dist.get_world_size(), []
    same = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-6)
    for name, options in CASES.items():
        sent, by_message, num_buckets = train(shard=True, way=MESSAGES, **options)
        rooted, by_owner, _ = train(shard=True, way=ROOTED, **options)
        scattered, at_once, _ = train(shard=True, way=SCATTERED, **options)
        whole, none, _ = train(shard=False, way=SCATTERED, **options)
        if not all(map(torch.equal, scattered, whole)):
            wrong.append(f"{name}: ZeRO 0 and 1 differ")
        if "bf16" not in name or exact:
            wrong += [f"{name}: owners differ"] * (not all(map(same, rooted, scattered)))
            wrong += [f"{name}: messages differ"] * (not all(map(same, sent, scattered)))
        each = STEPS * num_buckets
        if (by_message, by_owner, at_once, none) != (
            {"isend": 2 * each * (world - 1)},
            {"reduce": each * world, "broadcast": each * world},
            {"reduce_scatter": each, "all_gather": each},
            {},
        ):
            wrong.append(f"{name}: {num_buckets} buckets, {by_message}, {by_owner}, {at_once}, {none}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_ways_are_equal(num_ranks: int) -> None:
    """Two numbers have one sum; three have several, and gloo's reduce-scatter has that of its all-reduce."""
    assert run_ranks(compare, num_ranks, num_ranks == 2) == [[]] * num_ranks
