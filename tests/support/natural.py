"""What tests of natural gradients in engines have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

LAYERS = 2
OPTIONS = {"alpha": 1.0, "update_period": 2, "rank_in": 8, "rank_out": 8}
"""Ranks below the rows of a micro-batch: otherwise some directions of an estimate are rounding, and nobody's alike."""
SGD = {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}
FAST = {"type": "SGD", "params": {"lr": 30.0, "momentum": 0.9}}
LIMITED = {**OPTIONS, "max_change": {}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
NO_SUCH_LAYERS = (
    "paceline.natural_gradient is for linear layers and experts that are trained, and finds none of them: correct "
    "layers, 'nonsense'."
)


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs without its instructions; torch computes it there all the same."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def learned(engine: Any) -> dict[str, Tensor]:
    """Every tensor of every estimate on this rank."""
    return {
        f"{name}, {key} of {side}": value.clone()
        for name, state in engine.natural_gradient.state_dict().items()
        for side in ("inputs", "outputs")
        for key, value in state[side].items()
        if torch.is_tensor(value)
    }


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> None:
    """Relative, of each tensor's norm."""
    for name, tensor in found.items():
        assert (tensor - wanted[name]).norm() <= tolerance * wanted[name].norm(), name


def size(estimates: Mapping[str, Tensor]) -> dict[str, float]:
    """Of what each estimate has seen: the trace, but for what the low rank leaves."""
    return {name: float(value.sum()) for name, value in estimates.items() if ", eigenvalues of" in name}


ANY_OPTIMIZER = {
    "SGD": {"type": "SGD", "params": {"lr": 30.0}},
    "AdamW": {"type": "AdamW", "params": {"lr": 0.3, "weight_decay": 0.0, "torch_adam": True}},
}
"""Without natural gradients, at rates that go too far."""


def assert_is_limited(free: Mapping[str, Tensor], limited: Mapping[str, Tensor]) -> None:
    """The same first update, without limits and with those of ``"max_change": {}``."""
    squares: dict[str, float] = {}
    for name, change in free.items():
        layer = name.rpartition(".")[0]
        squares[layer] = squares.get(layer, 0.0) + float(change.double().square().sum())
    factors = {
        layer: min(1.0, (1.5 if layer == "lm_head" else 0.75) / square**0.5) if square else 1.0
        for layer, square in squares.items()
    }
    total = sum(square * factors[layer] ** 2 for layer, square in squares.items()) ** 0.5
    assert any(factor < 1 for factor in factors.values())
    assert total > 2
    for name, change in free.items():
        wanted = change * (factors[name.rpartition(".")[0]] * 2 / total)
        torch.testing.assert_close(limited[name], wanted, rtol=1e-4, atol=1e-6, msg=name)


def assert_limited(changes: Mapping[str, Tensor], report: Mapping[str, float]) -> None:
    """A step's change of each parameter obeys the limits that ``"max_change": {}`` stands for."""
    layers: dict[str, float] = {}
    for name, change in changes.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0.0) + float(change.double().square().sum())
    assert max(square**0.5 for layer, square in layers.items() if layer != "lm_head") <= 0.75 + 1e-5
    assert layers["lm_head"] ** 0.5 <= 1.5 + 1e-5
    total = sum(layers.values()) ** 0.5
    assert total <= 2 + 1e-5
    assert report["norm"] == pytest.approx(total, rel=1e-4)
    assert report["num_limited"] > 0
