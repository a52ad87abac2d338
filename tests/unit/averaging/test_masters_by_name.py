"""Masters and the optimizers' states of them: what an average is put into, and where states begin anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.averaging.masters_by_name import PipelineMasters, PlainMasters
from paceline.optim.sharded import ShardedOptimizer

OPTIMIZERS = {
    "AdamW": {},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
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


def test_weights_whose_memory_is_in_another_order_take_averages_too() -> None:
    """Where DeepSpeed steps the parameters themselves: without a pipeline, in fp32, with ZeRO 0."""
    weight = nn.Parameter(torch.ones(2, 3, 1).transpose(0, 1))
    basic = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    train(basic, [weight], range(1))
    control: Any = SimpleNamespace(rank=0, gather=lambda value: [value])
    masters = PlainMasters(control, nn.ParameterDict({"a": weight}), basic, basic)
    values = torch.arange(6.0)
    for kind, tensor in (("master", weight), ("momentum_buffer", basic.state[weight]["momentum_buffer"])):
        (share,) = masters.stepped(kind)
        assert (share.name, share.start, share.stop) == ("a", 0, 6)
        share.tensor.copy_(values.view_as(share.tensor))
        assert torch.equal(tensor, values.view(3, 2, 1)), kind
