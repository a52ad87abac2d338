"""Floating-point operations of one training step, from the model's shape alone."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")


def flops_per_token(model: PreTrainedModel, num_layers: int, length: int, *, is_frozen: bool = False) -> float:
    """Forward and backward FLOPs for one token in a sequence of ``length``.

    ``6 N + 6 L · length · A``: two for each multiply-add, three passes (forward, gradients of inputs and of weights),
    N the weights that a token meets (not the tables of tokens and positions, unless one is also the head; of the
    experts only those it is routed to) and A = heads · head size, for scores and weighted sum under a causal mask.
    Recomputation of checkpointed activations does not count: it is not work of the model. Where the weights
    ``is_frozen``, with small adapters beside them, nobody needs their gradients: ``4 N``.

    Source: PaLM, arXiv 2204.02311, appendix B, with the causal mask's half of the attention counted.
    """
    config = model.config.get_text_config()
    experts, top_k = (
        next((v for n in names if (v := getattr(config, n, None))), None) for names in (NUM_EXPERTS, TOP_K)
    )
    met = 0.0
    for name, parameter in model.named_parameters():
        share = (top_k or 1) / experts if experts and ".experts." in f"{name}." else 1.0
        met += parameter.numel() * share
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings(), *(part for part in model.modules() if isinstance(part, nn.Embedding))]
    for table in {id(part.weight): part.weight for part in tables}.values():
        if head is None or head.weight is not table:
            met -= table.numel()
    heads = getattr(config, "num_attention_heads", 0) or 0
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return (4.0 if is_frozen else 6.0) * met + 6.0 * num_layers * length * heads * size
