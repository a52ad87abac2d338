"""A Llama as a stock ``PipelineModule``, as lean as one can be written by hand: the model's own decoder layers, rotary
tables computed once for all layers, the loss on the last stage, no masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding


def layers(model: LlamaForCausalLM) -> list[nn.Module]:
    """Embedding, decoder layers, and norm with head: all take and give one tensor."""
    return [Embedding(model), *(Layer(model, index) for index in range(model.config.num_hidden_layers)), Head(model)]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over a micro-batch's tokens. ``labels`` are its tokens, as in transformers."""
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


class Embedding(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)


class Layer(nn.Module):
    """A decoder layer of the model with its rotary tables kept between calls."""

    tables: tuple[Tensor, Tensor] | None = None

    def __init__(self, model: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        self.layer = model.model.layers[index]
        self.rotary = (LlamaRotaryEmbedding(model.config),)

    def forward(self, hidden: Tensor) -> Tensor:
        if Layer.tables is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            Layer.tables = self.rotary[0].to(hidden.device)(hidden, positions)
        return self.layer(hidden, attention_mask=None, position_embeddings=Layer.tables)


class Head(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))
