"""Blocks of host memory: as many bytes as a save has, in powers of two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Checkpoint, CheckpointWriter, Piece, new_run, snapshot
from paceline.checkpoint.snapshot import LARGEST_BLOCK, LEAST_BLOCK, block_sizes

GIB, MIB = 2**30, 2**20


def pinned_bytes(size: int) -> int:
    """What torch's allocator of pinned memory takes for ``size``."""
    return 1 << (size - 1).bit_length()


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, []),
        (5, [5]),
        (GIB, [GIB]),
        (33 * GIB + 700 * MIB, [GIB] * 33 + [512 * MIB, 128 * MIB, 32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB]),
        (3 * MIB + 7, [2 * MIB, MIB, 7]),
    ],
)
def test_sizes(num_bytes: int, sizes: list[int]) -> None:
    assert block_sizes(num_bytes) == sizes


@given(st.integers(0, 200 * GIB))
def test_rounding_wastes_nothing(num_bytes: int) -> None:
    sizes = block_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    assert all(0 < size <= LARGEST_BLOCK for size in sizes)
    assert sum(map(pinned_bytes, sizes)) - num_bytes < LEAST_BLOCK


def test_pieces_that_lie_in_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGEST_BLOCK", 64)
    monkeypatch.setattr(snapshot, "LEAST_BLOCK", 16)
    tensors = {
        "double": torch.arange(5, dtype=torch.float64),
        "large": torch.arange(150, dtype=torch.float32).view(50, 3),
        "transposed": torch.arange(70, dtype=torch.float32).view(7, 10).t(),
        "half": torch.arange(37).to(torch.bfloat16),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    pieces = [Piece(name, "value", tensor) for name, tensor in tensors.items()]
    writer.save(tmp_path, "one", pieces, wait=True)
    assert len(writer._snapshot._blocks) > 10
    tensors["large"] += 1
    writer.save(tmp_path, "two", pieces, wait=True)
    for tag in ("one", "two"):
        checkpoint = Checkpoint.open(tmp_path / tag)
        checkpoint.verify()
        for name, tensor in tensors.items():
            wanted = tensor - 1 if (tag, name) == ("one", "large") else tensor
            assert torch.equal(checkpoint.read(name, "value"), wanted), (tag, name)
