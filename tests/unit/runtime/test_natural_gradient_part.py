"""The engines' part for natural gradients, with other ranks that say what the tests have them say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from paceline.config.natural_gradient_keys import MaxChangeConfig, NaturalGradientConfig
from paceline.patches.repairs import repair_deepspeed
from paceline.runtime.natural_gradient_part import NaturalGradientPart, agreed_limits, loss_scale_of

CPU = torch.device("cpu")
OPTIONS = {"alpha": 1.0, "update_period": 1, "rank_in": 2, "rank_out": 2}


def alone(value: Any) -> list[Any]:
    return [value]


def among(*others: Any) -> Callable[[Any], list[Any]]:
    """Gathers this rank's value and those of others, which come first."""
    return lambda value: [*others, value]


class Stage(nn.Module):
    def __init__(self, *names: str, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(6, 5, bias=bias) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).square().sum() for layer in self.layers.values())


def part_of(model: nn.Module, gather: Any = alone, **options: Any) -> NaturalGradientPart:
    section = NaturalGradientConfig.model_validate({**OPTIONS, **options})
    return NaturalGradientPart(section, model, gather=gather, device=CPU, unit=float)


def learn(model: nn.Module, seed: int = 0, scale: float = 1.0, times: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(times):
        (scale * model(scale * torch.randn(16, 6, generator=generator))).backward()


def gradient_of(model: Stage, name: str) -> Tensor:
    model.zero_grad()
    learn(model, seed=9, times=1)
    gradient = model.layers[name].weight.grad
    assert gradient is not None
    return gradient


def test_layers_are_given_natural_gradients() -> None:
    plain, model = Stage("a", "b"), Stage("a", "b")
    part = part_of(model, layers=r"layers\.a")
    assert part.names == ["layers.a.weight"]
    assert not torch.equal(gradient_of(model, "a"), gradient_of(plain, "a"))
    assert torch.equal(gradient_of(model, "b"), gradient_of(plain, "b"))
    found = part.report()
    assert (found["layers"], found["at_floor"]) == (1, 0.0)
    assert found["updates"] > 0


@pytest.mark.parametrize(("options", "remedy"), [({}, "leave it out"), ({"layers": "q"}, "correct layers, 'q'")])
def test_somebody_must_have_a_layer(options: dict[str, Any], remedy: str) -> None:
    model = Stage("a") if options else nn.LayerNorm(3)
    with pytest.raises(ValueError, match=f"finds none of them: {remedy}"):
        part_of(model, **options)
    assert part_of(model, among(0, 3), **options).names == []


def test_a_state_that_is_loaded_is_what_was_learned() -> None:
    """Of one weight the last of the states counts, and names that are not here are left alone."""
    learned, other, fresh = (Stage("a", "b") for _ in range(3))
    parts = [part_of(model) for model in (learned, other, fresh)]
    learn(learned, seed=1)
    learn(other, seed=2)
    parts[2].load([parts[1].state_dict(), {**parts[0].state_dict(), "layers.c.weight": {}}])
    for name in ("a", "b"):
        found = gradient_of(fresh, name)
        assert torch.equal(found, gradient_of(learned, name))
        assert not torch.equal(found, gradient_of(other, name))


def test_estimates_follow_the_layers_that_move() -> None:
    """A stage gives b up and gets c, whose estimates another stage of its pipeline has."""
    here, there, whole = Stage("a", "b"), Stage("c"), Stage("a", "c")
    part, part_there, part_whole = part_of(here), part_of(there), part_of(whole)
    for model in (here, there):
        learn(model, seed=3)
    left_there = part_there.state_of(["layers.c."])
    part_whole.load([part.state_of(["layers.a."]), left_there])
    left = part.state_of(["layers.b."])
    assert list(left) == ["layers.b.weight"]

    del here.layers["b"]
    here.layers["c"] = there.layers["c"]
    told: list[Any] = []

    def over_stages(value: Any) -> list[Any]:
        told.append(value)
        return [value, (part_there.names, left_there)]

    part.follow(left, over_stages)
    assert part.names == ["layers.a.weight", "layers.c.weight"]
    assert told[0][1].keys() == left.keys()
    whole.load_state_dict(here.state_dict())
    for name in ("a", "c"):
        assert torch.equal(gradient_of(here, name), gradient_of(whole, name))


def test_most_updates_without_effect_are_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.runtime import natural_gradient_part

    model = Stage("a", bias=False)
    part = part_of(model)
    learn(model, scale=1e-12)
    with caplog.at_level(logging.WARNING, "paceline"):
        found = part.report()
        assert found["at_floor"] > 0.5
        assert not caplog.records  # too few updates to know
        monkeypatch.setattr(natural_gradient_part, "FEWEST_UPDATES", found["updates"] - 1)
        assert part.report() == part.report() == found
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["natural gradients do little"]


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(2, 2), nn.Linear(2, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_limits_know_the_head_of_any_rank() -> None:
    section, model = MaxChangeConfig(layer=0.5, head=0.25, total=1.0), Headed()
    names = {parameter: f"model.{name}" for name, parameter in model.named_parameters()}
    limits = agreed_limits(section, model, names, alone)
    assert limits is not None
    assert limits.heads == {"model.lm_head"}
    assert (limits.layer, limits.head, limits.total) == (0.5, 0.25, 1.0)
    first_stage = agreed_limits(section, nn.Linear(2, 2), {}, among(["head.weight", "head.bias"]))
    assert first_stage is not None
    assert first_stage.heads == {"head"}
    assert agreed_limits(None, model, names, alone) is None
    assert agreed_limits(MaxChangeConfig(layer=0, head=0, total=0), model, names, alone) is None


def test_the_loss_scale_is_what_deepspeed_multiplies_by() -> None:
    """In fp16 without ZeRO the optimizer says it, once DeepSpeed is repaired; fp16 autocast has a scaler. FusedAdam,
    which DeepSpeed takes on GPUs, has the same wrapper in bf16 without ZeRO, and that says None."""

    class Optimizer(ZeROOptimizer):
        torch_autocast_gradscaler: Any = None

    def scale(optimizer: Any, scaler: Any = None, **attributes: Any) -> float:
        vars(optimizer).update(attributes)
        engine: Any = SimpleNamespace(optimizer=optimizer, torch_autocast_z0_gradscaler=scaler)
        return loss_scale_of(engine)

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert scale(Optimizer(), loss_scale=1024) == 1024.0
    assert scale(Optimizer()) == 1.0
    assert scale(Optimizer(), loss_scale=1, torch_autocast_gradscaler=scaler) == 64.0
    assert scale(torch.optim.SGD([nn.Parameter(torch.zeros(1))])) == 1.0
    assert scale(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), scaler) == 64.0
    without_zero = FP16_UnfusedOptimizer.__new__(FP16_UnfusedOptimizer)
    without_zero.loss_scale_config = LossScaleConfig(torch.float16, False, 1024.0, None)
    assert scale(without_zero, custom_loss_scaler=False) == 1.0
    fused = FP16_Optimizer.__new__(FP16_Optimizer)
    fused.loss_scale_config = LossScaleConfig(torch.float16, False, 512.0, None)
    of_bf16 = FP16_Optimizer.__new__(FP16_Optimizer)
    of_bf16.loss_scale_config = LossScaleConfig(torch.bfloat16, False, 1.0, None)
    with repair_deepspeed("loss-scale"):
        assert scale(without_zero) == 1024.0
        assert scale(fused, custom_loss_scaler=False) == 512.0
        assert scale(of_bf16) == 1.0
