"""The router's auxiliary (load-balancing) loss of a mixture of experts, cut over stages.

The loss is a product of two means over all layers and tokens, so it is no sum over stages. Its two means are: each
stage adds its layers' sums to those that came in with the activations, the last stage takes the product, and the
gradient of the probabilities comes back with the activations' gradient. No collective, no approximation.

Source: Switch Transformer, arXiv 2101.03961, equations (4) to (6), as transformers computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

MEASURED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class RouterLoss:
    """Load-balancing loss over ``num_experts`` experts of which each token takes ``top_k``.

    The running sums are one float32 vector ``[2 E + 1]``: tokens sent to each expert, probability given to each
    expert, rows (tokens × layers) counted.
    """

    num_experts: int
    top_k: int
    coefficient: float

    @property
    def size(self) -> int:
        return 2 * self.num_experts + 1

    def accumulate(
        self,
        routing: Tensor | None,
        router_logits: Sequence[Tensor],
        attention_mask: Tensor | None,
        device: torch.device,
    ) -> Tensor:
        """Add these layers' logits, each ``[B·S, E]``, to ``routing``; padding (mask 0) does not count."""
        experts = self.num_experts
        if routing is None:
            routing = torch.zeros(self.size, dtype=torch.float32, device=device)
        tokens, probability, rows = routing[:experts], routing[experts:-1], routing[-1]
        mask = None if attention_mask is None else attention_mask.reshape(-1).to(torch.float32)
        for logits in router_logits:
            weights = torch.softmax(logits.reshape(-1, experts), dim=-1)
            chosen = weights.topk(self.top_k, dim=-1).indices.reshape(-1)
            per_token = torch.ones(weights.shape[0], dtype=torch.float32, device=device) if mask is None else mask
            counted = torch.zeros(experts, dtype=torch.float32, device=device)
            tokens = tokens + counted.scatter_add_(0, chosen, per_token.repeat_interleave(self.top_k))
            weights = weights.float() if mask is None else weights.float() * mask.unsqueeze(-1)
            probability = probability + weights.sum(dim=0)
            rows = rows + (per_token.shape[0] if mask is None else mask.sum())
        return torch.cat([tokens, probability, rows.reshape(1)])

    def value(self, routing: Tensor) -> Tensor:
        """The loss (a scalar) from the whole model's sums."""
        experts = self.num_experts
        tokens, probability, rows = routing[:experts], routing[experts:-1], routing[-1]
        return torch.sum(tokens / rows * (probability / rows)) * experts


def router_loss_of(model: PreTrainedModel) -> RouterLoss | None:
    """The model's router loss if its config asks for one (``output_router_logits``), else None."""
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if coefficient is None:
        coefficient = getattr(config, "aux_loss_coef", None)
    experts = _first(config, MEASURED)
    top_k = _first(config, ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k"))
    if coefficient is None or experts is None or top_k is None:
        return None
    return RouterLoss(int(experts), int(top_k), float(coefficient))


def _first(config: Any, names: Sequence[str]) -> Any:
    return next((getattr(config, n) for n in names if getattr(config, n, None) is not None), None)
