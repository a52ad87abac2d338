"""Optimizer states of every parameter group can be read under ZeRO-1 and 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.ranks import run_ranks

STEPS = 2


def model_and_groups() -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return model, groups


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def states(model: nn.Module) -> dict[str, Any]:
    """Of every parameter: its first moment, or the error that asking for it gives."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        try:
            found[name] = safe_get_full_optimizer_state(parameter, "exp_avg")
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def job(zero: int, repaired: bool, directory: str) -> list[dict[str, Any]]:
    """States after some steps, after a checkpoint was loaded into the same engine, and after one more step."""
    import deepspeed

    import paceline

    if repaired:
        paceline.repair_deepspeed("optimizer-states")
    deepspeed.init_distributed("gloo")
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    model, groups = model_and_groups()
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)

    def step(index: int) -> None:
        loss = engine(batch(index)[rank::world]).pow(2).mean()
        engine.backward(loss)
        engine.step()

    for index in range(STEPS):
        step(index)
    seen = [states(model)]
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)
    seen.append(states(model))
    step(STEPS)
    seen.append(states(model))
    return seen


def reference() -> list[dict[str, torch.Tensor]]:
    model, groups = model_and_groups()
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    seen = []
    for index in range(STEPS + 1):
        optimizer.zero_grad()
        model(batch(index)).pow(2).mean().backward()
        optimizer.step()
        seen.append({name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()})
    return [seen[-2], seen[-2], seen[-1]]


@pytest.mark.parametrize("zero", [1, 2])
def test_states_of_all_groups(zero: int, tmp_path: Path) -> None:
    """One rank shows the fault: with more, the owner of a parameter raises and the others wait for it."""
    stock = run_ranks(job, 1, zero, False, str(tmp_path / "stock"))[0]
    trained, loaded, after = stock
    assert {name for name, state in trained.items() if isinstance(state, str)} == {f"{i}.bias" for i in range(3)}
    assert trained["0.bias"] == "ValueError: exp_avg not found in optimizer state fragment"
    assert all(isinstance(state, str) for state in (loaded | after).values())

    for rank in run_ranks(job, 2, zero, True, str(tmp_path / "repaired")):
        for seen, right in zip(rank, reference(), strict=True):
            assert list(seen) == list(right)
            for name, state in seen.items():
                torch.testing.assert_close(state, right[name], msg=lambda text, name=name: f"{name}: {text}")
