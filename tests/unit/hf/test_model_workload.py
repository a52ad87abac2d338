"""What a step of a model has to do, counted without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma4TextConfig, Llama4TextConfig, LlamaConfig, MixtralConfig, OPTConfig

from paceline.hf.model_workload import Shape, workload_of
from paceline.hf.weights import skeleton
from paceline.measure.flops import flops_per_token

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
GEMMA4 = Gemma4TextConfig(
    **SIZES,
    head_dim=16,
    global_head_dim=128,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
)
"""Heads of the last two layers are larger than those of the first."""
SHAPE = Shape(torch.bfloat16, 2, 32, 8)
FLOPS_PER_S = 1e9


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=False),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        MixtralConfig(**SIZES, tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2),
        GEMMA4,
    ],
    ids=["llama", "tied", "mixtral", "gemma4"],
)
def test_seconds_are_the_models_operations(config: Any) -> None:
    workload = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S)
    seconds = sum(item.forward_s + item.backward_s + sum(item.expert_s) for item in workload.items)
    # flops_per_token counts norms as if they were matrix products, and the router's choice of experts likewise.
    assert seconds * FLOPS_PER_S / SHAPE.tokens == pytest.approx(flops_per_token(skeleton(config), 3, 32), rel=0.01)


def test_layers_whose_heads_differ() -> None:
    """Beside the weights' operations: scores and weighted sums, a half of both under the mask."""
    workload = workload_of(GEMMA4, SHAPE, flops_per_s=FLOPS_PER_S)
    layers: Any = skeleton(GEMMA4).get_decoder().layers[:2]
    of_weights = [2 * SHAPE.tokens * sum(p.numel() for p in layer.parameters()) for layer in layers]
    attention = [item.forward_s * FLOPS_PER_S - own for item, own in zip(workload.items[1:3], of_weights, strict=True)]
    assert attention == pytest.approx([2 * SHAPE.tokens * 32 * 4 * size for size in (16, 128)])
    assert workload.num_kv_heads == 1


def test_experts() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    workload = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S)
    assert (workload.num_experts, workload.top_k, workload.rows, workload.row_bytes) == (4, 2, 128.0, 128.0)
    assert workload.moe_layers == [1, 2, 3]
    layer = workload.items[1]
    assert layer.expert_parameters == 4 * 3 * 64 * 128
    # A gated expert: 6 alpha H^2 operations a row forward, twice that backward.
    forward_s = 6 * 2 * 64**2 * 128 / FLOPS_PER_S
    assert layer.expert_s == pytest.approx((forward_s, 2 * forward_s))
    assert 0 < layer.memory.routed_bytes < layer.memory.saved_bytes


def test_experts_that_compute_every_token() -> None:
    """Llama 4's, whichever the router chooses."""
    config = Llama4TextConfig(**SIZES, intermediate_size_mlp=128, num_local_experts=8, num_experts_per_tok=1)
    layer = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S).items[1]
    assert layer.expert_parameters == 8 * 3 * 64 * 128
    assert layer.expert_s[0] * FLOPS_PER_S == pytest.approx(2 * SHAPE.tokens * layer.expert_parameters)


def test_layers_without_experts_in_a_model_with_them() -> None:
    config = DeepseekV3Config(
        **SIZES,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    workload = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S)
    assert workload.num_experts == 8
    assert workload.moe_layers == [2, 3]
    assert workload.items[2].expert_parameters == 8 * 3 * 64 * 32


def test_recomputed_layers_take_longer_and_keep_less() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    plain = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S)
    again = workload_of(config, Shape(torch.bfloat16, 2, 32, 8, True), flops_per_s=FLOPS_PER_S)
    assert again.items[1].backward_s == pytest.approx(1.5 * plain.items[1].backward_s)
    assert again.items[1].expert_s[1] == pytest.approx(1.5 * plain.items[1].expert_s[1])
    assert again.items[-1].backward_s == plain.items[-1].backward_s
    assert again.items[1].memory.saved_bytes < plain.items[1].memory.saved_bytes
    assert again.items[1].memory.routed_bytes == plain.items[1].memory.routed_bytes


def test_tied_embeddings_and_precision() -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    workload = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S, zero=0)
    assert workload.tied_parameters == 500 * 64
    assert (workload.states.weight_bytes, workload.states.shard, workload.states.num_moments) == (2, False, 2)
    assert (workload.num_heads, workload.num_kv_heads, workload.num_experts) == (4, 2, 0)
    whole = workload_of(config, Shape(torch.float32, 2, 32, 8), flops_per_s=FLOPS_PER_S)
    assert whole.states.weight_bytes == 4


def test_an_embedding_that_is_narrower_than_the_hidden_states() -> None:
    """As that of opt-350m, which the head is tied to."""
    sizes = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500}
    config = OPTConfig(**sizes, word_embed_proj_dim=16)
    workload = workload_of(config, SHAPE, flops_per_s=FLOPS_PER_S)
    assert workload.tied_parameters == 500 * 16
    assert workload.items[-1].forward_s * FLOPS_PER_S == pytest.approx(2 * SHAPE.tokens * 500 * 16)
