"""fp16 without ZeRO multiplies the loss by the scale by which its step divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.natural import allow_fp16
from support.ranks import run_ranks

RATE = 0.5


def job(repaired: bool) -> tuple[float, float, float]:
    """How far a step of two micro-batches moves a weight whose gradient is 1; what ``backward`` returns of its loss;
    the gradient's norm."""
    import deepspeed

    import paceline

    if repaired:
        paceline.repair_deepspeed("loss-scale")
    allow_fp16()
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(1, 1, bias=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    before = engine.module.weight.item()
    for _ in range(2):
        loss = engine(torch.ones(2, 1, dtype=torch.float16)).mean()
        returned = engine.backward(loss)
        assert returned.dtype == loss.dtype
        engine.step()
    norm = engine.get_global_grad_norm()
    return before - engine.module.weight.item(), returned.item() / loss.item(), float(norm)


def test_a_step_undoes_what_a_backward_multiplied_by() -> None:
    stock, repaired = (run_ranks(job, 1, is_repaired)[0] for is_repaired in (False, True))
    # DeepSpeed's fault; half of the loss, as accumulated
    assert stock == (pytest.approx(RATE / 2**8, rel=0.1), 0.5, 1.0)
    assert repaired == (pytest.approx(RATE, rel=1e-3), 0.5, 1.0)
