"""Checkpoints of Hugging Face's Trainer: a run goes on from the newest that was written to its end."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers.trainer_callback import TrainerState

from paceline.checkpoint import CheckpointError
from paceline.runtime.trainers_checkpoints import (
    STATE,
    checked,
    naming_the_one_before,
    newest_complete,
    refuse_pipelines,
    refuse_pipelines_tag,
    with_training,
)
from support.saves import saved


def test_the_newest_that_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint-20").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    for step in (8, 9, 10, 11, 12, 13):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(ValueError, match=r"there must be a complete checkpoint in .* leave it out to start anew"):
        newest_complete(tmp_path)
    for step in (8, 9):
        TrainerState(global_step=step).save_to_json(str(tmp_path / f"checkpoint-{step}" / STATE))
    (tmp_path / "checkpoint-10" / STATE).write_text("{")
    (tmp_path / "checkpoint-12" / STATE).write_text('{"of_a_later_version": 1}')
    TrainerState(global_step=13).save_to_json(str(tmp_path / "checkpoint-13" / STATE))
    (tmp_path / "checkpoint-13" / "rng_state_1.pth").write_bytes(b"PK\3\4")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paceline"):
        assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-9")
    assert [record.message.partition(" is not")[0] for record in caplog.records] == [
        *(str(tmp_path / f"checkpoint-{step}") for step in (13, 12, 11, 10))
    ]


def checkpoints_with_parts(folder: Path, *steps: int) -> list[Path]:
    """Trainer's checkpoints, each with one of a pipeline inside."""
    found = []
    for step in steps:
        path = folder / f"checkpoint-{step}"
        saved(path, step)
        TrainerState(global_step=step).save_to_json(str(path / STATE))
        found.append(path)
    return found


def test_the_newest_with_all_files_of_the_pipeline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, damaged, foreign = checkpoints_with_parts(tmp_path, 2, 4, 6)
    (lost,) = damaged.glob("*/rank_00000.safetensors")
    lost.unlink()
    shutil.rmtree(foreign / "checkpoint-6")
    (foreign / "global_step6").mkdir()
    (foreign / "global_step6" / "mp_rank_00_model_states.pt").touch()
    (foreign / "latest").write_text("global_step6")
    with caplog.at_level(logging.WARNING, "paceline"):
        assert newest_complete(tmp_path) == str(before)
    assert f"{damaged} is not complete: {lost}: No such file" in caplog.text
    assert "global_step6 is a checkpoint in DeepSpeed's own format" in caplog.text
    with pytest.raises(ValueError, match=rf"{lost}: No such file.*; the one before it is {before}: give its path"):
        checked(damaged)
    for error in ("torn", "torn. There is no complete checkpoint yet"):  # in its own folder
        with (
            pytest.raises(CheckpointError, match=rf"^torn\. Of Trainer.* before it is {before}$"),
            naming_the_one_before(damaged),
        ):
            raise CheckpointError(error)
    shutil.rmtree(before)
    with pytest.raises(ValueError, match=rf"there is none \(.*own format.*; {lost}: No such file.*\); give the path"):
        newest_complete(tmp_path)


def test_a_checkpoint_without_a_rank_s_random_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kill before that rank wrote it: the run would go on with other dropout."""
    before, killed = checkpoints_with_parts(tmp_path, 2, 4)
    torch.save({}, killed / "rng_state_0.pth")
    assert newest_complete(tmp_path, tells=False) == str(before)
    assert not caplog.records
    assert newest_complete(tmp_path) == str(before)
    assert f"{killed} is not complete: it lacks rng_state_1.pth, and the others' are there; looking" in caplog.text
    torch.save({}, killed / "rng_state_1.pth")
    assert newest_complete(tmp_path) == str(killed)


def test_a_run_without_a_pipeline_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (own,) = checkpoints_with_parts(tmp_path, 3)
    for asked in (str(own), True):
        with pytest.raises(ValueError, match=rf"{own} is a checkpoint of a pipeline, .* write \"pipeline\" into"):
            refuse_pipelines(asked, tmp_path)
    for harmless in (None, False, str(tmp_path / "checkpoint-2"), str(tmp_path / "nowhere")):
        refuse_pipelines(harmless, tmp_path)


def test_an_engine_without_a_pipeline_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    (own,) = checkpoints_with_parts(tmp_path, 3)
    (tag,) = (path.name for path in own.iterdir() if path.is_dir())
    for asked in (None, tag):
        with pytest.raises(ValueError, match=rf"{own / tag} is a checkpoint of a pipeline, .* write \"pipeline\" into"):
            refuse_pipelines_tag(str(own), asked)
    (own / "latest").write_text("global_step6")  # a run of DeepSpeed's own went on in the same folder
    refuse_pipelines_tag(str(own), None)
    refuse_pipelines_tag(str(tmp_path / "nowhere"), None)


def test_a_folder_that_is_asked_for_is_complete(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume_from_checkpoint is '.*': it must be a complete checkpoint"):
        checked(tmp_path)
    TrainerState(global_step=3).save_to_json(str(tmp_path / STATE))
    assert checked(tmp_path) == str(tmp_path)


def test_a_checkpoint_of_the_model_alone_is_not_resumed(tmp_path: Path) -> None:
    (own,) = checkpoints_with_parts(tmp_path, 2)
    assert with_training(str(own)) == str(own)
    TrainerState(global_step=3).save_to_json(str(tmp_path / STATE))
    with pytest.raises(ValueError, match=rf"{tmp_path} has nothing of a pipeline's training .* \(save_only_model"):
        with_training(str(tmp_path))
