"""A lock that a killed build has left is told as a process starts, before DeepSpeed waits for it."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from paceline.supervise.build_locks import warn_of_locks
from support.ranks import run_ranks


def lock(folder: Path, name: str, age_s: float) -> Path:
    path = folder / "py311_cpu" / name / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_who_waits_for_ever_is_told_what_to_remove(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, held, young = lock(tmp_path, "a", 7000), lock(tmp_path, "b", 7000), lock(tmp_path, "c", -7000)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    warn_of_locks.cache_clear()
    with caplog.at_level(logging.WARNING, logger="paceline"), held.open():  # as a build has its own
        warn_of_locks()
        warn_of_locks()
    warn_of_locks.cache_clear()
    first, second = caplog.messages
    assert first.startswith(f"{left} was left 70")
    assert first.endswith(f"by a build that was killed: DeepSpeed waits for it without end; rm {left}")
    assert second == (
        f"{young} is 0 s old, and no process of this host holds it: unless another host builds there, rm {young}"
    )
    assert left.exists(), "it is said, not done"


def start() -> list[str]:
    from paceline.runtime.initialize import start_distributed

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    start_distributed()
    return told


def test_every_start_looks(tmp_path: Path) -> None:
    left = lock(tmp_path, "fused_adam", 7000)
    told = run_ranks(start, 2, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert [[text.endswith(f"rm {left}") for text in texts] for texts in told] == [[True], []], "one of a host says it"
