"""Limits of control groups, as the kernel writes them."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from paceline.measure import device_memory
from paceline.measure.container_memory import Limit, container_room_bytes, memory_limits

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int = 0, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names[:2], (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon {used - files}\nfile {files}\n{names[2]} {files}\n")


@pytest.mark.parametrize(("names", "folder", "controllers"), [(V2, "", ""), (V1, "memory", "cpu,memory")])
def test_the_tightest_group_counts(tmp_path: Path, names: tuple[str, str, str], folder: str, controllers: str) -> None:
    """Files that the kernel drops when memory is short do not count as used."""
    base, own = tmp_path / "mounted" / folder, tmp_path / "own"
    group(base, names, "max" if names is V2 else 2**63 - 4096, used=900)
    group(base / "jobs", names, 1000, used=800, files=300)
    group(base / "jobs" / "step", names, 700, used=100)
    group(base / "others", names, 10, used=10)
    own.write_text(f"3:{controllers}:/jobs/step\n1:name=systemd:/others\n")
    found = [limit for limit in memory_limits(tmp_path / "mounted", own) if limit.limit_bytes < 2**40]
    assert found == [Limit(700, 600), Limit(1000, 500)]


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    """Whatever the machine calls it."""
    group(tmp_path / "mounted", V2, 1000, used=400)
    (tmp_path / "own").write_text("0::/docker/0123\n")
    assert list(memory_limits(tmp_path / "mounted", tmp_path / "own")) == [Limit(1000, 600)]
    assert list(memory_limits(tmp_path / "mounted", tmp_path / "none")) == [Limit(1000, 600)]
    (tmp_path / "mounted" / "memory.stat").unlink()
    (tmp_path / "mounted" / "memory.current").unlink()
    assert list(memory_limits(tmp_path / "mounted", tmp_path / "own")) == [Limit(1000, 1000)], "nobody knows"


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert container_room_bytes(tmp_path) == inf


def test_a_cpu_has_no_more_free_than_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_memory.torch.device("cpu")
    assert device_memory.available_bytes(device, 1) > 1000
    monkeypatch.setattr(device_memory, "container_room_bytes", lambda: 1000.0)
    assert device_memory.available_bytes(device, 2) == 500
    assert device_memory.room_bytes(device, 2) == 450
