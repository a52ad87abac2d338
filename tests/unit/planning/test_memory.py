"""What a stage needs in memory, against the tensors that the optimizer really makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.optim.sharded import ShardedOptimizer
from paceline.planning.memory import ItemMemory, States, num_moments, stage_memory

N = 1000


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (States(), (4000, 4000, 0, 8000)),
        (States(data_parallel=4), (4000, 4000, 0, 8000)),
        (States(data_parallel=4, shard=True), (4000, 4000, 0, 2000)),
        (States(weight_bytes=2), (2000, 4000, 4000, 8000)),
        (States(weight_bytes=2, data_parallel=4, shard=True), (2000, 4000, 1000, 2000)),
        (States(weight_bytes=2, gradient_bytes=2, num_moments=0), (2000, 2000, 4000, 0)),
        (States(beside=True, gradient_sets=2), (4000, 8000, 4000, 8000)),
        (States(weight_bytes=2, data_parallel=4, shard=True, beside=True, gradient_sets=2), (2000, 8000, 1000, 2000)),
    ],
)
def test_states_of_parameters(states: States, expected: tuple[float, ...]) -> None:
    assert states.of(N) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (States(data_parallel=4), (2400, 2400, 0, 4800)),
        # All four ranks hold 200, of which each owns 50; two share 800, of which each holds 400 and owns 200.
        (States(data_parallel=4, shard=True), (2400, 2400, 0, 2000)),
        (States(weight_bytes=2, data_parallel=4, shard=True, trained=0.5), (1200, 1200, 500, 1000)),
    ],
)
def test_states_of_experts_that_replicas_share(states: States, expected: tuple[float, ...]) -> None:
    assert states.of(N, 400) == expected


def test_states_of_experts_that_are_no_multiple_of_the_ranks() -> None:
    """Three experts of 200 lie on two ranks, each with room for two; 400 are on both."""
    assert States(data_parallel=2).of(N, 200, 200) == (3200, 3200, 0, 6400)
    assert States(data_parallel=2, shard=True).of(N, 200, 200) == (3200, 3200, 0, 8 * (400 + 200))


def test_copies_of_experts_have_values_and_gradients() -> None:
    assert States(weight_bytes=2, data_parallel=2).of(N, copied=200) == (2400, 4800, 4000, 8000)
    assert States(data_parallel=2, shard=True, trained=0.0).of(N, copied=200) == (4800, 0, 0, 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, States()),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, States(weight_bytes=2, shard=True)),
        ({"fp16": {"enabled": "auto"}, "zero_optimization": True}, States(shard=True)),
        (
            {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
            States(weight_bytes=2, gradient_bytes=2, sent_bytes=2),
        ),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, States(weight_bytes=2, sent_bytes=4)),
        ({"zero_optimization": {"stage": 1, "overlap_comm": False}}, States(shard=True, overlaps=False)),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, States(num_moments=1)),
        ({"paceline": {"pipeline": {"schedule": "one_direction"}}}, States(beside=True, gradient_sets=2)),
        (
            {"paceline": {"pipeline": {"schedule": {"type": "one_direction", "correction": "nesterov"}}}},
            States(num_moments=3, beside=True, gradient_sets=2),
        ),
    ],
)
def test_states_that_a_json_asks_for(config: dict[str, Any], expected: States) -> None:
    assert States.from_config(config, 1) == expected


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        (None, {}, 2),
        ("AdamW", {}, 2),
        ("Adam", {"amsgrad": True}, 3),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"centered": True, "momentum": 0.1}, 3),
        ("Adagrad", None, 1),
        ("FusedAdam", {}, 2),
        ("Lion", {}, 1),
        ("ofmyown", {}, 2),
    ],
)
def test_moments(name: str | None, params: dict[str, Any] | None, expected: int) -> None:
    assert num_moments(name, params) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop"])
def test_the_real_optimizer_takes_what_is_predicted(dtype: torch.dtype, optimizer: str) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).to(dtype)
    basic = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    sharded = ShardedOptimizer(basic, {p: name for name, p in model.named_parameters()})
    model(torch.randn(3, 64, dtype=dtype)).sum().backward()
    sharded.step()
    states = States(weight_bytes=dtype.itemsize, num_moments=num_moments(optimizer))
    weights, *beside = states.of(sum(p.numel() for p in model.parameters()))
    assert weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(beside) == pytest.approx(_held_beside_weights(sharded), rel=0.01)


def _held_beside_weights(sharded: ShardedOptimizer) -> int:
    """Bytes of all storages that the optimizer keeps alive and the model does not."""
    weights = {p.untyped_storage().data_ptr() for p in sharded.layout.parameters}
    found = [owned.master for owned in sharded.owned] + [
        p.grad for p in sharded.layout.parameters if p.grad is not None
    ]
    found += [buffers.gradients for buffers in sharded.gradients.buffers]
    found += [value for state in sharded.state.values() for value in state.values() if torch.is_tensor(value)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    return sum(size for address, size in storages.items() if address not in weights)


ITEMS = (
    ItemMemory("embedding", 100, 10, 8),
    ItemMemory("layers.0", 50, 30, 12, 5),
    ItemMemory("layers.1", 50, 30, 8, 5),
    ItemMemory("layers.2", 60, 40, 8, 6),
    ItemMemory("head", 110, 70, 0, 90),
)


def test_stages() -> None:
    first, middle, last = (
        stage_memory(ITEMS, [0, 2, 3, 5], stage, States(), live) for stage, live in enumerate((3, 2, 1))
    )
    assert (first.weights, first.moments, first.states) == (600, 1200, 2400)
    assert first.activations == 3 * (10 + 30 + 12)
    assert (first.working, first.transport) == (5, 12)
    assert middle.activations == 2 * (30 + 8)
    assert (middle.working, middle.transport) == (5, 2 * 12 + 8)
    assert last.activations == 40 + 70  # what it puts out is the loss
    assert (last.working, last.transport) == (90, 2 * 8)
    assert last.total == 170 * 16 + 110 + 90 + 16
    assert last.to_dict()["total"] == last.total


def test_one_stage_sends_nothing() -> None:
    only = stage_memory(ITEMS, [0, 5], 0, States(), 1)
    assert only.transport == 0
    assert only.activations == 10 + 30 + 30 + 40 + 70
