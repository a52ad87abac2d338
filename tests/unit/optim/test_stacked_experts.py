"""Stacked experts whose gradients come later than those of the inputs: the same bits, in every way to multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.optim.linear_layers import Deferral
from paceline.optim.natural_layers import is_stack_of_experts
from paceline.optim.stacked_experts import OwnExperts, defer_experts, most_deferred_bytes

TOKENS, MICRO_BATCHES = 12, 3
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2},
}


def experts_of(family: str, implementation: str, dtype: torch.dtype) -> Any:
    """The experts of a layer, as the family computes them."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    config._experts_implementation = implementation
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    (found,) = [m for name, m in model.named_modules() if name.endswith(".experts")]
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.2)
    return nn.ModuleDict({"experts": found})


def micro_batch(number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts of each and their weights; one expert gets nothing."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(TOKENS, SIZES["hidden_size"], generator=generator).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(TOKENS)])
    return rows, chosen, torch.rand(TOKENS, 2, generator=generator).to(dtype).requires_grad_()


def run(
    model: Any, number: int, dtype: torch.dtype, around: Callable[..., Any] = lambda f, *x: f(*x)
) -> tuple[Tensor, ...]:
    rows, chosen, weights = micro_batch(number, dtype)
    out = around(model["experts"], rows, chosen, weights)
    (out.float() ** 2).mean().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    return out.detach(), rows.grad, weights.grad


def adopted(model: nn.Module) -> Deferral:
    deferral = Deferral()
    defer_experts(model, deferral)
    deferral.is_on = True
    return deferral


WAYS = [
    (family, way, dtype)
    for family in FAMILIES
    for way in ("eager", "grouped_mm", "batched_mm")
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    if (way, dtype) != ("grouped_mm", torch.float64)  # torch has no such product
]


@pytest.mark.parametrize(("family", "way", "dtype"), WAYS, ids=str)
def test_every_bit_is_as_in_a_whole_backward(family: str, way: str, dtype: torch.dtype) -> None:
    whole, split = (experts_of(family, way, dtype) for _ in range(2))
    deferral, left = adopted(split), []
    for number in range(MICRO_BATCHES):
        theirs = run(whole, number, dtype)
        with deferral.collecting() as deferred:
            ours = run(split, number, dtype)
        left.append(deferred)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for name, parameter in split.named_parameters():
        is_later = way != "batched_mm" and is_stack_of_experts(name, parameter)
        assert (parameter.grad is None) == is_later, name
    for deferred in left:
        assert bool(len(deferred)) == (way != "batched_mm")
        deferred.run()
    for (name, ours_), theirs_ in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours_.grad, theirs_.grad), name


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_experts_are_deferred_once(use_reentrant: bool, way: str) -> None:
    whole, split = (experts_of("mixtral", way, torch.float32) for _ in range(2))
    deferral = adopted(split)

    def recomputed(*args: Any) -> Any:
        return checkpoint(*args, use_reentrant=use_reentrant)

    theirs = run(whole, 0, torch.float32)
    with deferral.collecting() as deferred:
        ours = run(split, 0, torch.float32, recomputed)
    assert len(deferred) == (2 if way == "grouped_mm" else 2 * 5)
    deferred.run()
    ours_, theirs_ = ((*found, *(p.grad for p in m.parameters())) for found, m in ((ours, split), (theirs, whole)))
    for a, b in zip(ours_, theirs_, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_a_whole_backward_defers_nothing(way: str) -> None:
    whole, split = (experts_of("mixtral", way, torch.float32) for _ in range(2))
    adopted(split)
    for number in range(MICRO_BATCHES):
        run(whole, number, torch.float32)
        run(split, number, torch.float32)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_the_most_that_can_be_left_is_known_before(family: str, way: str) -> None:
    """With a linear layer beside them, and no more than the inputs that several layers share above it."""
    model = experts_of(family, way, torch.bfloat16)
    model["beside"] = nn.Linear(SIZES["hidden_size"], 24, dtype=torch.bfloat16)
    deferral = adopted(model)
    deferral.adopt(model)
    with deferral.collecting() as deferred:
        rows, chosen, weights = micro_batch(0, torch.bfloat16)
        out = model["experts"](rows, chosen, weights)
        (out.float() ** 2).mean().backward(retain_graph=True)
        model["beside"](rows).float().pow(2).mean().backward()
    most = most_deferred_bytes(model, tokens=TOKENS, rows=chosen.numel())
    assert deferred.num_bytes <= most <= 1.5 * deferred.num_bytes
    model.requires_grad_(False)
    assert most_deferred_bytes(model, tokens=TOKENS, rows=chosen.numel()) == 0


def test_frozen_experts_are_left_alone() -> None:
    model = experts_of("mixtral", "eager", torch.float32)
    model.requires_grad_(False)
    adopted(model)
    assert not isinstance(model["experts"], OwnExperts)
