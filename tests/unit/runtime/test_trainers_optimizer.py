"""The optimizer that TrainingArguments name, as a pipeline's Trainer makes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Trainer, TrainingArguments

from paceline.runtime.trainer import _make_optimizer


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_adamw_is_fused_on_a_gpu_where_it_is_asked_for(device: str, optim: str) -> None:
    """transformers' own choice is the fused one."""
    asked, model = TrainingArguments(optim=optim, use_cpu=True, report_to="none"), nn.Linear(1, 1)
    chosen = Trainer.get_optimizer_cls_and_kwargs(asked, model)
    args = SimpleNamespace(optim=asked.optim, device=torch.device(device))
    trainer = SimpleNamespace(args=args, optimizer_cls_and_kwargs=chosen)
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(2, 2, device=device))
        optimizer = _make_optimizer(trainer, [{"params": [weight]}])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    is_fused = device == "cuda" and optim == "adamw_torch_fused"
    assert bool(optimizer.param_groups[0]["fused"]) is is_fused
    assert optimizer.state[weight]["step"].device.type == ("cuda" if is_fused else "cpu")
