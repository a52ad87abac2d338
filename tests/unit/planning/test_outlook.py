"""Costs that may come: those that were, as often as they came and went."""

from __future__ import annotations

import pytest

from paceline.planning.outlook import CAUTION, MOST, outlook


def shares(seconds: list[float]) -> dict[int, float]:
    return {state.planning: state.share for state in outlook(seconds)}


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 1.05, 0.98, 1.02]])
def test_nothing_else_is_to_be_expected_where_nothing_has_changed(seconds: list[float]) -> None:
    assert outlook(seconds) == []


def test_another_state_comes_as_often_as_states_have_changed() -> None:
    assert shares([1.0, 2.0, 2.0, 2.0]) == {0: 1 / (3 + CAUTION)}
    assert shares([1.0, 1.0, 2.0, 1.0]) == {2: 2 / (3 + CAUTION)}


def test_a_change_that_did_not_last_is_forgotten_with_the_plannings_that_saw_it() -> None:
    assert outlook([1.0] * 8) == []


def test_states_count_by_how_often_they_were_there_and_the_newest_stands_for_its_like() -> None:
    found = shares([3.0, 2.0, 3.1, 3.05, 1.0])
    share = 3 / (4 + CAUTION)
    assert found == pytest.approx({3: min(share, MOST) * 3 / 4, 1: min(share, MOST) / 4})


def test_the_present_keeps_its_half() -> None:
    assert sum(shares([1.0, 2.0] * 4).values()) == MOST
