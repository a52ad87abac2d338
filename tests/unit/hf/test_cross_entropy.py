"""The loss in pieces: transformers' own in every bit, without all logits in float32."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.hf import cross_entropy
from paceline.hf.activations import SavedStorages
from paceline.hf.stage import CausalLMStage, Cut

B, S, V = 2, 37, 129


class Largest(TorchDispatchMode):
    """Elements of the largest float32 tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.fixture(scope="module")
def stage() -> CausalLMStage:
    config = LlamaConfig(vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    return CausalLMStage(LlamaForCausalLM(config), Cut.whole(1))


def losses(
    stage: CausalLMStage, dtype: torch.dtype, num_items: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Loss, gradient and loss without one, and the largest float32 tensor on the way."""
    generator = torch.Generator().manual_seed(0)
    logits = (7 * torch.randn(B, S, V, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, :20] = labels[1, -3:] = -100
    with Largest() as seen:
        loss = stage.loss(logits, labels, None, num_items)
        (3.0 * loss).backward()
        with torch.no_grad():
            again = stage.loss(logits.detach(), labels, None, num_items)
    assert logits.grad is not None
    return loss.detach(), logits.grad, again, seen.elements


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_items", [51, torch.tensor(51), None])
@pytest.mark.parametrize("rows", [1, 5, 73])
def test_same_bits(
    stage: CausalLMStage, dtype: torch.dtype, num_items: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = losses(stage, dtype, num_items)
    monkeypatch.setattr(cross_entropy, "PIECE_BYTES", 4 * V * rows)
    found = losses(stage, dtype, num_items)
    for ours, theirs in zip(found[:3], wanted[:3], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert wanted[3] == B * S * V
    if dtype == torch.bfloat16:
        assert found[3] == max(rows * V, B * S)


def test_a_loss_of_a_models_own_is_left_alone(stage: CausalLMStage) -> None:
    logits = torch.empty(1, 1 << 20, 1 << 10, device="meta")
    assert cross_entropy.takes_pieces(stage.model.loss_function, logits)
    assert not cross_entropy.takes_pieces(stage.model.loss_function, logits[:, :8])
    assert not cross_entropy.takes_pieces(lambda **kwargs: 0, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [16, B * S])
def test_the_memory_that_a_loss_takes_is_counted(
    stage: CausalLMStage, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vocabulary = 4096
    monkeypatch.setattr(cross_entropy, "PIECE_BYTES", 4 * vocabulary * rows)
    hidden = torch.randn(B, S, vocabulary, dtype=dtype, requires_grad=True)
    labels = torch.zeros(B, S, dtype=torch.int64)
    counter = SavedStorages(stage)
    with torch.profiler.profile(profile_memory=True) as profile:
        logits = hidden.clone()  # which nobody keeps, as in a pipeline
        counted = cross_entropy.working_bytes(stage.model.loss_function, logits)
        with counter.hooks:
            loss = stage.loss(logits, labels, None, 7)
        del logits
        loss.backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    taken = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    assert max(accumulate(num_bytes for _, num_bytes in taken)) == pytest.approx(counter.num_bytes + counted, rel=0.03)
