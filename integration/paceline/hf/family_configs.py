"""Small configs of every causal-LM family that the installed transformers has.

Building a family tiny takes guesses (config classes share no spelling for "few experts"), so the guesses are a list
here, and a family that they do not fit says so instead of dropping out of the table.
"""
# ruff: noqa: C408 (keywords read as the configs' own arguments)

from __future__ import annotations

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
    # linear attention and state spaces
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_heads=4, linear_head_dim=8, mamba_chunk_size=8,
    mamba_n_heads=8, mamba_d_head=8, mamba_d_ssm=64, mamba_d_state=16, mamba_n_groups=1, mamba_num_heads=8,
    mamba_head_dim=8, state_size=16, ssm_state_size=16, n_groups=1, chunk_size=8,
    # other spellings
    num_layers=NUM_LAYERS, dim_model_base=32, rotary_dim=4, embedding_dim=32, num_blocks=NUM_LAYERS, d_model=32,
    # dropout makes a comparison random
    attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, hidden_dropout=0.0, attn_dropout=0.0, dropout=0.0,
    embedding_dropout=0.0, residual_dropout=0.0, attn_pdrop=0.0, activation_dropout=0.0, embd_dropout=0.0,
    emb_pdrop=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0, layerdrop=0.0,
)  # fmt: skip

_GRANITE = dict(embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22)
_GRANITE_SWA = (_GRANITE, _GRANITE | dict(layer_rope_theta=[1e4, 2e4, 3e4, 4e4]))
_GEMMA4 = dict(global_head_dim=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0)

EXTRA: dict[str, tuple[dict[str, Any], ...]] = {
    "afmoe": (dict(), dict(mup_enabled=True)),
    "granite": (_GRANITE,),
    "granitemoe": (_GRANITE,),
    "granitemoeshared": (_GRANITE,),
    "granitemoehybrid": (_GRANITE | dict(layer_types=["linear_attention", "full_attention"] * 2),),
    "granite_swa": _GRANITE_SWA,
    "granitemoe_swa": _GRANITE_SWA,
    "hyperclovax": (_GRANITE,),
    "falcon_h1": (dict(embedding_multiplier=5.0, lm_head_multiplier=0.5),),
    "falcon": (
        dict(),
        dict(alibi=True, parallel_attn=False, multi_query=False, bias=True),
        dict(new_decoder_architecture=True, num_kv_heads=2),
    ),
    "inkling_text": (dict(unpadded_vocab_size=96),),
    "cohere_compass_text": (
        dict(
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
                for kind in ("sliding_attention", "full_attention")
            },
        ),
    ),
    "bamba": (dict(attn_layer_indices=[1, 3]),),
    "jamba": (dict(attn_layer_period=3, attn_layer_offset=0),),  # each kind with an MLP and with experts
    "mamba2": (dict(num_heads=8),),
    "mpt": (dict(max_seq_len=64),),
    "xlstm": (dict(num_heads=4, chunk_size=16),),
    "longcat_flash": (dict(head_dim=8, zero_expert_num=2, moe_topk=2),),
    "dots3_note_text": (
        dict(
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=16,
            swa_kv_lora_rank=16,
            swa_head_dim=16,
            swa_qk_nope_head_dim=8,
            swa_v_head_dim=8,
            head_dim=16,
            index_head_dim=16,
            index_n_heads=2,
            index_topk=4,
            shared_experts_intermediate_size=16,
        ),
    ),
    "gpt_neo": (dict(attention_types=[[["global", "local"], 2]], window_size=4),),
    "lfm2_moe": (dict(layer_types=["conv", "full_attention"] * 2),),
    "nemotron_h": (dict(layer_types=["linear_attention", "moe", "full_attention", "mlp"]),),
    "dbrx": (
        dict(
            attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
            ffn_config=dict(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
        ),
    ),
    "phimoe": (dict(router_jitter_noise=0.0, input_jitter_noise=0.0),),
    "gemma4_text": (
        _GEMMA4,
        _GEMMA4 | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, attention_k_eq_v=True),
    ),
    "gemma4_unified_text": (dict(global_head_dim=16, num_kv_shared_layers=0),),
}
"""Values by family, a small config for each set of them. They make a family's peculiarity show (at its default of 1, a
multiplier applied twice goes unseen) and take randomness out of it (phimoe draws its experts)."""


def causal_lm_configs() -> Iterator[type[PretrainedConfig]]:
    """Config classes of all families that AutoModelForCausalLM knows, by model type."""
    yield from sorted(dict.fromkeys(AutoModelForCausalLM._model_mapping), key=lambda c: c.model_type)


def tiny_configs(config_class: type[PretrainedConfig]) -> list[PretrainedConfig]:
    """Configs of four small layers, with the layer types of the family's default in turn.

    Raises:
        Exception: whatever the family's config says of the guesses.
    """
    from .weights import causal_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = causal_config(config_class())
        return [_build(default, {}, extra) for extra in EXTRA.get(default.model_type, ({},))]


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A config of four small layers that keeps whatever else ``config`` says.

    Raises:
        Exception: whatever the family's config says of the guesses.
    """
    private = ("model_type", "transformers_version", "architectures", "quantization_config", "dtype")
    derived = ("head_dim", "qk_head_dim", "per_layer_config")  # the class computes them from the small values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {k: v for k, v in config.to_dict().items() if k not in (*private, *derived) and k[0] != "_"}
        return _build(config, given, EXTRA.get(config.model_type, ({},))[0])


def _build(config: PretrainedConfig, given: dict[str, Any], extra: dict[str, Any]) -> PretrainedConfig:
    """A config of the class of ``config`` from ``given``, the small values that it has fields for, and ``extra``."""
    small = {name: value for name, value in SMALL.items() if _has_field(config, name)}
    if _has_field(config, "kv_lora_rank"):
        small["num_key_value_heads"] = 4
        small.pop("head_dim", None)
    small |= _shorter_lists(config)
    if not given and _has_field(config, "output_router_logits"):
        small["output_router_logits"] = True
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if getattr(config, name, None) is not None:
            small[name] = 0.5
    try:
        tiny = type(config)(**(given | small | extra))
    except Exception:
        small.pop("layer_types", None)
        tiny = type(config)(**(given | small | extra))
    tiny._attn_implementation = "eager"
    return tiny


def _has_field(config: PretrainedConfig, name: str) -> bool:
    """Whether ``config`` takes a value for ``name``; a property without a setter does not."""
    attribute = getattr(type(config), name, None)
    if isinstance(attribute, property):
        return attribute.fset is not None
    try:
        return hasattr(config, name)
    except Exception:  # transformers: a value that differs from layer to layer has no value for the model
        return True


def _shorter_lists(config: PretrainedConfig) -> dict[str, Any]:
    """Lists with one entry a layer, cut to four that show each kind there is (as far as four can)."""
    num_layers = getattr(config, "num_hidden_layers", None)
    shorter = {}
    for name in [*vars(config), "layer_types"]:
        value = vars(config).get(name) if name in vars(config) else getattr(config, name, None)
        if isinstance(value, (list, tuple)) and len(value) == num_layers and all(isinstance(v, str) for v in value):
            kinds = list(dict.fromkeys(value))
            shorter[name] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
    return shorter
