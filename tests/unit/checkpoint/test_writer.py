"""Saving: complete or not there, without holding up the training, and with every rank told why it failed."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    Piece,
    complete_checkpoints,
    latest_checkpoint,
    new_run,
)
from paceline.checkpoint import publish as publishing
from paceline.checkpoint.publish import Save, refuse, reported
from support.ranks import PATIENCE_S
from support.saves import Ranks, filled, saved, small_file_system


@pytest.fixture(autouse=True)
def _disk_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for what rank 0 says however long that takes to get to the disk."""
    for limit in ("VERDICT_MARGIN_S", "VERDICT_DELAY_S"):
        monkeypatch.setattr(publishing, limit, PATIENCE_S)


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def test_the_files_hold_what_the_tensors_held_when_save_returned(tmp_path: Path) -> None:
    """All dtypes, a transposed view, a parameter with gradient, an empty tensor; changed while they are written."""
    tensors = {
        "float": torch.randn(300, 400).t(),
        "half": torch.randn(7).half(),
        "brain": torch.randn(5, 3).bfloat16(),
        "count": torch.arange(9),
        "flag": torch.tensor([True, False, True]),
        "step": torch.tensor(3.0),
        "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(4)),
    }
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    writer.save(tmp_path, "checkpoint-1", [Piece(name, "value", tensor) for name, tensor in tensors.items()])
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    writer.wait()
    checkpoint = Checkpoint.open(tmp_path / "checkpoint-1")
    checkpoint.verify()
    file = load_file(tmp_path / "checkpoint-1" / "rank_00000.safetensors")
    assert set(checkpoint.names) == set(before)
    for name, tensor in before.items():
        for read in (checkpoint.read(name, "value"), file[f"value:0:{name}"]):
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)


def test_the_same_memory_serves_every_save(tmp_path: Path) -> None:
    """Also when the pieces have become others, and back again."""
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    for step, rows in enumerate((8, 8, 3, 20, 8)):
        tensor = torch.full((rows, 2), float(step))
        writer.save(tmp_path, f"checkpoint-{step}", [Piece("weight", "master", tensor)], wait=True)
    for step, rows in enumerate((8, 8, 3, 20, 8)):
        checkpoint = Checkpoint.open(tmp_path / f"checkpoint-{step}")
        assert torch.equal(checkpoint.read("weight", "master"), torch.full((rows, 2), float(step)))
    blocks = [block.data_ptr() for block in writer._snapshot._blocks]
    writer.save(tmp_path, "checkpoint-9", [Piece("weight", "master", torch.ones(8, 2))], wait=True)
    assert [block.data_ptr() for block in writer._snapshot._blocks] == blocks


def test_save_returns_long_before_the_files_are_there(tmp_path: Path) -> None:
    """The files callback stands for a slow disk; a second save waits for the first."""
    go = threading.Event()
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    writer.save(tmp_path, "checkpoint-1", filled(1.0, 1)[0], files=lambda draft: go.wait(PATIENCE_S) and None)
    assert writer.busy
    assert writer.poll() is None
    assert latest_checkpoint(tmp_path) is None
    second = threading.Thread(target=writer.save, args=(tmp_path, "checkpoint-2", filled(2.0, 1)[0]))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go.set()
    second.join()
    writer.close()
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert hidden(tmp_path) == []


