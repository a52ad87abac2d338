"""Small configs of every causal-LM family that the installed transformers has.

Building a family tiny takes guesses (config classes share no spelling for "few experts"), so the guesses are a list
here, and a family that they do not fit says so instead of dropping out of the table.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig

NUM_LAYERS = 4

SMALL: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=97, max_position_embeddings=64, sliding_window=4,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
    # experts
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2,
    n_group=1, topk_group=1, n_shared_experts=1, num_shared_experts=1, first_k_dense_replace=1,
    moe_intermediate_size=16, expert_ffn_hidden_size=16, shared_expert_intermediate_size=16, ffn_hidden_size=64,
    # latent attention
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    # linear attention
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    # other spellings
    num_layers=NUM_LAYERS, dim_model_base=32, laurel_rank=8, num_kv_shared_layers=0,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=97,
    # dropout makes a comparison random
    attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, hidden_dropout=0.0, attn_dropout=0.0, dropout=0.0,
    embedding_dropout=0.0, residual_dropout=0.0, attn_pdrop=0.0, activation_dropout=0.0, embd_dropout=0.0,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0, layerdrop=0.0,
)  # fmt: skip

EXTRA: dict[str, dict[str, Any]] = {
    "granite": dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22),
    "granitemoe": dict(embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22),
    "granitemoeshared": dict(embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22),
    "granite_swa": dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22),
    "granitemoe_swa": dict(embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22),
    "hyperclovax": dict(embedding_multiplier=10.0, logits_scaling=8.0, residual_multiplier=0.22),
}
"""Values that make a family's peculiarity show: at its default of 1, a multiplier applied twice goes unseen."""


def causal_lm_configs() -> Iterator[type[PretrainedConfig]]:
    """Config classes of all families that AutoModelForCausalLM knows, by model type."""
    yield from sorted(AutoModelForCausalLM._model_mapping, key=lambda c: c.model_type)


def tiny_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """A config of four small layers, with the layer types of the family's default in turn.

    Raises:
        Exception: whatever the family's config says of the guesses.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = config_class()
        values = {k: v for k, v in SMALL.items() if hasattr(default, k)}
        values |= EXTRA.get(config_class.model_type, {})
        if hasattr(default, "kv_lora_rank"):
            values["num_key_value_heads"] = 4
            values.pop("head_dim", None)
        kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
        if kinds:
            values["layer_types"] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
        for name in ("output_router_logits",):
            if hasattr(default, name):
                values[name] = True
        if getattr(default, "router_aux_loss_coef", None) is not None:
            values["router_aux_loss_coef"] = 0.5
        try:
            config = config_class(**values)
        except Exception:
            values.pop("layer_types", None)
            config = config_class(**values)
    config._attn_implementation = "eager"
    return config


def takes_input_ids_only(config_class: type[PretrainedConfig]) -> bool:
    """Whether the family's ``ForCausalLM`` is a decoder over token ids (no encoder, no pixels)."""
    from .weights import model_class_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = inspect.signature(inspect.unwrap(model_class_of(config_class()).forward)).parameters
    return "inputs_embeds" in parameters
