"""Max change by hand: a step of one process, each layer whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.optim.max_change import Limits, max_change_factors


def step_limited(optimizer: Any, named: Mapping[str, nn.Parameter], limits: Limits) -> dict[str, float]:
    """``optimizer.step()`` as one process limits it, layer by layer; ``norm`` and ``num_limited``."""
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer.step()
    changes = {name: p.detach() - before[name] for name, p in named.items()}
    layers = sorted({name.rpartition(".")[0] for name in named})
    squares = dict.fromkeys(layers, 0.0)
    for name, change in changes.items():
        squares[name.rpartition(".")[0]] += float(change.double().square().sum())
    norms = torch.tensor(list(squares.values()), dtype=torch.float64).sqrt()
    own = torch.tensor([limits.of(layer) for layer in layers], dtype=torch.float64)
    factors, norm = max_change_factors(norms, own, limits.total)
    for name, parameter in named.items():
        factor = factors[layers.index(name.rpartition(".")[0])].item()
        parameter.data.copy_(before[name] + factor * changes[name])
    return {"norm": float(norm), "num_limited": int((norms > own).sum())}