def test_states_and_further_files(tmp_path: Path) -> None:
    """Every rank's own state comes back, and what the callback wrote is part of the checkpoint."""

    def files(draft: Path) -> None:
        (draft / "model").mkdir()
        (draft / "model" / "config.json").write_text("{}")

    meta = {"step": 7, "loss_scale": 2.0, "schedule": {"last": [1, 2.5, None, "x"]}, "tensor": torch.ones(2)}
    ranks = Ranks(3)
    assert ranks.save(tmp_path, "checkpoint-7", filled(7.0, 3), meta=meta, files=files) == [None] * 3
    checkpoint = Checkpoint.open(tmp_path / "checkpoint-7")
    assert checkpoint.world_size == 3
    assert {k: v for k, v in checkpoint.meta.items() if k != "tensor"} == {k: meta[k] for k in meta if k != "tensor"}
    assert torch.equal(checkpoint.meta["tensor"], torch.ones(2))
    assert [state["rank"] for state in checkpoint.rank_states] == [0, 1, 2]
    assert torch.equal(checkpoint.rank_state(2)["rng"], torch.get_rng_state())
    (tmp_path / "checkpoint-7" / "model" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model/config\.json is torn"):
        checkpoint.verify()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"rng": [numpy.random.get_state()]}, r"meta\['rng'\]\[0\]\[1\] is of type numpy\.ndarray"),
        ({"a": {"b": Path("x")}}, r"meta\['a'\]\['b'\] is of type pathlib"),
        ({"a": lambda: None}, r"meta\['a'\] is of type builtins\.function"),
        ({"rng": random.Random(1)}, r"meta\['rng'\] is of type random\.Random"),
    ],
)
def test_what_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path: Path, value, place) -> None:
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    with pytest.raises(ValueError, match=f"{place}.*cannot hold: convert it to tensors"):
        writer.save(tmp_path / "out", "checkpoint-1", [], meta=value)
    assert not (tmp_path / "out").exists()


