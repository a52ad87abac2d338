"""Floating-point operations of one training step, from the model's shape alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk", "top_k_experts")

COMPUTE_ALL = ("llama4_text",)
"""Model types whose experts compute every token, and whose routers weigh what comes out."""


def first_of(config: Any, names: tuple[str, ...]) -> int:
    """The first of these sizes that a model's config has; 1 if it has none. The mean one of a list of the layers'.

    DBRX has them in a config of its feed-forward part.
    """
    owners = config, getattr(config, "ffn_config", None)
    value = next((value for owner in owners for name in names if (value := getattr(owner, name, None))), 1)
    return round(sum(value) / len(value)) if isinstance(value, list) else int(value)


def experts_of_token(config: Any) -> int:
    """Experts that compute each token: those that it is routed to, or all."""
    return first_of(config, NUM_EXPERTS if getattr(config, "model_type", "") in COMPUTE_ALL else TOP_K)


def size_of(config: Any, name: str) -> Any:
    """A size in a model's config, None if it has none. A list of the layers' sizes if they differ (Gemma 4's heads)."""
    if not getattr(config, "is_heterogeneous", False):
        return getattr(config, name, None)
    sizes = [getattr(of_layer, name, None) for of_layer in config.per_layer_config]
    return sizes[0] if all(size == sizes[0] for size in sizes) else sizes


def attention_widths(config: Any, num_layers: int) -> list[int]:
    """Heads times their size in each of the first ``num_layers`` layers; 0 where there are none."""
    is_heterogeneous = getattr(config, "is_heterogeneous", False)
    layers = config.per_layer_config[:num_layers] if is_heterogeneous else [config] * num_layers
    widths = []
    for layer in layers:
        heads = getattr(layer, "num_attention_heads", 0) or 0
        widths.append(heads * (getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)))
    return widths


def flops_per_token(model: PreTrainedModel, num_layers: int, length: int, *, is_frozen: bool = False) -> float:
    """Forward and backward FLOPs for one token in a sequence of ``length``.

    ``6 N + 6 L · length · A``: two for each multiply-add, three passes (forward, gradients of inputs and of weights),
    N the weights that a token meets (not the tables of tokens and positions, unless one is also the head; of the
    experts only those it is routed to) and A = heads · head size in a mean layer, for scores and weighted sum under a
    causal mask. Recomputation of checkpointed activations does not count: it is not work of the model. Where the
    weights ``is_frozen``, with small adapters beside them, nobody needs their gradients: ``4 N``.

    Source: PaLM, arXiv 2204.02311, appendix B, with the causal mask's half of the attention counted.
    """
    config = model.config.get_text_config()
    share_met = min(1.0, first_of(config, TOP_K) / first_of(config, NUM_EXPERTS))
    met = 0.0
    for name, parameter in model.named_parameters():
        met += parameter.numel() * (share_met if ".experts." in f"{name}." else 1.0)
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings(), *(part for part in model.modules() if isinstance(part, nn.Embedding))]
    for table in {id(part.weight): part.weight for part in tables}.values():
        if head is None or head.weight is not table:
            met -= table.numel()
    return (4.0 if is_frozen else 6.0) * met + 6.0 * length * sum(attention_widths(config, num_layers))
