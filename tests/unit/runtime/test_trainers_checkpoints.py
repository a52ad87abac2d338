"""Checkpoints of Hugging Face's Trainer: a run goes on from the newest that was written to its end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers.trainer_callback import TrainerState

from paceline.runtime.trainers_checkpoints import STATE, checked, newest_complete


def test_the_newest_that_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint-20").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    for step in (8, 9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(ValueError, match=r"there must be a complete checkpoint in .* leave it out to start anew"):
        newest_complete(tmp_path)
    for step in (8, 9):
        TrainerState(global_step=step).save_to_json(str(tmp_path / f"checkpoint-{step}" / STATE))
    (tmp_path / "checkpoint-10" / STATE).write_text("{")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paceline"):
        assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-9")
    assert [record.message.partition(" is not")[0] for record in caplog.records] == [
        str(tmp_path / "checkpoint-11"),
        str(tmp_path / "checkpoint-10"),
    ]


def test_a_folder_that_is_asked_for_is_complete(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume_from_checkpoint is '.*': it must be a complete checkpoint"):
        checked(tmp_path)
    TrainerState(global_step=3).save_to_json(str(tmp_path / STATE))
    assert checked(tmp_path) == str(tmp_path)
