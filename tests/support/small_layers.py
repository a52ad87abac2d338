"""A small pipeline of layers of one's own: embedding, blocks, and an output that is tied to the embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, MICRO_BATCHES = 17, 8, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Pair(nn.Module):
    """Passes on a tuple: floats, integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any) -> Any:
        x, ids, mask = pair if isinstance(pair, tuple) else (pair, torch.arange(pair.shape[1]), pair[0, :, 0] > 0)
        return torch.tanh(self.linear(x)) * mask[:, None] + ids[:, None], ids, mask


class Join(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        return pair[0]


def by_weight(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


def embed(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(x, module.weight)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layers(kind: str) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    middle = [LayerSpec(Block)] * LAYERS if kind == "tied" else [*[LayerSpec(Pair)] * LAYERS, LayerSpec(Join)]
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=embed),
        *middle,
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=by_weight),
    ]


def batches(step: int, lengths: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    return [
        tuple(torch.randint(0, VOCABULARY, (2, 2, lengths[i % len(lengths)]), generator=generator))
        for i in range(MICRO_BATCHES)
    ]