def test_pieces_that_cannot_be(tmp_path: Path) -> None:
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    rows = torch.zeros(2, 3)
    for pieces, message in (
        ([Piece("w", "master", rows, 5, (6, 3))], "a piece of shape .2, 3. from row 5 is no part of .6, 3."),
        ([Piece("w", "master", rows, 0, (6, 4))], "is no part of"),
        ([Piece("w", "step", torch.tensor(1.0), 1)], "is no part of"),
        ([Piece("w", "master", rows, 0, (6, 4), 2)], "is no part of"),
        ([Piece("w", "master", rows, 0, (6, 4, 2), 0)], "is no part of"),
        ([Piece("w", "master", rows), Piece("w", "master", rows)], "master of w from row 0 is there twice"),
        ([Piece("w", "master", rows.to(torch.complex128))], "complex128, which a checkpoint cannot hold"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.save(tmp_path, "checkpoint-1", pieces)
    for tag in ("a/b", ".hidden", "", "latest", "a b"):
        with pytest.raises(ValueError, match=r"of letters, digits, .* that begins .* is not 'latest'"):
            writer.save(tmp_path, tag, [])
    with pytest.raises(ValueError, match="keep is 0"):
        writer.save(tmp_path, "checkpoint-1", [], keep=0)
    writer.save(tmp_path, "checkpoint-1", [Piece("w", "master", rows)], wait=True)  # and it is none the worse


def test_save_total_limit(tmp_path: Path) -> None:
    """The newest stay, by the order of saving; what is not ours stays too."""
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "mp_rank_00_model_states.pt").write_text("DeepSpeed's own")
    saved(tmp_path, 60, 80)
    assert saved(tmp_path, 10, 20, 30, keep=2)[-2:] == complete_checkpoints(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-0", "checkpoint-20", "checkpoint-30", "latest"]
    # A damaged one is none of the two.
    (tmp_path / "checkpoint-30" / "meta.pt").unlink()
    saved(tmp_path, 40, keep=2)
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-20", tmp_path / "checkpoint-40"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else deletes it at the same moment; the new one is in place."""
    saved(tmp_path, 1)
    is_whole = publishing.problem_of

    def deletes(path: Path, manifest: dict[str, Any]) -> str | None:
        problem = is_whole(path, manifest)
        if path.name == "checkpoint-1":
            shutil.rmtree(path)
        return problem

    monkeypatch.setattr(publishing, "problem_of", deletes)
    assert saved(tmp_path, 2, keep=1) == complete_checkpoints(tmp_path)
    assert "checkpoint-1, an older checkpoint, cannot be deleted: No such file or directory" in caplog.text
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tag_that_is_there_is_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step where the system can exchange two names, and in two where it cannot."""
    if not exchange:
        monkeypatch.setattr("paceline.checkpoint.publish._exchanged", lambda one, other: False)
    saved(tmp_path, 1, 2)
    assert Ranks(2).save(tmp_path, "checkpoint-1", filled(5.0)) == [None, None]
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-2", tmp_path / "checkpoint-1"]
    checkpoint = Checkpoint.open(latest_checkpoint(tmp_path))
    checkpoint.verify()
    assert torch.equal(checkpoint.read("weight", "master"), torch.full((6, 3), 5.0))
    assert hidden(tmp_path) == []


def test_what_is_not_ours_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script may have written its own files there, DeepSpeed a checkpoint, or somebody a link to another disk."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "mp_rank_00_model_states.pt").write_text("DeepSpeed's own")
    (first,) = saved(tmp_path, 1)
    (folder,) = tmp_path.glob("checkpoint-1.before-*")
    assert (folder / "mp_rank_00_model_states.pt").read_text() == "DeepSpeed's own"
    assert f"{first} was there and is no checkpoint of paceline: it is {folder} now" in caplog.text
    (tmp_path / "checkpoint-2").write_text("a file")
    (tmp_path / "checkpoint-3").symlink_to(first)
    saved(tmp_path, 2, 3)
    (file,) = tmp_path.glob("checkpoint-2.before-*")
    assert file.read_text() == "a file"
    (link,) = tmp_path.glob("checkpoint-3.before-*")
    assert link.resolve() == first
    (first / "manifest.json").unlink()
    (tmp_path / "checkpoint-4").mkdir()
    saved(tmp_path, 1, 4)
    assert len(list(tmp_path.glob("*.before-*"))) == 3  # a damaged one of ours and an empty folder are replaced


def test_drafts_of_killed_runs_go(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-3.0badf00d-4.draft" / "model").mkdir(parents=True)
    (tmp_path / ".checkpoint-3.0badf00d-3.failed").write_text("why")
    (tmp_path / ".git").mkdir()
    saved(tmp_path, 1)
    assert hidden(tmp_path) == [".git"]


def test_a_rank_that_cannot_write_is_named_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And quickly: nobody waits for its limit. The next save is a new chance."""
    saved(tmp_path, 1, world_size=3)
    ranks = Ranks(3)
    in_the_way = tmp_path / f".checkpoint-2.{ranks.writers[0].run}-1.draft" / "rank_00001.safetensors"
    in_the_way.mkdir(parents=True)
    begin = time.monotonic()
    errors = ranks.save(tmp_path, "checkpoint-2", filled(2.0, 3))
    assert time.monotonic() - begin < 600
    target = tmp_path / "checkpoint-2"
    for error in errors:
        assert str(error) == (
            f"{target} was not saved: rank 1: {target}/rank_00001.safetensors: Is a directory. "
            f"The last complete checkpoint is {tmp_path / 'checkpoint-1'}"
        )
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert [name for name in hidden(tmp_path) if name.endswith("draft")] == []
    assert ranks.save(tmp_path, "checkpoint-2", filled(2.0, 3)) == [None] * 3
    assert ranks.save(tmp_path, "checkpoint-3", filled(2.0, 3)) == [None] * 3
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_failing_callback_is_told_on_all(tmp_path: Path, world_size: int) -> None:
    def files(draft: Path) -> None:
        raise RuntimeError("no tokenizer")

    for error in Ranks(world_size).save(tmp_path, "checkpoint-2", filled(2.0, world_size), files=files):
        assert str(error) == (
            f"{tmp_path}/checkpoint-2 was not saved: rank 0: RuntimeError: no tokenizer. "
            "There is no complete checkpoint yet"
        )
    assert [path.suffix for path in tmp_path.iterdir()] == [".failed"]


def test_two_jobs_of_a_process_save_into_a_folder_at_once(tmp_path: Path) -> None:
    """The second to begin finds the first one's draft, which is none that a killed run has left."""
    has_begun, may_end = threading.Event(), threading.Event()

    def files(draft: Path) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)

    first, second = (CheckpointWriter(rank=0, world_size=1, run=new_run()) for _ in range(2))
    first.save(tmp_path, "one", filled(1.0, 1)[0], files=files)
    assert has_begun.wait(PATIENCE_S)
    second.save(tmp_path, "two", filled(2.0, 1)[0], wait=True)
    may_end.set()
    first.wait()
    assert complete_checkpoints(tmp_path) == [tmp_path / "two", tmp_path / "one"]
    assert hidden(tmp_path) == []


ENDS_AT_ONCE = """
import sys
from paceline.checkpoint import CheckpointWriter

def files(draft):
    raise RuntimeError("no tokenizer")

CheckpointWriter(rank=0, world_size=1, run="one").save(sys.argv[1], "last", [], files=files)
"""


def test_a_last_save_that_nobody_waits_for_is_told_of_as_the_script_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{tmp_path}/last was not saved: rank 0: RuntimeError: no tokenizer" in done.stderr


def test_rank_0_may_publish_before_a_rank_has_synced_that_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Save(tmp_path, "checkpoint-2", new_run(), 1, rank=1, world_size=2, time_limit_s=60.0)
    save.draft.mkdir()
    replace = os.replace

    def published_at_once(source: Path, target: Path) -> None:
        replace(source, target)
        save.draft.rename(save.target)

    monkeypatch.setattr(publishing.os, "replace", published_at_once)
    save.mark_done({})
    assert [path.name for path in save.target.iterdir()]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_state_that_cannot_be_saved_is_told_on_the_other_rank(tmp_path: Path, culprit: int) -> None:
    """Which hears of it long before its limit; and the next save finds them in step."""
    ranks = Ranks(2)
    one, other = ranks.writers[culprit], ranks.writers[1 - culprit]
    other.save(tmp_path, "checkpoint-1", filled(1.0)[other.rank])
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"rank_state\['path'\] is of type pathlib"):
        one.save(tmp_path, "checkpoint-1", filled(1.0)[culprit], rank_state={"path": Path("x")})
    with pytest.raises(CheckpointError, match=rf"rank {culprit}: rank_state\['path'\] is of type pathlib"):
        other.wait()
    assert time.monotonic() - begin < 600
    assert ranks.save(tmp_path, "checkpoint-2", filled(2.0)) == [None, None]


