"""The fast tier has every capability of the front page, and says so when a test that it names is gone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiers import CAPABILITIES, entries, missing

REPOSITORY = Path(__file__).resolve().parents[2]


def rows_of_the_front_page() -> list[str]:
    table = (REPOSITORY / "README.md").read_text().partition("## What it can do")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:]


def test_every_capability_of_the_front_page_is_in_it() -> None:
    rows = rows_of_the_front_page()
    assert len(rows) >= 16
    assert [row for row in rows if not any(row.startswith(name) for name in CAPABILITIES)] == []


def test_files_that_it_names_are_there() -> None:
    assert [entry for entry in entries() if not (REPOSITORY / entry.partition("::")[0]).exists()] == []


def test_the_command_prints_them() -> None:
    command = [sys.executable, str(REPOSITORY / "tests" / "support" / "tiers.py")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines() == entries()


@pytest.mark.parametrize("asked", ["tests", "tests/distributed", "tests/distributed/test_schedules.py"])
def test_what_was_asked_for_and_is_gone_is_named(asked: str) -> None:
    [entry] = [entry for entry in entries() if "test_schedules.py" in entry]
    others = [other for other in entries() if other != entry]
    files = [f"{other}/test_x.py::test_y" if other.startswith("tests/unit") else other for other in others]
    assert entry in missing([*files, "tests/distributed/test_schedules.py::test_other"], [asked])
    assert entry not in missing([*files, entry], [asked])
    assert missing([], ["tests/lab", f"{asked}::test_other"]) == []
