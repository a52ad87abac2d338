"""The router's loss in parts is transformers' loss of the whole."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from paceline.hf.anatomy import UnsupportedModelError
from paceline.hf.parity import check_split
from paceline.hf.quiet_transformers import quiet
from paceline.hf.router import KNOWN, RouterLoss, fingerprint, router_loss_of

EXPERTS, TOP_K, BATCH, LENGTH, LAYERS = 8, 2, 3, 5, 4


def _logits() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH * LENGTH, EXPERTS, generator=generator).requires_grad_() for _ in range(LAYERS)]


def _mask() -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 3:] = 0
    return mask


@pytest.mark.parametrize("mask", [None, _mask()], ids=["packed", "padded"])
@pytest.mark.parametrize("edges", [(), (1,), (1, 1, 3)], ids=["whole", "two stages", "a stage without experts"])
def test_sum_over_stages_is_the_whole_loss(mask: Tensor | None, edges: tuple[int, ...]) -> None:
    whole, parts = _logits(), _logits()
    wanted = load_balancing_loss_func(tuple(whole), EXPERTS, TOP_K, mask)
    loss = RouterLoss(EXPERTS, TOP_K, 0.1)
    routing, begin = None, 0
    for end in (*edges, LAYERS):
        routing = loss.accumulate(routing, parts[begin:end], mask, device=torch.device("cpu"))
        begin = end
    assert routing is not None
    assert routing.shape == (loss.size,)
    value = loss.value(routing)
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)
    wanted.backward()
    value.backward()
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, one.grad, rtol=1e-5, atol=1e-9)


def test_no_expert_layer_and_nothing_but_padding_are_no_loss() -> None:
    loss = RouterLoss(EXPERTS, TOP_K, 0.1)
    assert loss.value(loss.accumulate(None, (), None, device=torch.device("cpu"))) == 0
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    assert loss.value(loss.accumulate(None, _logits(), mask, device=torch.device("cpu"))) == 0


def _model(config: PretrainedConfig) -> PreTrainedModel:
    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


SMALL: dict[str, Any] = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2)  # noqa: C408


def test_read_from_the_forward() -> None:
    config = MixtralConfig(
        **SMALL,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.25,
        output_router_logits=True,
    )
    assert router_loss_of(_model(config)) == RouterLoss(6, 3, 0.25)


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SMALL, num_key_value_heads=2),
        LlamaConfig(**SMALL, output_router_logits=True),
        Llama4TextConfig(**SMALL, num_key_value_heads=2, output_router_logits=True),
    ],
    ids=["not asked for", "no experts", "a forward that adds none"],
)
def test_no_router_loss(config: PretrainedConfig) -> None:
    assert router_loss_of(_model(config)) is None


def test_a_forward_that_does_not_ask_the_config() -> None:
    class Deaf(MixtralForCausalLM):  # as JetMoe's in transformers 5.17
        def forward(self, input_ids: Any, output_router_logits: bool = False) -> Any:
            aux_loss = load_balancing_loss_func(input_ids, self.num_experts, self.num_experts_per_tok, None)
            loss = 0
            loss += self.router_aux_loss_coef * aux_loss
            return loss

    with torch.device("meta"):
        model = Deaf(MixtralConfig(**SMALL, num_key_value_heads=2, output_router_logits=True))
    assert router_loss_of(model) is None


def test_another_balancing_function_is_refused() -> None:
    message = (
        r"^DogeForCausalLM \(model type 'doge'\) cannot be a pipeline with output_router_logits: its "
        "load_balancing_loss_func cannot be cut over stages. Set output_router_logits to false in the config.$"
    )
    model = _model(DogeConfig(**SMALL, num_key_value_heads=2, output_router_logits=True))
    with pytest.raises(UnsupportedModelError, match=message):
        router_loss_of(model)


def test_logits_that_are_not_recorded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(MixtralConfig(**SMALL, num_key_value_heads=2, output_router_logits=True))
    for part in model.modules():
        if getattr(part, "_can_record_outputs", None):
            monkeypatch.setattr(type(part), "_can_record_outputs", {})
            monkeypatch.setattr(part, "_can_record_outputs", {}, raising=False)
    with pytest.raises(UnsupportedModelError, match="output_router_logits: no module records its router's logits"):
        router_loss_of(model)


def test_fingerprint_is_of_the_code_alone() -> None:
    def one(a: int) -> int:
        """What it does."""
        return a + 1  # why

    first = fingerprint(one)

    def one(a: int) -> int:  # type: ignore[no-redef]
        return (  # otherwise laid out
            a + 1
        )

    def two(a: int) -> int:
        return a + 1

    def one_more(a: int) -> int:
        return a + 2

    assert len({first, fingerprint(two), fingerprint(one_more), fingerprint(one)}) == 4  # parentheses count
    assert fingerprint(load_balancing_loss_func) in KNOWN


def test_last_stage_without_an_expert_layer_asks_for_no_router_logits() -> None:
    """transformers would balance the experts of nothing, which fails."""
    config = Qwen2MoeConfig(
        **SMALL | {"num_hidden_layers": 3, "vocab_size": 32, "moe_intermediate_size": 8, "num_experts": 4},
        num_key_value_heads=2,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 2],
        output_router_logits=True,
        pad_token_id=None,
    )
    with quiet():
        assert check_split(config, 3, boundaries=[(2,), (1, 2)]).exact
