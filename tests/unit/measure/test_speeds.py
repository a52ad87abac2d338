"""A number followed through noise, and at once to another level."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.speeds import Speeds

positive = st.floats(1e-6, 1e6)
looks = st.lists(st.lists(positive, max_size=6), min_size=1, max_size=12)


def follow(found: list[list[float]], **options: float) -> tuple[float, list[int]]:
    """Where one number ends up, and at which looks its level changed."""
    speeds = Speeds(1, **options)  # type: ignore[arg-type]
    changed = [look for look, values in enumerate(found) if speeds.update([values])]
    return speeds.values[0], changed


@given(positive, st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any))
def test_what_is_constant_is_itself(value: float, steps: list[int]) -> None:
    assert follow([[value] * num for num in steps]) == (pytest.approx(value), [])


@given(looks, st.sampled_from([2.0**n for n in range(-8, 9)]))
def test_other_units_change_nothing_else(found: list[list[float]], unit: float) -> None:
    value, changed = follow(found)
    scaled = follow([[v * unit for v in values] for values in found])
    assert scaled == (pytest.approx(value * unit), changed)


@given(looks)
def test_the_mean_is_within_what_was_seen_since_the_level_changed(found: list[list[float]]) -> None:
    _, changed = follow(found)
    begin = changed[-1] if changed else 0
    value, _ = follow(found)
    # The trailing run at a change may reach into the look before, by less than what confirms it.
    earlier = [v for values in found[:begin] for v in values][-2:]
    seen = [*earlier, *(v for values in found[begin:] for v in values)]
    if not seen:
        assert value == 0.0
    else:
        assert min(seen) * (1 - 1e-9) <= value <= max(seen) * (1 + 1e-9)


@pytest.mark.parametrize("period", [20, 100])
def test_noise_of_ten_percent_is_no_other_level(period: int) -> None:
    for seed in range(100):
        draw = random.Random(seed)
        value, changed = follow([[draw.uniform(0.9, 1.1) for _ in range(period)] for _ in range(10)])
        assert changed == []
        assert value == pytest.approx(1.0, abs=0.05)


def test_noise_is_averaged_over_looks() -> None:
    value, changed = follow([[1.1], [0.9], [1.1], [0.9], [1.1], [0.9], [1.1], [0.9]])
    assert changed == []
    assert value == pytest.approx(1.0, abs=0.025)


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.2, 1 / 1.2])
def test_a_level_that_changed_two_steps_ago_is_seen_at_once(factor: float) -> None:
    assert follow([[1.0] * 100, [1.0] * 98 + [factor] * 2]) == (pytest.approx(factor), [1])


@given(st.integers(0, 10_000), st.sampled_from([2.0, 0.5]), st.integers(2, 50))
def test_in_noise_too(seed: int, factor: float, since: int) -> None:
    draw = random.Random(seed)
    steps = [factor ** (step >= 350 - since) * draw.uniform(0.95, 1.05) for step in range(350)]
    value, changed = follow([steps[:100], steps[100:200], steps[200:300], steps[300:]])
    assert changed == [3]
    assert value == pytest.approx(factor, rel=0.06)


def test_one_step_that_is_off_is_no_other_level() -> None:
    assert follow([[1.0] * 10, [1.0] * 9 + [5.0], [5.0] + [1.0] * 9]) == (1.0, [])
    # Two that are off in opposite directions neither.
    assert follow([[1.0] * 10, [1.0] * 8 + [5.0, 0.2]]) == (1.0, [])


def test_the_steps_that_confirm_may_be_of_two_looks() -> None:
    assert follow([[1.0] * 4, [1.0, 1.0, 2.0], [2.0]]) == (pytest.approx(2.0), [2])


def test_a_device_that_slows_and_recovers() -> None:
    assert follow([[1.0] * 10, [1.0] * 5 + [2.0] * 5, [2.0] * 10, [2.0] * 7 + [1.0] * 3]) == (1.0, [1, 3])


def test_a_run_may_begin_slowly_or_change_in_its_first_look() -> None:
    assert follow([[9.0, 3.0, 1.0, 1.0, 1.0, 0.95]]) == (1.0, [])
    assert follow([[1.0] * 20 + [2.0, 2.2]]) == (pytest.approx(2.1), [])
    assert follow([[9.0] * 20 + [1.0, 1.0], [1.0] * 20]) == (1.0, [])


def test_between_changes_the_mean_is_weighted() -> None:
    looks = [[1.0], [1.1], [1.0], [1.1]]
    mean = (1.0 + 1.1) / 2  # at the second look
    mean += 1 / 3 * (1.0 - mean)
    mean += 0.3 * (1.1 - mean)
    assert follow(looks)[0] == pytest.approx(mean)
    assert follow(looks, weight=1.0)[0] == 1.1


def test_stages_are_followed_on_their_own() -> None:
    speeds = Speeds(3)
    assert speeds.values == (0.0, 0.0, 0.0)
    assert speeds.update([[1.0, 1.0], [4.0], []]) == ()
    assert speeds.update([[3.0, 3.0], [], []]) == (0,)
    assert speeds.values == (3.0, 4.0, 0.0)


def test_steps_that_were_not_measured_are_left_out() -> None:
    assert follow([[1.0, 0.0, 1.0], [0.0, 0.0], [float("nan"), float("inf"), 1.0]]) == (1.0, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, "num_stages is 0"),
        ({"weight": 0.0}, "weight is 0.0: it must be above 0"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"jump": 0.0}, "jump is 0.0"),
        ({"confirm": 0}, "confirm is 0"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Speeds(**{"num_stages": 1, **options})  # type: ignore[arg-type]


def test_values_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="values of 1 stages: give one sequence for each of 2"):
        Speeds(2).update([[1.0]])
    with pytest.raises(ValueError, match=r"a value is -1\.0"):
        Speeds(1).update([[-1.0]])
