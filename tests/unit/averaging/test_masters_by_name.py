"""Optimizers' states after an average, where they begin anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.averaging.masters_by_name import PipelineMasters
from paceline.optim.sharded import ShardedOptimizer

OPTIMIZERS = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "ASGD": {"lambd": 0.1},
    "Rprop": {},
    "Adagrad": {"initial_accumulator_value": 0.5},
}


def train(optimizer: Any, parameters: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_begin_as_a_new_optimizers_do(name: str) -> None:
    """Not all of them with zeros."""
    names, options = ["a", "b"], {"lr": 0.1, **OPTIMIZERS[name]}
    parameters = [nn.Parameter(torch.ones(3)) for _ in names]
    module = nn.ParameterDict(dict(zip(names, parameters, strict=True)))
    basic = getattr(torch.optim, name)(parameters, **options)
    optimizer = ShardedOptimizer(basic, dict(zip(parameters, names, strict=True)))
    masters: Any = [owned.master for owned in optimizer.owned]
    control: Any = None
    train(basic, masters, range(5))
    PipelineMasters(control, module, optimizer).reset_states(names[:1])
    new = [nn.Parameter(master.detach().clone()) for master in masters]
    train(basic, masters, range(5, 10))
    train(getattr(torch.optim, name)(new, **options), new, range(5, 10))
    torch.testing.assert_close(masters[0], new[0], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(masters[1], new[1], rtol=1e-3), "its states go on"
