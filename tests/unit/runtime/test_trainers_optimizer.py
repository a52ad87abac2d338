"""The optimizer that TrainingArguments name, as a pipeline's Trainer makes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Trainer, TrainingArguments

from paceline.runtime.trainer_optimizer import keep_embeddings_wide, make_optimizer


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
        optimizer = make_optimizer(trainer, [{"params": [weight]}])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    is_fused = device == "cuda" and optim == "adamw_torch_fused"
    assert bool(optimizer.param_groups[0]["fused"]) is is_fused
    assert optimizer.state[weight]["step"].device.type == ("cuda" if is_fused else "cpu")


@pytest.mark.parametrize("bits", [8, 32])
def test_embeddings_keep_wide_states(bits: int) -> None:
    """With bitsandbytes, which is told by the places of masters: also of the head that is tied on another stage."""
    told: dict[tuple[int, int], dict[str, int]] = {}
    kind = type("AdamW", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "mlp": nn.Linear(2, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight.ds_pipe_replicated = True
    masters = {parameter: nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()}
    weights = [masters[model[name].weight] for name in ("mlp", "embed", "head")]
    groups = [{"params": [masters[model["mlp"].bias]]}, {"params": weights}]
    engine = SimpleNamespace(
        basic_optimizer=SimpleNamespace(param_groups=groups, mng=SimpleNamespace(index2config=told)),
        optimizer=SimpleNamespace(owned=[SimpleNamespace(parameter=p, master=m) for p, m in masters.items()]),
    )
    trainer = SimpleNamespace(optimizer_cls_and_kwargs=(kind, {"optim_bits": bits}))
    pipeline: Any = SimpleNamespace(models=[model])
    keep_embeddings_wide(trainer, engine, pipeline)
    assert told == ({(1, 1): {"optim_bits": 32}, (1, 2): {"optim_bits": 32}} if bits == 8 else {})
