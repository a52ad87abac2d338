"""Affine layers with natural gradients and limited changes: against Kaldi, and against rows divided one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.optim import AffineNaturalGradient, OnlineNaturalGradient, max_change_factors

KALDI = Path(__file__).parent / "kaldi" / "affine" / "mixed.npz"


def joined(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight, bias.unsqueeze(-1)], -1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


class Component:
    """One of Kaldi's, and ours beside it."""

    def __init__(self, kaldi: dict[str, Any], number: int, dtype: torch.dtype) -> None:
        self.kaldi, self.dtype = {k[3:]: v for k, v in kaldi.items() if k.startswith(f"c{number}_")}, dtype
        ranks = {side: int(self.kaldi[side]) for side in ("rank_in", "rank_out")}
        options = {name: self.kaldi[name].item() for name in ("alpha", "update_period", "num_samples_history")}
        self.layer = AffineNaturalGradient(
            int(self.kaldi["Din"]),
            int(self.kaldi["Dout"]),
            **{side: None if rank < 0 else rank for side, rank in ranks.items()},
            **options,
        )
        self.parameters = self.of("W0", "b0")

    def of(self, weight: str, bias: str, index: Any = ...) -> Tensor:
        return joined(*(torch.from_numpy(self.kaldi[name][index]).to(self.dtype) for name in (weight, bias)))

    def proposed(self, call: int) -> Tensor:
        x, dy = (torch.from_numpy(self.kaldi[name][call]).to(self.dtype) for name in ("X", "dY"))
        weight, bias = self.layer.gradients(x, dy)
        assert bias is not None
        return float(self.kaldi["lr"]) * joined(weight, bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_follows_kaldi(dtype: torch.dtype) -> None:
    """Changes before the limits, parameters after them, and how often which limit acted."""
    with np.load(KALDI) as opened:
        kaldi = dict(opened)
    components = [Component(kaldi, number, dtype) for number in range(3)]
    limits = torch.tensor([float(one.kaldi["max_change"]) for one in components])
    total = float(kaldi["max_param_change"])
    steps, limited = kaldi["steps"].tolist(), np.zeros(4, int)
    for call in range(len(kaldi["n_global_applied"])):
        changes = [one.proposed(call) for one in components]
        norms = torch.stack([change.norm() for change in changes])
        factors, norm = max_change_factors(norms, limits, total)
        before, _ = max_change_factors(norms, limits)
        limited[:3] += (before < 1).numpy()
        limited[3] += bool((factors < before).all())
        assert norm <= total * (1 + 1e-6)
        for number, (one, change) in enumerate(zip(components, changes, strict=True)):
            one.parameters = one.parameters + factors[number].to(dtype) * change
            assert float(norms[number]) == pytest.approx(one.kaldi["delta_norm"][call], rel=1e-4)
            if call in steps:
                tolerance = max(2e-5, 5 * one.kaldi["noise_delta"][call])
                assert relative(change, one.of("dW", "db", steps.index(call))) <= tolerance
                assert relative(one.parameters, one.of("W", "b", steps.index(call))) <= 1e-5
        assert limited[:3].tolist() == kaldi["n_percomp_applied"][call].tolist()
        assert limited[3] == kaldi["n_global_applied"][call]
    assert limited.all() or limits[limited[:3] == 0].eq(0).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("streams", [(), (2,)])
def test_equals_rows_that_are_divided_one_by_one(bias: bool, streams: tuple[int, ...]) -> None:
    layer = AffineNaturalGradient(9, 12, bias)
    inputs, outputs = (OnlineNaturalGradient(rank, update_period=4) for rank in (5, 6))
    for call in range(16):
        generator = torch.Generator().manual_seed(call)
        x = torch.randn(*streams, 30, 9, generator=generator, dtype=torch.float64) + 0.5
        dy = torch.randn(*streams, 30, 12, generator=generator, dtype=torch.float64)
        rows = torch.cat([x, torch.ones_like(x[..., :1])], -1) if bias else x
        (x_hat, scale), (dy_hat, other) = inputs.precondition(rows), outputs.precondition(dy)
        wanted = (scale * other)[..., None, None] * (dy_hat.mT @ x_hat)
        weight, of_bias = layer.gradients(x, dy)
        torch.testing.assert_close(weight, wanted[..., :9], rtol=1e-9, atol=1e-9)
        assert (of_bias is None) == (not bias)
        if of_bias is not None:
            torch.testing.assert_close(of_bias, wanted[..., 9], rtol=1e-9, atol=1e-9)


def test_single_inputs_and_outputs_are_not_divided() -> None:
    layer = AffineNaturalGradient(1, 1, bias=False)
    x, dy = torch.ones(3, 1), torch.full((3, 1), 2.0)
    weight, bias = layer.gradients(x, dy)
    assert weight.tolist() == [[6.0]]
    assert bias is None


@pytest.mark.parametrize(
    ("norms", "limits", "total", "factors", "norm"),
    [
        ([3.0, 4.0], [0.0, 0.0], 0.0, [1.0, 1.0], 5.0),
        ([3.0, 4.0], [1.5, 8.0], 0.0, [0.5, 1.0], (1.5**2 + 16) ** 0.5),
        ([3.0, 4.0], [0.0, 0.0], 2.5, [0.5, 0.5], 2.5),
        ([6.0, 4.0], [3.0, 0.0], 2.5, [0.25, 0.5], 2.5),
        ([0.0, 0.0], [1.0, 1.0], 1.0, [1.0, 1.0], 0.0),
    ],
)
def test_changes_are_limited_each_and_together(
    norms: list[float], limits: list[float], total: float, factors: list[float], norm: float
) -> None:
    found, left = max_change_factors(torch.tensor(norms), torch.tensor(limits), total)
    assert found.tolist() == pytest.approx(factors)
    assert float(left) == pytest.approx(norm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("limit", [0.0, 0.75])
@pytest.mark.parametrize("total", [0.0, 2.0])
def test_a_change_that_is_not_finite_is_told(value: float, limit: float, total: float) -> None:
    """Which Kaldi does not with a limit: there the step of that layer becomes zeros times infinity."""
    _, norm = max_change_factors(torch.tensor([1.0, value]), torch.tensor([0.75, limit]), total)
    assert not norm.isfinite()
