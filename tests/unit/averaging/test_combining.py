"""The final model, from those of the last rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.averaging.combining import RunningMean, fit_weights


def model(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), ())]


def test_running_mean() -> None:
    running = RunningMean(3)
    for number in range(1, 6):
        given = model(number)
        running.add(given)
        given[1].zero_()  # it has its own copy
        last = [model(seed) for seed in range(max(1, number - 2), number + 1)]
        assert len(running) == len(last)
        for mean, *same in zip(running.mean(), *last, strict=True):
            assert mean.dtype == torch.float32
            torch.testing.assert_close(mean, torch.stack(same).mean(0))
    copy = RunningMean(3)
    copy.load_state_dict(running.state_dict())
    assert all(map(torch.equal, copy.mean(), running.mean()))
    one = RunningMean(1)
    one.add(model(0))
    assert all(map(torch.equal, one.mean(), model(0)))


def test_a_short_period_counts_by_its_share() -> None:
    """Of two periods: a quarter, a whole one, and three quarters of the oldest; of one that is whole, that."""
    running = RunningMean(2)
    for number in range(4):
        running.add(model(number))
    running.add(model(4), 0.25)
    assert running.weights() == [0.375, 0.5, 0.125]
    two, three, four = (model(number) for number in (2, 3, 4))
    for mean, a, b, c in zip(running.mean(), two, three, four, strict=True):
        torch.testing.assert_close(mean, 0.375 * a + 0.5 * b + 0.125 * c)
    copy = RunningMean(2)
    copy.load_state_dict(running.state_dict())
    assert copy.weights() == running.weights()
    copy.load_state_dict({"models": [two, three]})  # of a version that had whole periods only
    assert copy.weights() == [0.5, 0.5]
    one = RunningMean(1)
    one.add(model(0))
    one.add(model(1), 0.25)
    assert one.weights() == [0.75, 0.25]


@settings(max_examples=20)
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_fitted_weights_lose_least(number: int, seed: int) -> None:
    """Of a quadratic, as losses near a minimum are: next to the best of many, and never worse than a start."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randn(number, 4, generator=generator).double()
    asked: list[Sequence[float]] = []

    def loss(weights: Sequence[float]) -> float:
        asked.append(weights)
        return float((torch.tensor(weights, dtype=torch.float64) @ offsets).square().sum())

    start = [1 / number] * number
    weights, least = fit_weights(loss, start)
    assert len(asked) <= 2 + 3 * 3 * number
    assert all(min(each) >= 0 and math.isclose(sum(each), 1) for each in asked)
    assert least == loss(weights) <= min(loss(start), loss([0.0] * (number - 1) + [1.0]))
    samples = torch.distributions.Dirichlet(torch.full((number,), 0.5)).sample((500,)).double()
    best = float((samples @ offsets).square().sum(-1).min())
    spread = float(offsets.square().sum(-1).max())
    assert least <= best + 0.05 * spread


def test_fitted_weights_of_a_known_minimum() -> None:
    found, least = fit_weights(lambda w: (w[0] - 0.2) ** 2 + (w[1] - 0.3) ** 2 + 1.0, [1 / 3, 1 / 3, 1 / 3])
    assert found == pytest.approx([0.2, 0.3, 0.5], abs=0.02)
    assert least == pytest.approx(1.0, abs=1e-3)


def test_a_model_that_is_not_finite_gets_no_weight() -> None:
    found, least = fit_weights(lambda w: math.nan if w[0] > 0 else 1.0 - w[1], [0.25, 0.25, 0.5])
    assert found == [0.0, 1.0, 0.0]
    assert least == 0.0


def test_one_model_has_all_the_weight() -> None:
    assert fit_weights(lambda w: 3.0, [1.0]) == ([1.0], 3.0)
