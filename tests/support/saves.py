"""Checkpoints without a job: several ranks are several writers in one process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoint, CheckpointError, CheckpointWriter, Piece, new_run


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of ``size`` at ``folder``; skips the test where none can be made."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("no permission to mount a small file system here: runs as root where containers allow it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Ranks:
    """One writer a rank, driven together."""

    def __init__(self, world_size: int, **options: Any) -> None:
        run = new_run()
        self.writers = [CheckpointWriter(rank=r, world_size=world_size, run=run, **options) for r in range(world_size)]

    def save(
        self,
        root: Path,
        tag: str,
        pieces: Sequence[Sequence[Piece]],
        *,
        meta: dict[str, Any] | None = None,
        files: Callable[[Path], None] | None = None,
        keep: int | None = None,
    ) -> list[CheckpointError | None]:
        """Save the ranks' pieces and wait; what went wrong on each rank."""
        for writer, own in zip(self.writers, pieces, strict=True):
            state = {"rank": writer.rank, "rng": torch.get_rng_state()}
            writer.save(root, tag, own, rank_state=state, meta=meta, files=files, keep=keep)
        return self.wait()

    def wait(self) -> list[CheckpointError | None]:
        errors: list[CheckpointError | None] = []
        for writer in self.writers:
            try:
                writer.wait()
                errors.append(None)
            except CheckpointError as error:
                errors.append(error)
        return errors


def filled(value: float, world_size: int = 2, rows: int = 6) -> list[list[Piece]]:
    """One parameter cut over the ranks, its moment and its step, all of ``value``; one frozen parameter on rank 0."""
    pieces: list[list[Piece]] = []
    for rank in range(world_size):
        start, stop = rank * rows // world_size, (rank + 1) * rows // world_size
        part = torch.full((stop - start, 3), value)
        pieces.append([Piece("weight", kind, part.clone(), start, (rows, 3)) for kind in ("master", "exp_avg")])
        pieces[-1].append(Piece("weight", "step", torch.tensor(value)))
    pieces[0].append(Piece("frozen", "value", torch.full((2,), value, dtype=torch.bfloat16)))
    return pieces


def saved(root: Path, *values: int, world_size: int = 2, keep: int | None = None) -> list[Path]:
    """Complete checkpoints ``checkpoint-<value>`` with everything of that value."""
    ranks = Ranks(world_size)
    for value in values:
        assert (
            ranks.save(root, f"checkpoint-{value}", filled(value, world_size), meta={"step": value}, keep=keep)
            == [None] * world_size
        )
    return [root / f"checkpoint-{value}" for value in values]


def assert_same_tensors(one: Path, other: Path) -> None:
    """Values, masters, moments, steps: every name and kind, bit for bit."""
    first, second = Checkpoint.open(one), Checkpoint.open(other)
    assert sorted(first.names) == sorted(second.names)
    kinds = set()
    for name in first.names:
        assert sorted(first.kinds(name)) == sorted(second.kinds(name))
        for kind in first.kinds(name):
            kinds.add(kind)
            assert torch.equal(first.read(name, kind), second.read(name, kind)), f"{kind} of {name}"
    assert {"master", "exp_avg", "exp_avg_sq", "step"} <= kinds