def test_a_rank_that_does_nothing(tmp_path: Path) -> None:
    """Both ranks that wait are told which one it was, after the limit."""
    ranks = Ranks(3, time_limit_s=3.0)
    done = tmp_path / f".checkpoint-1.{ranks.writers[0].run}-1.draft" / "rank_00001.done"
    ranks.writers[1].save(tmp_path, "checkpoint-1", filled(1.0, 3)[1])
    while not done.exists():  # a slow disk may take longer than rank 0 waits
        assert ranks.writers[1].busy
        time.sleep(0.01)
    ranks.writers[0].save(tmp_path, "checkpoint-1", filled(1.0, 3)[0])
    errors = ranks.wait()
    assert errors[2] is None
    for error in errors[:2]:
        assert "rank 0: rank 2 has not written its files" in str(error)
        assert "within 3 s: choose a folder on a file system that all nodes share" in str(error)
    assert latest_checkpoint(tmp_path) is None


def test_an_error_is_told_once(tmp_path: Path) -> None:
    """poll() returns it and leaves the way free; unasked, the next save raises it."""
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    writer.save(tmp_path / "file", "checkpoint-1", [])
    while writer.busy:
        time.sleep(0.01)
    assert "file: File exists. There is no complete checkpoint yet" in str(writer.poll())
    assert writer.poll() is None
    writer.wait()
    writer.save(tmp_path / "file", "checkpoint-1", [])
    with pytest.raises(CheckpointError, match=r"checkpoint-1 was not saved"):
        writer.save(tmp_path, "checkpoint-2", [])
    writer.save(tmp_path, "checkpoint-2", [], wait=True)
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


