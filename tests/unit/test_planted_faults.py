"""The faults that are planted to try the tests (tests/benchmarks/planted_faults.py) still fit the code."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.planting.faults import FAULTS, Fault
from benchmarks.planting.mutants import PACKAGES, changes, random_faults

REPOSITORY = Path(__file__).resolve().parents[2]


def test_there_are_thirty_all_over_the_package() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 30
    assert len({fault.file for fault in FAULTS}) >= 25
    assert len({fault.file.partition("/")[0] for fault in FAULTS}) >= 8


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Fault) -> None:
    text = (REPOSITORY / fault.path).read_text()
    planted = fault.plant(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


def test_what_is_not_there_once_is_refused() -> None:
    fault = Fault("no name", "a.py", "x", "y", "nothing")
    assert fault.plant("a x b") == "a y b"
    with pytest.raises(ValueError, match=r"integration/paceline/a.py has 'x' 2 times.*there once"):
        fault.plant("x x")


def test_faults_are_drawn_from_all_packages_alike() -> None:
    faults = random_faults(REPOSITORY, 32, seed=1)
    assert faults == random_faults(REPOSITORY, 32, seed=1) != random_faults(REPOSITORY, 32, seed=2)
    assert len({fault.name for fault in faults}) == 32
    assert Counter(fault.file.partition("/")[0] for fault in faults) == dict(
        zip(PACKAGES, (7, 7, 6, 6, 6), strict=True)
    )
    for fault in faults:
        test_it_can_be_planted(fault)


def test_what_may_be_changed() -> None:
    text = b"""
import numpy


def pick(values: "list[int]", most: int = 3) -> bool:
    '''Text with 1 > 0.'''
    if not values and most >= 2:
        raise ValueError(f"{most + 1} is 1 too much")
    logger.info("%d", most - 1)
    values.sort()
    return min(values) == most * 2
"""
    assert [(one.line, text[one.start : one.stop].decode(), one.new) for one in changes(text)] == [
        (7, "not values and most >= 2", "not (not values and most >= 2)"),
        (7, "and", "or"),
        (7, ">=", ">"),
        (7, "2", "3"),
        (10, "values.sort()", "pass"),
        (11, "==", "!="),
        (11, "min", "max"),
        (11, "*", "+"),
        (11, "2", "3"),
    ]
