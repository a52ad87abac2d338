"""A job under the `deepspeed` command survives what happens to jobs (``benchmarks/survival.py``: many times over)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.survival import survive


@pytest.mark.launcher
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system to fill it: runs as root")
def test_killed_stopped_and_out_of_disk(tmp_path: Path) -> None:
    """`survive` raises unless the weights are those of an undisturbed run, and all processes end within the limit."""
    result = survive(["kill", "term", "disk"], 90, seed=3, folder=tmp_path)
    assert result["weights"] == "bitwise equal"
    assert max(result["resumed_from"]) > 0
