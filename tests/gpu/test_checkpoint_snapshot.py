"""Saving tensors that are on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.checkpoint import Checkpoint, CheckpointWriter, Piece, new_run


@pytest.mark.gpu
def test_a_snapshot_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Kernels queued before save() count, those queued after it do not, and save() itself does not wait for either."""
    writer = CheckpointWriter(rank=0, world_size=1, run=new_run())
    weight = torch.zeros(2**24, device="cuda")
    pieces = [Piece("weight", "master", weight), Piece("count", "value", torch.arange(5))]
    torch.cuda._sleep(1)
    weight.fill_(3)  # what is launched for the first time is loaded, and loading waits for the device
    writer.prepare(pieces)
    torch.cuda.synchronize()
    assert all(block.is_pinned() for block in writer._snapshot._blocks)
    torch.cuda._sleep(2 * 10**8)  # about a tenth of a second
    weight.fill_(1)
    writer.save(tmp_path, "one", pieces)
    assert not torch.cuda.current_stream().query()
    weight.fill_(2)
    writer.wait()
    checkpoint = Checkpoint.open(tmp_path / "one")
    checkpoint.verify()
    assert torch.equal(checkpoint.read("weight", "master"), torch.ones(2**24))
    assert torch.equal(checkpoint.read("count", "value"), torch.arange(5))
    on_gpu = torch.empty(10, device="cuda")
    assert torch.equal(checkpoint.read_into(on_gpu, "weight", "master", 5).cpu(), torch.ones(10))
