"""Counted FLOPs against the operations that torch itself counts."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from paceline.hf.stage import Cut
from paceline.hf.weights import load_stage, skeleton
from paceline.measure.flops import TOP_K, first_of, flops_per_token


@pytest.mark.parametrize("tied", [True, False])
def test_dense_model_against_torch(tied: bool) -> None:
    """torch counts matrix products, with eager attention the full square of scores; we count the causal half."""
    import torch
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=101,
        tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    model = load_stage(None, config, Cut.whole(3)).model
    ids = torch.randint(0, 101, (2, 32))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    scores = 6 * 3 * 32 * 64  # the half that a causal mask hides
    # rotary embeddings and norms are not matrix products of weights: below a percent here
    assert counter.get_total_flops() / ids.numel() == pytest.approx(flops_per_token(model, 3, 32) + scores, rel=0.01)


def test_positions_that_are_learned_are_no_matrix_product() -> None:
    from transformers import GPT2Config

    def count(positions: int) -> float:
        config = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=101, n_positions=positions)
        return flops_per_token(skeleton(config), 3, 32)

    assert count(32) == count(1024)


def test_experts_count_as_far_as_tokens_meet_them() -> None:
    from transformers import MixtralConfig

    def count(top_k: int) -> float:
        config = MixtralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            num_local_experts=8, num_experts_per_tok=top_k, vocab_size=97,
        )  # fmt: skip
        model = load_stage(None, config, Cut.whole(2)).model
        return flops_per_token(model, 2, 16)

    one_expert = 3 * 32 * 64
    assert count(3) - count(1) == pytest.approx(6 * 2 * one_expert * 2)


def test_experts_that_are_in_a_part_of_the_config() -> None:
    """Those of DBRX."""
    from transformers import DbrxConfig

    def count(top_k: int) -> float:
        experts = {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": top_k}
        config = DbrxConfig(
            d_model=32, n_heads=4, n_layers=2, vocab_size=97, attn_config={"rope_theta": 1e4}, ffn_config=experts
        )
        return flops_per_token(skeleton(config), 2, 16)

    one_expert = 3 * 32 * 64
    assert count(3) - count(1) == pytest.approx(6 * 2 * one_expert * 2)


@pytest.mark.parametrize("name", ["moe_topk", "top_k_experts"])
def test_a_models_own_name_for_the_experts_of_a_token(name: str) -> None:
    from types import SimpleNamespace

    assert first_of(SimpleNamespace(**{name: 3}), TOP_K) == 3
    assert first_of(SimpleNamespace(**{name: [2, 4]}), TOP_K) == 3  # one a layer, as Hunyuan A13B has
