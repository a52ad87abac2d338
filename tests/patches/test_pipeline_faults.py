"""Faults of stock pipelines: shown on stock DeepSpeed first, then repaired by a patch or by paceline's own engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.ranks import hang_of, run_ranks

STEPS, MICRO_BATCHES, WIDTH = 3, 4, 8


class Mixed(nn.Module):
    """Passes integers on beside the hidden states, as a model does with ids, in front of them or behind."""

    def __init__(self, ids_first: bool, is_last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.ids_first, self.is_last = ids_first, is_last

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        ids, hidden = inputs if self.ids_first else inputs[::-1]
        hidden = hidden + torch.tanh(self.linear(hidden)) + 1e-2 * ids.float().mean(-1, keepdim=True)
        if self.is_last:
            return hidden
        return (ids, hidden) if self.ids_first else (hidden, ids)


def mixed_layers(ids_first: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mixed(ids_first) for _ in range(5)] + [Mixed(ids_first, is_last=True)]


def mixed_batches(step: int, ids_first: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.arange(64).view(2, 32)
    batches = []
    for _ in range(MICRO_BATCHES):
        hidden = torch.randn(2, WIDTH, generator=generator)
        batches.append(((ids, hidden) if ids_first else (hidden, ids), torch.randn(2, WIDTH, generator=generator)))
    return batches


def plain_layers() -> list[nn.Module]:
    """Biases only in the first half: with two stages and no weight decay for biases, a group that one stage lacks."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, bias=i < 2) for i in range(4)]


def plain_batches(step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, WIDTH, generator=generator) for _ in range(2)) for _ in range(MICRO_BATCHES)]


def config(clipping: float = 0.0, zero: int = 0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
    }


def groups_of(parameters: Any) -> list[dict[str, Any]]:
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def train_alone(layers: list[nn.Module], batches: Any, clipping: float = 0.0) -> dict[str, list[float]]:
    """The same layers in one process with torch's own optimizer."""
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(groups_of(model.parameters()), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss = sum(nn.functional.mse_loss(model(x), y) for x, y in batches(step)) / MICRO_BATCHES
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf")).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


def train_pipeline(
    initialize: Any, layers: list[nn.Module], batches: Any, stages: int, **kwargs: Any
) -> dict[str, list[Any]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    module = PipelineModule(
        layers=layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    parameters = groups_of(module.parameters())
    engine, *_ = initialize(model=module, model_parameters=parameters, config=config(**kwargs))
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(engine.train_batch(iter(batches(step))).item())
        norms.append(None if engine.get_global_grad_norm() is None else float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms}


def mixed_job(repaired: bool, ids_first: bool) -> list[float]:
    import deepspeed

    import paceline

    if repaired:
        paceline.repair_deepspeed("receive-pool")
    return train_pipeline(deepspeed.initialize, mixed_layers(ids_first), _mixed(ids_first), 3)["losses"]


def _mixed(ids_first: bool) -> Any:
    return lambda step: mixed_batches(step, ids_first)


def plain_job(stock: bool, zero: int = 0, clipping: float = 0.0) -> dict[str, list[Any]]:
    import deepspeed

    import paceline

    initialize = deepspeed.initialize if stock else paceline.initialize
    return train_pipeline(initialize, plain_layers(), plain_batches, 2, zero=zero, clipping=clipping)


@pytest.mark.parametrize("ids_first", [True, False])
def test_a_receive_buffer_has_the_dtype_of_what_is_received(ids_first: bool) -> None:
    """(int64, float) over three stages: the middle one receives gradients into the buffer of the integers."""
    wanted = train_alone(mixed_layers(ids_first), _mixed(ids_first))["losses"]
    repaired = run_ranks(mixed_job, 3, True, ids_first)
    assert repaired[0] == pytest.approx(wanted, rel=1e-5)
    if ids_first:  # behind the hidden states the integers are in nobody's way
        stock = run_ranks(mixed_job, 3, False, ids_first)
        assert stock[0][0] == pytest.approx(wanted[0], rel=1e-5)  # before the first step nothing is wrong
        assert stock[0][1:] != pytest.approx(wanted[1:], rel=1e-2)


def test_stages_with_unequal_parameter_groups_train_under_zero_1() -> None:
    """Stock takes one all-reduce a group for the norm: a stage that lacks a group waits for ever."""
    hang_of(
        lambda timeout: run_ranks(plain_job, 2, True, zero=1, timeout=timeout),
        "in scaled_global_norm",  # of the second group, on the first stage
        "in _aggregate_total_loss",  # on the second, which has no second group
    )
    ours = run_ranks(plain_job, 2, False, zero=1)
    assert ours[0]["losses"] == pytest.approx(train_alone(plain_layers(), plain_batches)["losses"], rel=1e-5)


def test_the_gradient_norm_is_that_of_all_stages() -> None:
    """fp32 without ZeRO: stock clips by the norm of the first stage's gradients."""
    wanted = train_alone(plain_layers(), plain_batches, clipping=0.1)
    stock = run_ranks(plain_job, 2, True, clipping=0.1)
    assert stock[0]["losses"][0] == pytest.approx(wanted["losses"][0], rel=1e-5)
    assert stock[0]["norms"][0] != pytest.approx(wanted["norms"][0], rel=1e-2)
    for rank in run_ranks(plain_job, 2, False, clipping=0.1):
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
