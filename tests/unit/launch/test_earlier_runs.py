"""What an earlier run left in an output directory."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.format import LATEST
from paceline.launch.earlier_runs import remove_earlier_run
from paceline.measure.profile_file import FILE_NAME


def test_a_run_that_starts_over_keeps_no_profile_of_the_earlier_one(tmp_path: Path) -> None:
    for name in (LATEST, FILE_NAME, "notes.txt"):
        (tmp_path / name).write_text("old")
    remove_earlier_run(tmp_path)
    remove_earlier_run(tmp_path)  # there may be none
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
