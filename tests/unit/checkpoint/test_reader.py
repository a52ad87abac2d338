"""Reading: any rows from any files, and every kind of damage named together with the way back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import (
    Checkpoint,
    CheckpointError,
    Piece,
    complete_checkpoints,
    damaged_checkpoints,
    latest_checkpoint,
)
from support.saves import Ranks, filled, saved

cuts = st.integers(1, 9).flatmap(
    lambda rows: st.tuples(
        st.just(rows),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
        st.lists(st.integers(0, rows), max_size=4).map(sorted),
        st.tuples(st.integers(0, rows), st.integers(0, rows)).map(sorted),
        st.integers(1, 3),
    )
)


@settings(max_examples=50)
@given(cuts)
def test_any_cut_reads_as_any_range(case) -> None:
    """A tensor of any shape, cut anywhere, dealt to any number of ranks: every range of rows is that of the whole."""
    rows, rest, bounds, (start, stop), world_size = case
    whole = torch.arange(torch.Size((rows, *rest)).numel()).reshape(rows, *rest)
    bounds = sorted({0, *bounds, rows})
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for i, (a, b) in enumerate(pairwise(bounds)):
        pieces[i % world_size].append(Piece("w", "master", whole[a:b], a, (rows, *rest)))
    with tempfile.TemporaryDirectory() as root:
        assert Ranks(world_size).save(Path(root), "one", pieces) == [None] * world_size
        checkpoint = Checkpoint.open(Path(root) / "one")
        assert checkpoint.shape("w") == (rows, *rest)
        assert torch.equal(checkpoint.read("w", "master"), whole)
        assert torch.equal(checkpoint.read("w", "master", start, stop), whole[start:stop])
        into = torch.empty(stop - start, *rest, dtype=torch.float64)
        assert torch.equal(checkpoint.read_into(into, "w", "master", start), whole[start:stop].double())


def test_what_is_there(tmp_path: Path) -> None:
    [path] = saved(tmp_path, 4)
    checkpoint = Checkpoint.open(path)
    assert set(checkpoint.names) == {"weight", "frozen"}
    assert set(checkpoint.kinds("weight")) == {"master", "exp_avg", "step"}
    assert checkpoint.kinds("nothing") == []
    assert (checkpoint.shape("weight"), checkpoint.shape("weight", "step")) == ((6, 3), ())
    assert checkpoint.dtype("frozen", "value") is torch.bfloat16
    assert checkpoint.read("weight", "step").item() == 4  # both ranks have it
    kept = checkpoint.read("weight", "master")
    checkpoint.close()
    assert torch.equal(checkpoint.read("weight", "master").add_(1), kept + 1)
    assert torch.equal(checkpoint.read("weight", "master"), kept)  # its own memory, not the file's


def test_what_is_not_there(tmp_path: Path) -> None:
    pieces = filled(1.0)
    pieces[1] = [Piece("weight", "master", torch.ones(2, 3), 4, (6, 3))]  # row 3 is nobody's
    Ranks(2).save(tmp_path, "one", pieces)
    checkpoint = Checkpoint.open(tmp_path / "one")
    assert checkpoint.read("weight", "master", 4).shape == (2, 3)
    for call, message in (
        (lambda: checkpoint.read("weight", "master"), r"one lacks row 3 of master of weight \(shape \(6, 3\)\)"),
        (lambda: checkpoint.read("weight", "master", 2, 9), "has 6 rows: 2 to 9 are no range of them"),
        (lambda: checkpoint.read("weight", "exp_avg_sq"), "no exp_avg_sq of weight: only master, exp_avg, step of it"),
        (lambda: checkpoint.read("bias", "master"), "no master of bias: nothing of it"),
        (lambda: checkpoint.read_into(torch.ones(2), "weight", "master"), r"rows of it do not fit \(2,\)"),
        (lambda: checkpoint.rank_state(2), "was written by 2 ranks: there is no rank 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def missing(file: Path) -> str:
    file.unlink()
    return "No such file or directory"


def truncated(file: Path) -> str:
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    return f"{len(data) - 1} bytes instead of {len(data)}: it is truncated"


def torn(file: Path) -> str:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return "is torn: its contents are not those that were written"


@pytest.mark.parametrize("name", ["meta.pt", "rank_00001.safetensors", "rank_00000.json", "rank_00001.pt"])
@pytest.mark.parametrize("damage", [missing, truncated, torn])
def test_damage_is_named_and_the_way_back_offered(tmp_path: Path, name: str, damage: Callable[[Path], str]) -> None:
    first, second, third, _ = saved(tmp_path, 1, 2, 3, 4)
    missing(second / "meta.pt")  # the one before is damaged too, and the one after is no way back
    said = damage(third / name)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(third).verify()
    assert str(caught.value).startswith(f"{third / name}")
    assert said in str(caught.value)
    assert str(caught.value).endswith(f". The last complete one before it is {first}")


@pytest.mark.parametrize("damage", [missing, truncated])
def test_a_damaged_manifest(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """Nothing is known of the checkpoint then, not even when it was saved."""
    _, second, third = saved(tmp_path, 1, 2, 3)
    damage(second / "manifest.json")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(second)
    assert "has no manifest.json" in str(caught.value) or "manifest.json is damaged" in str(caught.value)
    assert str(caught.value).endswith(f". The last complete one in {tmp_path} is {third}")


def test_the_first_has_nothing_before_it(tmp_path: Path) -> None:
    first, _ = saved(tmp_path, 1, 2)
    missing(first / "meta.pt")
    with pytest.raises(CheckpointError, match=f"There is no complete one before it in {tmp_path}"):
        Checkpoint.open(first)


def test_ranks_share_the_verification(tmp_path: Path) -> None:
    [path] = saved(tmp_path, 1)
    torn(path / "rank_00000.safetensors")
    checkpoint = Checkpoint.open(path)
    failed = 0
    for part in range(3):
        try:
            checkpoint.verify(part, 3)
        except CheckpointError:
            failed += 1
    assert failed == 1


def test_latest_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    one, two, three = saved(tmp_path, 1, 2, 3)
    assert latest_checkpoint(tmp_path) == three
    (tmp_path / "latest").write_text("checkpoint-2\n")
    assert latest_checkpoint(tmp_path) == two
    truncated(two / "rank_00001.safetensors")
    assert latest_checkpoint(tmp_path) == three
    assert "rank_00001.safetensors has" in caplog.text
    assert f"Going back to {three}" in caplog.text
    (tmp_path / "latest").unlink()
    missing(three / "meta.pt")
    assert latest_checkpoint(tmp_path) == one
    assert complete_checkpoints(tmp_path) == [one]


def test_a_checkpoint_that_a_kill_left_in_place_and_unnamed_is_the_latest(tmp_path: Path) -> None:
    """Its own ``latest`` moves to the root last: the run went on from the one before, and made its steps again."""
    _, two = saved(tmp_path, 1, 2)
    (tmp_path / "latest").rename(two / "latest")
    (tmp_path / "latest").write_text("checkpoint-1")
    assert latest_checkpoint(tmp_path) == two
    truncated(two / "meta.pt")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    (three,) = saved(tmp_path, 3)
    assert latest_checkpoint(tmp_path) == three


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """Everything that was a checkpoint and cannot be opened, so that nobody takes its folder for an empty one."""
    assert damaged_checkpoints(tmp_path / "nowhere") == damaged_checkpoints(tmp_path) == {}
    one, two, three, four = saved(tmp_path, 1, 2, 3, 4)
    assert damaged_checkpoints(tmp_path) == {}
    missing(one / "meta.pt")
    truncated(two / "manifest.json")
    manifest = json.loads((three / "manifest.json").read_text()) | {"version": 2}
    (three / "manifest.json").write_text(json.dumps(manifest))
    missing(four / "manifest.json")  # only `latest` knows of it then
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text('{"name": "somebody else\'s"}')
    (tmp_path / ".draft").mkdir()
    (tmp_path / ".draft" / "manifest.json").write_text("{")
    damaged = damaged_checkpoints(tmp_path)
    assert list(damaged) == [one, two, three, four]
    assert damaged[one] == f"{one / 'meta.pt'}: No such file or directory"
    assert damaged[two] == f"{two / 'manifest.json'} is damaged, or was not written by paceline"
    assert "has version 2, not 1" in damaged[three]
    assert "it has no manifest.json" in damaged[four]
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match=f"^{tmp_path} has no complete checkpoint: {one / 'meta.pt'}: No such"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=f"None in {tmp_path} is complete"):
        Checkpoint.open(two)
    (tmp_path / "latest").write_text("global_step5")
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_text("")
    assert "DeepSpeed's own format" in damaged_checkpoints(tmp_path)[tmp_path / "global_step5"]


def test_no_remedy_where_there_are_no_checkpoints(tmp_path: Path) -> None:
    """A model or an empty run is not told of checkpoints around it that are none."""
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "model.safetensors").write_text("")
    (tmp_path / "run").mkdir()
    for name, message in (("tuned", "start from it with --model_name_or_path"), ("run", "nor has a folder in it")):
        with pytest.raises(CheckpointError, match=f"{message}$"):
            Checkpoint.open(tmp_path / name)


def test_other_people_s_directories(tmp_path: Path) -> None:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_text("")
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "model-00001-of-00002.safetensors").write_text("")
    (tmp_path / "empty").mkdir()
    saved(tmp_path, 1)
    last = f"The last complete one in {tmp_path} is {tmp_path / 'checkpoint-1'}"
    for name, message in (
        ("global_step5", "is a checkpoint in DeepSpeed's own format"),
        ("tuned", "is a Hugging Face model, no checkpoint"),
        ("empty", "it has no manifest.json"),
        ("nowhere", "there is no such directory"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            Checkpoint.open(tmp_path / name)
        assert str(caught.value).endswith(last)
    with pytest.raises(CheckpointError, match=r"is a folder of checkpoints: choose one of them, .*checkpoint-1 say"):
        Checkpoint.open(tmp_path)


def test_a_later_version_says_so(tmp_path: Path) -> None:
    [path] = saved(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text()) | {"version": 2}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="has version 2, not 1: it needs the paceline that wrote it"):
        Checkpoint.open(path)


def test_ranks_that_disagree(tmp_path: Path) -> None:
    pieces = filled(1.0)
    pieces[1][0] = Piece("weight", "master", torch.ones(3, 3).half(), 3, (6, 3))
    Ranks(2).save(tmp_path, "one", pieces)
    with pytest.raises(CheckpointError, match="ranks disagree on master of weight"):
        Checkpoint.open(tmp_path / "one")


def in_columns(whole: torch.Tensor, world_size: int) -> list[list[Piece]]:
    """Each rank has some columns of all rows, in two pieces."""
    width, half = whole.shape[1] // world_size, len(whole) // 2
    return [
        [
            Piece(
                "w",
                "master",
                whole[a:b, rank * width : (rank + 1) * width].contiguous(),
                a,
                (*whole.shape,),
                rank * width,
            )
            for a, b in ((0, half), (half, len(whole)))
        ]
        for rank in range(world_size)
    ]


def test_columns_of_several_ranks_are_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(5 * 6 * 2.0).reshape(5, 6, 2)
    assert Ranks(3).save(tmp_path, "one", in_columns(whole, 3)) == [None] * 3
    checkpoint = Checkpoint.open(tmp_path / "one")
    assert checkpoint.shape("w") == (5, 6, 2)
    for start, stop in ((0, 5), (1, 2), (1, 4), (3, 3)):
        assert torch.equal(checkpoint.read("w", "master", start, stop), whole[start:stop])


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    pieces = in_columns(torch.ones(4, 6), 3)
    pieces[1].clear()
    assert Ranks(3).save(tmp_path, "one", pieces) == [None] * 3
    with pytest.raises(ValueError, match=r"one has 4 of the 6 columns of master of w\.$"):
        Checkpoint.open(tmp_path / "one").read("w", "master")
