"""Facts are gathered for real, on this machine and from files like those of others."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from paceline.doctor import facts
from paceline.doctor.meeting import Place, Unmet


def test_of_this_machine(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 8, "gradient_cliping": 1.0, "paceline": {"pipeline": {"stages": 2}}}')
    known = facts.gather(str(tmp_path / "not" / "yet"), str(config))
    assert known["failed"] == {}
    assert json.loads(json.dumps(known)) == known, "it is sent as JSON"
    assert known["python"]["version"] == platform.python_version()
    assert known["packages"]["found"]["torch"] == metadata.version("torch")
    assert "pytest" not in known["packages"]["found"], "that is for tests only"
    assert set(known["imports"].values()) == {""}
    assert known["patches"]
    assert not any(patch["problem"] for patch in known["patches"])
    assert known["machine"]["host"] == socket.gethostname()
    assert 0 < known["machine"]["available_bytes"] <= known["machine"]["memory_bytes"]
    output, *_ = known["disk"]
    assert output["purpose"] == "--output_dir"
    assert output["writable"]
    assert output["free_bytes"] > 0
    assert "127.0.0.1" in known["network"]["interfaces"]["lo"]["addresses"]
    assert len(known["config"]["near_misses"]) == 1
    assert abs(known["time"]["ahead_s"] + time.perf_counter() - time.time()) < 60


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(output_dir: str) -> None:
        raise RuntimeError("no\nwords")

    monkeypatch.setattr(facts, "disk", disk)
    known = facts.gather(patches=False)
    assert known["failed"] == {"disk": "RuntimeError: no words"}
    assert "disk" not in known
    assert "patches" not in known


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    assert facts.import_error("broken_package") == "OSError: libcudart.so.13: cannot open"
    assert facts.import_error("json") == ""
    assert facts.import_error("no_such_package").startswith("ModuleNotFoundError: ")


def test_locks(tmp_path: Path) -> None:
    """One that a build holds, and one that it has left."""
    held, left = tmp_path / "one" / "lock", tmp_path / "py311_cpu" / "fused_adam" / "lock"
    for path in (held, left):
        path.parent.mkdir(parents=True)
    left.touch()
    os.utime(left, (time.time() - 1000, time.time() - 1000))
    # As torch's FileBaton takes it.
    code = f"import os; os.open({str(held)!r}, os.O_CREAT | os.O_EXCL); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        builder.stdout.readline()
        found = facts.locks([tmp_path])
        builder.kill()
    assert [(lock["path"], lock["holder"]) for lock in found] == [(str(held), builder.pid), (str(left), None)]
    assert 1000 <= found[1]["age_s"] < 1900
    assert [lock["holder"] for lock in facts.locks([tmp_path])] == [None, None], "the builder was killed"
    assert facts.locks([tmp_path / "none"]) == []


def test_where_extensions_are_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert facts.extension_folders() == [tmp_path]
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    (default,) = facts.extension_folders()
    assert default.name == "torch_extensions"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_limits_of_a_container_by_cgroups_2(tmp_path: Path) -> None:
    """A limit further out holds for what is within."""
    group = "sys/fs/cgroup/system.slice/docker-1.scope"
    files = {"proc/self/cgroup": "0::/system.slice/docker-1.scope", f"{group}/cpu.max": "250000 100000"}
    write(tmp_path, {**files, f"{group}/memory.max": "max", "sys/fs/cgroup/system.slice/memory.max": "1073741824"})
    assert facts.cgroup_limits(tmp_path) == {"cores": 2.5, "memory_bytes": 2**30}


def test_limits_of_a_container_by_cgroups_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/",
            "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "536870912",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert facts.cgroup_limits(tmp_path) == {"cores": 4.0, "memory_bytes": 2**29}


def test_no_container(tmp_path: Path) -> None:
    assert facts.cgroup_limits(tmp_path) == {"cores": None, "memory_bytes": None}


def test_variables() -> None:
    shown = facts.environment(
        {"NCCL_DEBUG": "INFO", "RANK": "3", "HOME": "/root", "HF_TOKEN": "hf_x", "DEEPSPEED_API_KEY": "x"}
    )
    assert shown == {"NCCL_DEBUG": "INFO", "RANK": "3"}
    assert facts.meaning("NCCL_DEBUG") == "a setting of NCCL"


def test_names_that_lead_nowhere() -> None:
    assert facts.addresses_of("localhost")
    assert facts.addresses_of("no-such-host.invalid") == []
    assert facts.addresses_of("a" * 70) == []


def test_a_json_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"a": 1,}')
    assert "line 1, column" in facts.config(str(tmp_path / "ds.json"))["error"]
    assert "No such file" in facts.config(str(tmp_path / "none.json"))["error"]
    (tmp_path / "two.json").write_text('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}')
    assert "a run has one of them; turn one off." in facts.config(str(tmp_path / "two.json"))["error"]


JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_place_in_a_job() -> None:
    assert Place.of({}) is None
    assert Place.of({**JOB, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert Place.of(JOB) == Place(1, 2, 0, "a", 29500)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "2"), ("WORLD_SIZE", ""), ("MASTER_PORT", "99999"), ("MASTER_ADDR", ""), ("RANK", "x")]
)
def test_half_a_job(name: str, value: str) -> None:
    with pytest.raises(Unmet) as error:
        Place.of({**JOB, name: value})
    assert f"{name}={value!r}" in error.value.finding.text
