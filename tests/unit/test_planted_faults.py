"""The faults that are planted to try the tests (tests/benchmarks/planted_faults.py) still fit the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.planting.faults import FAULTS, Fault

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
