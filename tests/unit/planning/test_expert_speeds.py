"""Speeds of ranks, told apart from the number of tokens that each gets."""

from __future__ import annotations

import random

import pytest

from paceline.planning.expert_speeds import UNEQUAL, SpeedsInAgreement, rank_speeds

ROWS = [[400.0, 120.0, 60.0], [100.0, 300.0, 80.0], [30.0, 60.0, 500.0], [200.0, 200.0, 40.0]]


def seconds(slowness: list[float], rows: list[list[float]] = ROWS, noise: float = 0.0) -> list[list[float]]:
    chance = random.Random(1)
    return [
        [slow * (0.01 + 2e-4 * row) * (1 + noise * chance.uniform(-1, 1)) for row in of_rank]
        for slow, of_rank in zip(slowness, rows, strict=True)
    ]


@pytest.mark.parametrize("slowness", [[1, 2, 4, 4], [3, 1, 1, 1], [1, 1, 1, UNEQUAL * 1.1]])
def test_ratios_of_speeds_are_found_beside_what_a_layer_takes_without_rows(slowness: list[float]) -> None:
    found = rank_speeds(ROWS, seconds(slowness, noise=0.02))
    assert found is not None
    assert [found[0] / speed for speed in found] == pytest.approx([slow / slowness[0] for slow in slowness], rel=0.1)


def test_a_rank_with_few_rows_is_not_slow() -> None:
    """A row takes longer there, since what a layer takes anyway is shared by fewer."""
    assert rank_speeds(ROWS, seconds([1, 1, 1, 1], noise=0.1)) is None
    assert rank_speeds([[1000.0], [10.0]], [[0.21], [0.012]]) is None


def test_a_rank_with_fewer_rows_that_takes_longer_is_slow() -> None:
    found = rank_speeds([[100.0], [20.0]], [[0.1], [0.2]])
    assert found is not None
    assert found[0] / found[1] >= 2


def test_what_a_single_layer_says_is_no_speed() -> None:
    compute_s = seconds([1, 1, 1, 1])
    compute_s[1][2] *= 20
    assert rank_speeds(ROWS, compute_s) is None


def test_one_rank_and_ranks_without_rows_have_no_speeds() -> None:
    assert rank_speeds([[10.0]], [[1.0]]) is None
    assert rank_speeds([[10.0], [0.0]], [[1.0], [0.5]]) is None


def test_what_is_known_stays_where_rows_go_by_it_and_ends_with_its_cause() -> None:
    """Rows by speed take as long on all ranks: alone that could be equal ranks whose rows cost nothing."""
    slowness = [1.0, 2.0, 4.0, 4.0]
    rows = [[200.0 / slow] * 2 for slow in slowness]
    compute_s = [[slow * 2e-4 * row for row in of_rank] for slow, of_rank in zip(slowness, rows, strict=True)]
    assert rank_speeds(rows, compute_s) is None
    found = rank_speeds(rows, compute_s, [1 / slow for slow in slowness])
    assert found is not None
    assert [found[0] / speed for speed in found] == pytest.approx(slowness, rel=0.05)
    equal_s = [[2e-4 * row for row in of_rank] for of_rank in rows]
    assert rank_speeds(rows, equal_s, [1 / slow for slow in slowness]) is None


def test_two_intervals_must_agree() -> None:
    agreed = SpeedsInAgreement()
    agreed.add([2.0, 0.5])
    assert agreed.speeds is None
    agreed.add([2.0, 0.5])
    assert agreed.speeds == pytest.approx([2.0, 0.5])
    agreed.add(None)
    assert agreed.speeds == pytest.approx([2.0, 0.5])
    agreed.add(None)
    assert agreed.speeds is None