def test_an_error_that_is_known_from_another_rank(tmp_path: Path) -> None:
    """Forgotten while this rank had yet to notice it; the next save's is told again."""
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    writer.save(tmp_path / "file", "checkpoint-1", [])
    writer.forget()
    writer.wait()
    with pytest.raises(CheckpointError, match=r"checkpoint-2 was not saved"):
        writer.save(tmp_path / "file", "checkpoint-2", [], wait=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "3m") as folder:
        yield folder


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_full_disk(small_disk: Path, culprit: int) -> None:
    """Names the file and the cause on every rank, on a real file system; the last checkpoint stays, the draft goes."""
    saved(small_disk, 1)
    free = os.statvfs(small_disk).f_bavail
    pieces = filled(2.0)
    pieces[culprit].append(Piece("large", "master", torch.ones(2**20)))
    ranks = Ranks(2)
    target = small_disk / "checkpoint-2"
    for error in ranks.save(small_disk, "checkpoint-2", pieces):
        # The other rank may be the one that has no space for its last few bytes.
        assert re.fullmatch(
            rf"{target} was not saved: rank ([01]): {target}/rank_0000\1\.(safetensors|json|pt): "
            rf"No space left on device\. The last complete checkpoint is {small_disk / 'checkpoint-1'}",
            str(error),
        )
    assert (small_disk / "latest").read_text() == "checkpoint-1"
    Checkpoint.open(small_disk / "checkpoint-1").verify()
    assert [name for name in hidden(small_disk) if name.endswith("draft")] == []
    assert ranks.save(small_disk, "checkpoint-3", filled(3.0)) == [None, None]
    assert hidden(small_disk) == [f".checkpoint-2.{ranks.writers[0].run}-1.failed"]
    assert ranks.save(small_disk, "checkpoint-2", filled(2.0), keep=1) == [None, None]
    assert os.statvfs(small_disk).f_bavail == free


def test_what_is_in_place_is_the_last_checkpoint_however_full_the_disk_is(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No last step of a save needs room: it was told to have failed, and ``latest`` named the one before."""
    saved(small_disk, 1)
    move = publishing._move_into_place

    def filled_up(save: Save) -> None:
        with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        move(save)

    monkeypatch.setattr(publishing, "_move_into_place", filled_up)
    assert Ranks(2).save(small_disk, "checkpoint-2", filled(2.0)) == [None, None]
    assert latest_checkpoint(small_disk) == small_disk / "checkpoint-2"
    Checkpoint.open(small_disk / "checkpoint-2").verify()
    assert hidden(small_disk) == []


def test_a_rank_that_may_not_write_says_so_before_others_wait_for_it(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    writer = CheckpointWriter(rank=1, world_size=2, run=new_run())
    with pytest.raises(CheckpointError, match=rf"run/deep cannot be saved to: rank 1 may not write to {small_disk},"):
        writer.take(small_disk / "run" / "deep", "checkpoint-1", filled(1.0)[1])


def test_a_file_in_the_place_of_the_folder_is_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for rank, error in enumerate(Ranks(2).save(tmp_path / "file" / "run", "checkpoint-1", filled(1.0))):
        assert f"checkpoint-1 was not saved: rank {rank}: {tmp_path}/file/run" in str(error)


def test_a_folder_that_cannot_be_looked_at_is_named_on_every_rank(tmp_path: Path) -> None:
    """As that of a name which is too long, or on a file system that is gone: Python cannot say whether it is there."""
    for error in Ranks(2).save(tmp_path, "x" * 240, filled(1.0)):
        assert "was not saved: rank" in str(error)
        assert "File name too long" in str(error)


def test_a_file_that_vanishes_while_rank_0_deletes_the_draft_is_no_cause(tmp_path: Path) -> None:
    """The folder is still there then: what rank 0 is about to say is the cause."""
    save = Save(tmp_path, "checkpoint-2", new_run(), 1, rank=2, world_size=3, time_limit_s=60.0)
    save.draft.mkdir()
    speaking = threading.Timer(0.1, lambda: save.verdict.write_text("rank 1: no room"))
    speaking.start()
    vanished = FileNotFoundError(2, "No such file or directory", str(save.draft / "rank_00002.done.tmp"))
    assert reported(save, vanished) == "rank 1: no room"
    speaking.join()


def test_a_rank_that_fails_as_rank_0_refuses_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run out of space: the other tells its failure after the draft was deleted, before the verdict is there."""
    saves = [Save(tmp_path, "checkpoint-2", "run", 1, rank=rank, world_size=2, time_limit_s=60.0) for rank in range(2)]
    say = publishing._say

    def other_first(path: Path, cause: str) -> None:
        monkeypatch.setattr(publishing, "_say", say)
        saves[1].draft.mkdir()
        refuse(saves[1], "rank 1: no room")
        assert hidden(tmp_path) == [saves[1].draft.name]
        say(path, cause)

    monkeypatch.setattr(publishing, "_say", other_first)
    refuse(saves[0], "rank 0: no room")
    assert hidden(tmp_path) == [saves[0].verdict.name]
