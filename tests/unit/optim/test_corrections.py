"""Corrections of late gradients against their formulas, and their memory through a checkpoint by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.optim.corrections import ERROR_FEEDBACK, NESTEROV, Corrections
from paceline.optim.sharded import ShardedOptimizer
from paceline.optim.step_options import StepOptions
from paceline.state.named import parts_of, place

STEPS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99)),
    "adam for each": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99), foreach=True),
    "adam fused": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.99), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
MU = {"adam": 0.8, "adam for each": 0.8, "adam fused": 0.8, "momentum": 0.7}


def gradients(step: int) -> list[Tensor | None]:
    """Of a matrix and a vector; the vector has none in the first step, and none in the fourth."""
    generator = torch.Generator().manual_seed(step)
    both = [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]
    return [both[0], None if step in (0, 3) else both[1]]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]


def corrected(name: str, corrections: Corrections, steps: int = STEPS) -> list[nn.Parameter]:
    trained = parameters()
    optimizer = OPTIMIZERS[name](trained)
    for step in range(steps):
        for parameter, gradient in zip(trained, gradients(step), strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        corrections.step(optimizer)
    return trained


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_corrected_unless_asked_for(name: str) -> None:
    trained = parameters()
    optimizer = OPTIMIZERS[name](trained)
    for step in range(STEPS):
        for parameter, gradient in zip(trained, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for parameter, wanted in zip(corrected(name, Corrections()), trained, strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.parametrize("correction", [NESTEROV, ERROR_FEEDBACK])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_run_ahead_by_what_the_change_has_changed(name: str, correction: str) -> None:
    ahead = MU.get(name, 0.9) if correction == NESTEROV else 1.0
    trained = parameters()
    optimizer = OPTIMIZERS[name](trained)
    previous = [torch.zeros_like(parameter) for parameter in trained]
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in trained]
        for parameter, gradient in zip(trained, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for number, parameter in enumerate(trained):
            if parameter.grad is None:
                continue
            change = parameter.detach() - before[number]
            parameter.data = before[number] + (1 + ahead) * change - ahead * previous[number]
            previous[number] = change
    for parameter, wanted in zip(corrected(name, Corrections(correction=correction)), trained, strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)


def test_nesterovs_weights_are_where_his_method_takes_gradients() -> None:
    """On a parabola, against the textbook: x goes by the velocity v, whose gradients are of y, which looks ahead."""
    rate, momentum = 0.1, 0.9
    trained = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([trained], lr=rate, momentum=momentum)
    x = trained.detach().clone()
    v = torch.zeros_like(x)
    for _ in range(8):
        trained.grad = 3 * trained.detach()
        Corrections(correction=NESTEROV).step(optimizer)
        v = momentum * v - rate * 3 * (x + momentum * v)
        x = x + v
        torch.testing.assert_close(trained.detach(), x + momentum * v)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_warm_in_raises_the_learning_rate(name: str) -> None:
    trained = parameters()
    optimizer = OPTIMIZERS[name](trained)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 4)
        for parameter, gradient in zip(trained, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for parameter, wanted in zip(corrected(name, Corrections(warm_in_steps=4)), trained, strict=True):
        assert torch.equal(parameter, wanted)


def test_learning_rates_stay_as_they_are() -> None:
    (trained,) = parameters()[:1]
    optimizer = torch.optim.SGD([trained], lr=0.3)
    trained.grad = torch.ones_like(trained)
    Corrections(warm_in_steps=10).step(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.3


class Saved:
    """State by name, as :func:`paceline.state.named.place` reads it."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.parts = {
            owned.name: {kind: tensor.clone() for kind, tensor in parts_of(optimizer, owned).items()}
            for owned in optimizer.owned
        }

    def kinds(self, name: str) -> list[str]:
        return list(self.parts.get(name, ()))

    def shape(self, name: str, kind: str | None = None) -> tuple[int, ...]:
        return tuple(self.parts[name][kind or "master"].shape)

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.parts[name][kind]
        return tensor[start:stop].clone() if tensor.dim() else tensor.clone()


class Pair(nn.Module):
    num_stages = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)


@pytest.mark.parametrize("correction", [NESTEROV, ERROR_FEEDBACK])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_goes_along_with_a_checkpoint(name: str, correction: str) -> None:
    def make() -> tuple[Pair, ShardedOptimizer]:
        module = Pair()
        names = {parameter: name for name, parameter in module.named_parameters()}
        options = StepOptions(corrections=Corrections(warm_in_steps=5, correction=correction))
        return module, ShardedOptimizer(OPTIMIZERS[name](names), names, options)

    def train(module: Pair, optimizer: ShardedOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            module.second(module.first(x)).square().mean().backward()
            assert optimizer.updates is not None
            optimizer.updates.backward_complete(0)
            optimizer.updates.finish_step()
            optimizer.updates.apply()

    module, optimizer = make()
    train(module, optimizer, 0, 3)
    other, resumed = make()
    place(other, resumed, Saved(optimizer))
    resumed.publish()
    train(module, optimizer, 3, 6)
    train(other, resumed, 3, 6)
    for wanted, found in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(wanted, found)
    optimizer.destroy()
    resumed.destroy()


def test_what_another_correction_remembered_is_forgotten() -> None:
    (trained,) = parameters()[:1]
    optimizer = torch.optim.Adam([trained])
    trained.grad = torch.ones_like(trained)
    own = {"step", "exp_avg", "exp_avg_sq"}
    for corrections, remembered in (
        (Corrections(3, NESTEROV), {"num_updates", "previous_change"}),
        (Corrections(0, ERROR_FEEDBACK), {"previous_change"}),
        (Corrections(), set()),
    ):
        corrections.step(optimizer)
        assert set(optimizer.state[trained]) == own | remembered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warm_in_steps": -1}, "warm_in_steps is -1: it is a number of updates, give 0 or more"),
        ({"correction": "nestorov"}, "correction is 'nestorov': choose one of nesterov, error_feedback, or null"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Corrections(**options)
