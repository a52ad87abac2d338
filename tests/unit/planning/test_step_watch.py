"""Steps that have become shorter or longer are noticed; single ones, and noise, are not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.planning.step_watch import StepWatch


def watched(*seconds: float) -> StepWatch:
    watch = StepWatch()
    for each in seconds:
        watch.add(each)
    return watch


@pytest.mark.parametrize("then", [1.3, 0.7, 5.0])
def test_two_steps_in_a_row(then: float) -> None:
    assert not watched(9.0, 1.0, 1.0, 1.0, 1.0, then).has_changed
    assert watched(9.0, 1.0, 1.0, 1.0, 1.0, then, then).has_changed


def test_neither_single_steps_nor_noise_nor_milliseconds() -> None:
    assert not watched(1.0, 1.0, 1.0, 1.0, 5.0, 1.0, 5.0, 1.0, 5.0).has_changed
    assert not watched(1.0, 1.0, 1.0, 1.0, 1.5, 0.5, 1.5, 0.5).has_changed
    chance = random.Random(0)
    assert not watched(*(1 + 0.15 * chance.uniform(-1, 1) for _ in range(1000))).has_changed
    assert not watched(1e-3, 1e-3, 1e-3, 1e-3, 5e-3, 5e-3, 5e-3).has_changed


def test_noise_of_any_size_seldom_looks_like_a_change() -> None:
    for deviation in (0.1, 0.2, 0.3):
        chance, watch, alarms = random.Random(1), StepWatch(), 0
        for step in range(1000):
            watch.add(max(0.05, chance.gauss(1.0, deviation)))
            if watch.has_changed or step % 100 == 99:
                alarms += watch.has_changed
                watch.planned(switched=False)
        assert alarms <= 5, deviation


def test_steps_of_other_sizes_take_times_in_proportion() -> None:
    watch = StepWatch()
    for step in range(40):
        size = 1000 * (1 + step % 3)
        watch.add(1e-3 * size, size)
    assert not watch.has_changed
    watch.add(3.0, 2000)
    watch.add(1.5, 1000)
    assert watch.has_changed


def test_a_planning_that_changes_nothing_leaves_what_is_usual() -> None:
    watch = watched(1.0, 1.0, 1.0, 1.0)
    watch.planned(switched=False)
    watch.add(2.0)
    watch.add(2.0)
    assert watch.has_changed, "although there were no four steps since"


def test_a_slow_drift_is_usual() -> None:
    assert not watched(*(1 + 0.005 * step for step in range(200))).has_changed


def test_a_planning_makes_the_new_steps_usual() -> None:
    watch = watched(1.0, 1.0, 1.0, 1.0, 2.0, 2.0)
    assert watch.has_changed
    watch.planned(switched=True)
    for _ in range(20):
        watch.add(2.0)
    assert not watch.has_changed
    watch.add(1.0)
    watch.add(1.0)
    assert watch.has_changed


def test_after_changes_that_led_to_nothing_it_looks_less_often() -> None:
    watch, alarms = StepWatch(), []
    for step in range(200):
        watch.add(1.0 if step // 8 % 2 else 2.0)
        if watch.has_changed:
            alarms.append(step)
            watch.planned(switched=False)
    gaps = [b - a for a, b in pairwise(alarms)]
    assert gaps == sorted(gaps)
    assert len(alarms) < 8
