"""Masters and the optimizers' states of them: what an average is put into, and where states begin anew."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
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


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_moments_of_islands_that_differ_in_steps_are_averaged_without_their_bias() -> None:
    """The gradient is always 2. One that joined late would go on with a fraction of it, the others with other moments.

    One is a pipeline, the other one is none.
    """
    control: Any = SimpleNamespace(rank=0, gather=lambda value: [value], world=None)
    islands: list[tuple[Any, Any]] = []
    for steps in (50, 3):
        parameter = nn.Parameter(torch.zeros(3))
        module, basic = nn.ParameterDict({"a": parameter}), torch.optim.AdamW([parameter], lr=0.1)
        masters: Any = PlainMasters(control, module, basic, basic)
        if not islands:
            stage: Any = SimpleNamespace(num_stages=1)
            masters = PipelineMasters(control, stage, ShardedOptimizer(basic, {parameter: "a"}))
        (trained,) = basic.param_groups[0]["params"]
        for _ in range(steps):
            trained.grad = torch.full((3,), 2.0)
            basic.step()
        islands.append((masters, basic.state[trained]))
    for kind, beta, value in (("exp_avg", 0.9, 2.0), ("exp_avg_sq", 0.999, 4.0)):
        mean = sum(masters.gather(["a"], kind)[0] for masters, _ in islands) / 2
        for (masters, state), steps in zip(islands, (50, 3), strict=True):
            masters.scatter(["a"], [mean], kind=kind)
            assert state[kind].tolist() == pytest.approx([value * (1 - beta**steps)] * 3)


@pytest.mark.usefixtures("one_rank")
def test_the_bias_of_fused_adams_moments_is_that_of_its_groups_steps() -> None:
    """It counts them in the state of the last parameter."""
    control: Any = SimpleNamespace(rank=0, gather=lambda value: [value], world=None)
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b")})
    basic = FusedAdam.__new__(FusedAdam)  # without its kernels
    torch.optim.Optimizer.__init__(basic, list(module.parameters()), {"lr": 0.1, "betas": (0.9, 0.999)})
    for parameter, step in zip(module.parameters(), (0, 3), strict=True):
        basic.state[parameter] = {"step": step, "exp_avg": torch.full((2,), 1 - 0.9**3)}
    found = PlainMasters(control, module, basic, basic).gather(["a", "b"], "exp_avg")
    assert found is not None
    assert torch.cat(found).tolist() == pytest.approx([1.0] * 4)


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
