"""The natural gradient of rows: against Kaldi's own results, against explicit inverses, and what must always hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.optim import AffineNaturalGradient, OnlineNaturalGradient, simple_natural_gradient
from paceline.optim.natural_gradient import Estimate

KALDI = sorted((Path(__file__).parent / "kaldi").glob("*.npz"))


def rows(num: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of unequal directions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, dim, generator=generator, dtype=torch.float64) * torch.linspace(2, 0.1, dim).double()
    return x.to(dtype)


def learned(estimate: OnlineNaturalGradient) -> Estimate:
    assert estimate.learned is not None
    return estimate.learned


def moment_of(estimate: OnlineNaturalGradient) -> Tensor:
    basis, eigenvalues, rho, _ = learned(estimate)
    return basis.double().mT @ torch.diag(eigenvalues) @ basis.double() + rho * torch.eye(basis.shape[-1]).double()


def relative(found: Any, wanted: Any) -> float:
    difference = float(np.linalg.norm(np.asarray(found) - np.asarray(wanted)))
    return difference and difference / float(np.linalg.norm(np.asarray(wanted)))


# -- Kaldi -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("file", KALDI, ids=[file.stem for file in KALDI])
def test_follows_kaldi(file: Path, dtype: torch.dtype) -> None:
    with np.load(file) as opened:
        kaldi = dict(opened)
    names = ("alpha", "num_samples_history", "num_minibatches_history", "update_period")
    estimate = OnlineNaturalGradient(int(kaldi["rank"]), **{name: kaldi[name].item() for name in names})
    noise = kaldi["noise_xhat"] * (5 if kaldi["N"][0] < kaldi["rank_effective"] else 1)
    ends = kaldi["n_rows"].cumsum()
    kept = {step: slice(end - n, end) for step, end, n in zip(kaldi["steps"], ends, kaldi["n_rows"], strict=True)}
    for step, x in enumerate(np.split(kaldi["X"], kaldi["N"].cumsum()[:-1])):
        estimate.frozen = bool(kaldi["frozen"][step])
        x_hat, scale = estimate.precondition(torch.from_numpy(x).to(dtype))
        assert x_hat.dtype == scale.dtype == dtype
        exact = dtype == torch.float64
        tolerance = 2e-6 if exact else max(2e-5, noise[step])
        assert relative(scale, kaldi["scale"][step]) <= (2e-6 if exact else max(2e-5, kaldi["noise_scale"][step]))
        if step in kept:
            part = kept[step]
            assert relative(x_hat[kaldi["rows"][part]], kaldi["X_hat"][part]) <= tolerance, step
        if exact:
            assert relative(learned(estimate).rho, kaldi["rho"][step]) <= 1e-6
            assert relative(learned(estimate).eigenvalues, kaldi["d"][step]) <= 1e-6
    assert estimate.num_calls == len(kaldi["N"])


# -- what always holds -------------------------------------------------------------------------------------------------


def test_rows_are_divided_by_the_smoothed_estimate() -> None:
    """F as it was before the call, with alpha of its mean eigenvalue added."""
    estimate = OnlineNaturalGradient(4, alpha=2.0)
    estimate.precondition(rows(30, 9))
    moment, x = moment_of(estimate), rows(20, 9, seed=1)
    x_hat, scale = estimate.precondition(x)
    wanted = x @ torch.linalg.inv(moment + 2.0 / 9 * moment.trace() * torch.eye(9).double())
    wanted *= x.norm() / wanted.norm()
    torch.testing.assert_close(scale * x_hat, wanted, rtol=1e-12, atol=1e-12)


def test_the_estimate_keeps_the_trace_of_what_it_has_seen() -> None:
    estimate = OnlineNaturalGradient(5, num_samples_history=100.0)
    estimate.precondition(rows(40, 12))
    before, x = moment_of(estimate), rows(60, 12, seed=1)
    estimate.precondition(x)
    eta = 1 - np.exp(-60 / 100)
    wanted = eta * (x.square().sum() / 60) + (1 - eta) * before.trace()
    torch.testing.assert_close(moment_of(estimate).trace(), wanted, rtol=1e-12, atol=0)
    basis = learned(estimate).basis
    torch.testing.assert_close(basis @ basis.mT, torch.eye(5).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_stays(dtype: torch.dtype) -> None:
    estimate = OnlineNaturalGradient(3)
    for seed in range(4):
        x = rows(10, 8, seed, dtype)
        x_hat, scale = estimate.precondition(x)
        assert x_hat.dtype == dtype
        assert float((scale * x_hat).norm()) == pytest.approx(
            float(x.norm()), rel=1e-2 if dtype.itemsize == 2 else 1e-6
        )


def test_a_factor_of_all_rows_changes_nothing() -> None:
    one, other = OnlineNaturalGradient(3), OnlineNaturalGradient(3)
    for seed in range(5):
        x = rows(10, 8, seed)
        (x_hat, scale), (times, same) = one.precondition(x), other.precondition(1000 * x)
        torch.testing.assert_close(times, 1000 * x_hat, rtol=1e-5, atol=1e-6)  # but for EPSILON
        assert float(same) == pytest.approx(float(scale), rel=1e-6)


def test_with_much_of_the_identity_nothing_is_done() -> None:
    estimate = OnlineNaturalGradient(3, alpha=1e12)
    for seed in range(3):
        x = rows(10, 8, seed)
        x_hat, scale = estimate.precondition(x)
        torch.testing.assert_close(scale * x_hat, x, rtol=1e-9, atol=1e-9)


def test_zeros_give_zeros() -> None:
    estimate = OnlineNaturalGradient(3)
    for x in (torch.zeros(4, 8), rows(4, 8, dtype=torch.float32), torch.zeros(4, 8)):
        x_hat, scale = estimate.precondition(x)
        assert x_hat.isfinite().all()
        if not x.any():
            assert not x_hat.any()
            assert scale == 1


def test_single_columns_are_left_alone() -> None:
    estimate = OnlineNaturalGradient(3)
    x = rows(4, 1)
    x_hat, scale = estimate.precondition(x)
    assert torch.equal(x_hat, x)
    assert scale == 1
    assert estimate.num_calls == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("when", [0, 2])
def test_rows_that_are_not_finite_are_not_learned_from(value: float, when: int) -> None:
    """As where a loss scale was too large: the step is left out, and the next is as good as ever."""
    estimate = OnlineNaturalGradient(3)
    for seed in range(when):
        estimate.precondition(rows(10, 8, seed))
    before = estimate.learned
    bad = rows(10, 8, 7)
    bad[3, 2] = value
    estimate.precondition(bad)
    assert all(tensor.isfinite().all() for tensor in learned(estimate))
    if before is not None:
        assert all(torch.equal(*pair) for pair in zip(learned(estimate), before, strict=True))
    x_hat, scale = estimate.precondition(rows(10, 8, 8))
    assert (scale * x_hat).isfinite().all()


def test_the_dtype_may_change() -> None:
    estimate = OnlineNaturalGradient(3)
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float64)):
        x_hat, scale = estimate.precondition(rows(10, 8, seed, dtype))
        assert x_hat.dtype == dtype
        assert (scale * x_hat).isfinite().all()


def test_streams_side_by_side_are_each_their_own() -> None:
    together, alone = OnlineNaturalGradient(4), [OnlineNaturalGradient(4) for _ in range(6)]
    for step in range(4):
        x = torch.stack([rows(16, 10, 10 * step + stream) * (stream + 1) for stream in range(6)]).view(2, 3, 16, 10)
        x_hat, scale = together.precondition(x)
        assert scale.shape == (2, 3)
        for stream, estimate in enumerate(alone):
            wanted, wanted_scale = estimate.precondition(x.view(6, 16, 10)[stream])
            torch.testing.assert_close(x_hat.view(6, 16, 10)[stream], wanted, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(scale.view(6)[stream], wanted_scale, rtol=1e-9, atol=0)


def test_the_estimate_is_updated_when_its_turn_is() -> None:
    estimate = OnlineNaturalGradient(3, update_period=4)
    changed = []
    for call in range(20):
        before = estimate.learned
        estimate.precondition(rows(10, 8, call))
        if before is None or not torch.equal(before.rho, learned(estimate).rho):
            changed.append(call)
    assert changed == [*range(11), 14, 18]


@pytest.mark.parametrize("calls", [0, 5])
def test_state_goes_on_where_it_was(calls: int) -> None:
    one, other = OnlineNaturalGradient(3, update_period=2), OnlineNaturalGradient(3, update_period=2)
    for seed in range(calls):
        one.precondition(rows(10, 8, seed))
    saved = one.state_dict()
    other.load_state_dict(saved)
    for seed in range(5, 20):
        (x_hat, scale), (same, same_scale) = one.precondition(rows(10, 8, seed)), other.precondition(rows(10, 8, seed))
        assert torch.equal(x_hat, same)
        assert torch.equal(scale, same_scale)


def test_an_estimate_of_another_rank_begins_anew() -> None:
    x = torch.randn(40, 12)
    before, now, wanted = OnlineNaturalGradient(8), OnlineNaturalGradient(3), OnlineNaturalGradient(3)
    before.precondition(x)
    now.load_state_dict(before.state_dict())
    found, expected = now.precondition(x), wanted.precondition(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert now.state_dict()["basis"].shape == (3, 12)
    most = OnlineNaturalGradient(100)
    most.precondition(x)
    again = OnlineNaturalGradient(100)
    again.load_state_dict(most.state_dict())
    assert again.num_calls == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0: give at least 1."),
        ({"rank": 3, "alpha": -1.0}, "alpha is -1.0: give 0 or more."),
        ({"rank": 3, "num_samples_history": 0.0}, "num_samples_history is 0.0: give between 0 and 1e6."),
        ({"rank": 3, "num_minibatches_history": 1.0}, "num_minibatches_history is 1.0: give more than 1, or 0"),
        ({"rank": 3, "update_period": 0}, "update_period is 0: give at least 1."),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnlineNaturalGradient(**options)


def test_other_rows_than_before_are_refused() -> None:
    estimate = OnlineNaturalGradient(3)
    estimate.precondition(rows(10, 8))
    for wrong in (rows(10, 9), rows(10, 8).view(2, 5, 8)):
        with pytest.raises(ValueError, match="make another OnlineNaturalGradient for them"):
            estimate.precondition(wrong)
    with pytest.raises(ValueError, match="at least one row"):
        estimate.precondition(rows(0, 8))


# -- the simple variant ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "dim"), [(20, 6), (6, 6), (5, 12), (2, 3)])
def test_simple_variant_equals_explicit_inverses(num: int, dim: int) -> None:
    """Of the second moment of all other rows, each on its own."""
    x, alpha = rows(num, dim), 0.3
    smoothing = alpha * x.square().sum() / (num * dim) * torch.eye(dim).double()
    wanted = torch.stack(
        [x[n] @ torch.linalg.inv(smoothing + (x.T @ x - torch.outer(x[n], x[n])) / (num - 1)) for n in range(num)]
    )
    x_hat, scale = simple_natural_gradient(x, alpha)
    assert relative(x_hat, wanted) <= 1e-10
    torch.testing.assert_close((scale * x_hat).norm(), x.norm(), rtol=1e-12, atol=0)
    both, scales = simple_natural_gradient(torch.stack([x, 2 * x]), alpha)
    torch.testing.assert_close(both[0], x_hat)
    assert scales.shape == (2,)


def test_simple_variant_at_its_edges() -> None:
    x = rows(1, 5)
    x_hat, scale = simple_natural_gradient(x)
    assert torch.equal(x_hat, x)
    assert scale == 1
    x_hat, scale = simple_natural_gradient(torch.zeros(4, 3))
    assert not x_hat.any()
    assert scale == 1
    with pytest.raises(ValueError, match=r"alpha is 0\.0: give more than 0"):
        simple_natural_gradient(x, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_is_divided_as_well_as_it_is_rounded(dtype: torch.dtype) -> None:
    """Where inputs have a large mean, divisions take away most of a gradient, and must not leave its rounding."""
    torch.manual_seed(0)
    wide, half = (AffineNaturalGradient(32, 16, alpha=1.0) for _ in range(2))
    mean = 30 * torch.randn(32)
    for _ in range(8):
        x, dy = (mean + torch.randn(64, 32)).to(dtype), torch.randn(64, 16).to(dtype)
        wanted, found = wide.gradients(x.float(), dy.float()), half.gradients(x, dy)
    for right, rounded in zip(wanted, found, strict=True):
        assert right is not None
        assert rounded is not None
        assert rounded.dtype == dtype
        assert (rounded.float() - right).norm() / right.norm() < torch.finfo(dtype).eps
