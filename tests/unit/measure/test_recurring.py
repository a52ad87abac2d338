"""The average of what repeats."""

from __future__ import annotations

import random

import pytest

from paceline.measure.recurring import recurring_mean, without_once


def test_what_comes_again_counts_and_what_comes_once_does_not() -> None:
    assert recurring_mean([1.0, 2.0, 1.0, 2.0]) == 1.5
    assert recurring_mean([1.0, 9.0, 1.0]) == 1.0
    assert recurring_mean([1.0, 9.0, 1.0, 8.0]) == 4.75
    assert recurring_mean([4.0]) == 4.0
    assert recurring_mean([0.0, 0.0]) == 0.0


def test_one_is_left_out_at_most_whatever_it_is_the_value_of() -> None:
    assert without_once(["aaaa", "a", "aaaaaaaaaaaaaaaa"], len) == ["a", "aaaa"]
    assert without_once(["aa"], len) == ["aa"]


def test_noise_leaves_nothing_out() -> None:
    chance = random.Random(1)
    for _ in range(200):
        values = [chance.uniform(0.9, 1.1) for _ in range(8)]
        assert recurring_mean(values) == pytest.approx(sum(values) / 8)
