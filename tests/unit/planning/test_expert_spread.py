"""The expected load of the most loaded device, against loads that are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.planning.expert_spread import UNKNOWN_LOADS, expected_imbalance
from paceline.planning.experts import Placement


@pytest.mark.parametrize(("experts", "devices"), [(8, 2), (8, 8), (64, 8), (128, 64), (6, 4), (9, 2)])
@pytest.mark.parametrize("unevenness", [0.1, 0.5])
def test_it_is_the_mean_of_drawn_loads(experts: int, devices: int, unevenness: float) -> None:
    drawn = np.random.default_rng(0).normal(1.0, unevenness, (20_000, experts))
    # The loads of a layer have this mean and this deviation, not only on average.
    drawn -= drawn.mean(1, keepdims=True)
    drawn *= unevenness / drawn.std(1, keepdims=True)
    held = Placement.contiguous(experts, devices).devices
    on_device = np.stack([1.0 * len(own) + drawn[:, list(own)].sum(1) for own in held], 1)
    most = on_device.max(1) / on_device.mean(1)
    assert expected_imbalance(experts, devices, unevenness) == pytest.approx(most.mean(), rel=0.02)


def test_even_loads_are_those_of_the_fullest_device() -> None:
    assert expected_imbalance(8, 4, 0.0) == 1.0
    assert expected_imbalance(5, 3, 0.0) == pytest.approx(2 * 3 / 5)
    assert expected_imbalance(1, 2, 0.5) == 2.0


def test_what_is_assumed_is_what_the_document_says_and_less_than_a_trace_has() -> None:
    assert expected_imbalance(8, 2, UNKNOWN_LOADS) == pytest.approx(1.15, abs=0.005)
    assert expected_imbalance(128, 16, UNKNOWN_LOADS) == pytest.approx(1.31, abs=0.005)
    loads = np.load(Path(__file__).parents[2] / "golden" / "moe_trace.npz")["loads"]
    assert np.median(loads.std(-1) / loads.mean(-1)) > 1.9 > UNKNOWN_LOADS
