"""Checks of an installation: on this machine, and of what others have, by values."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

from paceline.doctor import installation
from paceline.doctor.finding import NOTE, OK, PROBLEM, Finding
from paceline.doctor.installation import check_devices, check_locks, check_network, check_packages, check_sharing
from paceline.doctor.meeting import Place, Unmet
from paceline.supervise.build_locks import extension_folders, locks

GIB = 2**30
SECOND = Place(1, 2, 1, 2, "a", 29500)
"""The second rank of its host."""

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": []}


def the_one(found: Iterable[Finding], level: str, check: str, text: str = "", remedy: str = "") -> None:
    (one,) = [one for one in found if one.level != OK]
    assert (one.level, one.check) == (level, check)
    assert text in one.text
    assert remedy in one.remedy


def is_well(found: Iterable[Finding]) -> bool:
    return {one.level for one in found} == {OK}


def test_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 8, "gradient_cliping": 1.0, "paceline": {"pipeline": {"stages": 2}}}')
    found = installation.look(str(tmp_path / "not" / "yet"), str(config))
    levels = {one.check: one.level for one in found if one.check != "deepspeed JSON"}
    assert {"python", "torch", "patches", "devices", "build locks", "--output_dir", "machine", "host name"} <= {*levels}
    assert PROBLEM not in levels.values()
    assert [one.level for one in found if one.check == "deepspeed JSON"] == [NOTE, OK]
    assert not (tmp_path / "not").exists()
    texts = {one.check: one.text for one in installation.look(place=SECOND)}
    assert not {"patches", "machine", "host name"} & {*texts}, "its host's first rank looks at them"


def test_facts_that_ranks_compare() -> None:
    known = installation.facts()
    assert json.loads(json.dumps(known)) == known, "it is sent as JSON"
    assert known["versions"]["python"] == platform.python_version()
    assert known["versions"]["torch"] == metadata.version("torch")
    assert known["versions"]["accelerator"] == "cpu"
    assert "pytest" not in known["versions"], "that is for tests only"
    assert abs(known["ahead_s"] + time.perf_counter() - time.time()) < 60


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(output_dir: str) -> None:
        raise RuntimeError("no\nwords")

    monkeypatch.setattr(installation, "disk", disk)
    found = [one for one in installation.look(place=SECOND) if one.check == "disk"]
    the_one(found, PROBLEM, "disk", "could not be looked at: RuntimeError: no words", "repair what it names")
    monkeypatch.setattr(installation, "imports", lambda: [Finding(PROBLEM, "torch", "cannot be imported: no", "do")])
    found = [one for one in installation.look(place=SECOND) if one.check == "disk"]
    the_one(found, NOTE, "disk", "not looked at, without torch: RuntimeError: no words")


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(installation.imports(["json"])) == []
    found = installation.imports(["broken_package"])
    the_one(found, PROBLEM, "broken_package", "cannot be imported: OSError: libcudart.so.13", "import broken_package")


ASKED = {"python": ">=3.10", "torch": ">=2.11", "tqdm": ""}
FOUND = {"python": "3.11.7", "torch": "2.13.0+cpu", "tqdm": "4.70", "trl": None, "paceline": "0.1.0"}


@pytest.mark.parametrize(
    ("name", "version", "text", "remedy"),
    [
        ("python", "3.9.1", "3.9.1, asked for >=3.10", "for such a Python"),
        ("torch", "2.9.0", "2.9.0, asked for >=2.11", 'pip install "torch>=2.11"'),
        ("tqdm", None, "is not installed", 'pip install "tqdm"'),
        ("paceline", None, "only imported", "pip install -e ."),
    ],
)
def test_packages(name: str, version: str | None, text: str, remedy: str) -> None:
    texts = {one.check: one.text for one in check_packages(ASKED, FOUND)}
    assert (texts["torch"], texts["trl"]) == ("2.13.0+cpu, asked for >=2.11", "is not installed")
    assert is_well(check_packages(ASKED, FOUND))
    the_one(check_packages(ASKED, FOUND | {name: version}), PROBLEM, name, text, remedy)


def test_patches_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.patches import registry

    patch = registry.all_patches()[0]
    monkeypatch.setattr(registry, "all_patches", lambda: [patch])
    monkeypatch.setattr(type(patch), "problem", lambda self: "a:b: gone")
    the_one(installation.patches(), NOTE if patch.optional else PROBLEM, "patch", "a:b: gone")


def test_devices() -> None:
    the_one([check_devices("cuda", 0, "13.0", has_driver=True)], PROBLEM, "devices", "sees no GPU", "nvidia-smi")
    the_one([check_devices("cpu", 0, "13.0", has_driver=True)], NOTE, "devices", "DeepSpeed uses", "DS_ACCELERATOR")
    the_one([check_devices("cpu", 0, None, has_driver=True)], NOTE, "devices", "without CUDA", "install a torch")
    assert check_devices("cuda", 2, "13.0", has_driver=True) == Finding(OK, "devices", "cuda, 2 GPUs, CUDA 13.0")
    assert check_devices("cpu", 0, None, has_driver=False).level == OK


def test_ranks_that_share_gpus() -> None:
    the_one(check_sharing(1, SECOND, {}), NOTE, "devices", "2 ranks share 1", "one rank per GPU")
    assert list(check_sharing(2, SECOND, {})) == []


@pytest.mark.parametrize(
    ("value", "count", "place", "level"),
    [
        ("1", 2, SECOND, PROBLEM),
        ("1", 1, Place(1, 2, 0, 1, "a", 29500), PROBLEM),  # the only one of its host
        ("1", 2, None, NOTE),  # a job may come
        ("8", 2, SECOND, OK),
        ("", 2, SECOND, OK),
        ("1", 0, SECOND, OK),  # no CUDA
    ],
)
def test_communicators_that_share_a_queue(value: str, count: int, place: Place | None, level: str) -> None:
    found = list(check_sharing(count, place, {"CUDA_DEVICE_MAX_CONNECTIONS": value} if value else {}))
    if level == OK:
        assert found == []
    else:
        the_one(found, level, "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL communicators", "unset CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        ({"memory.max": "1048576"}, 1),
        ({"memory/memory.limit_in_bytes": "1048576"}, 1),
        ({"memory.max": "max"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, 0),
        ({}, 0),
    ],
)
def test_memory_of_a_container(tmp_path: Path, files: dict[str, str], notes: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert ["killed" in one.text for one in installation.machine(tmp_path) if one.level == NOTE] == [True] * notes


def test_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a build holds, and one that it has left."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
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
        found = locks(extension_folders())
        builder.kill()
    assert [(lock["path"], lock["holder"]) for lock in found] == [(str(held), builder.pid), (str(left), None)]
    assert 1000 <= found[1]["age_s"] < 1900
    old = [found[0], {**found[1], "age_s": 1000}]
    the_one(check_locks(old), PROBLEM, "build lock", f"{left} was left 17 minutes ago", f"rm {left}")
    the_one(check_locks([{**found[1], "age_s": 5}]), NOTE, "build lock", "is new", "look again")
    assert [lock["holder"] for lock in locks(extension_folders())] == [None, None], "the builder was killed"
    assert is_well(check_locks([]))


def test_where_extensions_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    (default,) = extension_folders()
    assert default.name == "torch_extensions"


@pytest.mark.parametrize(
    ("check", "free", "level", "remedy"),
    [
        ("--output_dir", GIB // 2, PROBLEM, "choose another --output_dir"),
        ("--output_dir", 2 * GIB, NOTE, "12 to 18 bytes"),
        ("temporary files", 2 * GIB, OK, ""),
        ("cache of the hub", GIB // 8, PROBLEM, "HF_HOME"),
        ("/dev/shm", GIB // 8, NOTE, "--shm-size"),  # on a CPU
    ],
)
def test_room(check: str, free: int, level: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 * GIB, 0, free))
    (found,) = [one for one in installation.disk(str(tmp_path)) if one.check == check]
    assert found.level == level
    assert remedy in found.remedy


def test_folders_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    the_one(installation.disk(str(tmp_path / "file" / "out")), PROBLEM, "--output_dir", "or under one", "give a folder")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    the_one(installation.disk(str(tmp_path)), PROBLEM, "--output_dir", "cannot be written", f"make {tmp_path} writable")


def test_variables() -> None:
    shown = installation.environment(
        {"NCCL_DEBUG": "INFO", "RANK": "3", "HOME": "/root", "HF_TOKEN": "hf_x", "DEEPSPEED_API_KEY": "x"}
    )
    assert shown == {"NCCL_DEBUG": "INFO", "RANK": "3"}


NETWORK: list[tuple[list[str], str, int, str, str, str, str]] = [
    # leads to, GLOO_SOCKET_IFNAME, hosts; level, check, text, remedy
    ([], "", 2, PROBLEM, "host name", "leads to no address", "GLOO_SOCKET_IFNAME=eth0"),
    ([], "", 1, NOTE, "host name", "leads to no address", "for several hosts"),
    (["127.0.1.1"], "", 1, NOTE, "host name", "127.0.1.1", "for several hosts"),
    (["127.0.1.1"], "", 2, PROBLEM, "host name", "127.0.1.1", "/etc/hosts"),
    (["10.9.9.9"], "", 2, PROBLEM, "host name", "10.9.9.9", "/etc/hosts"),
    (["10.0.0.1"], "eth7", 1, PROBLEM, "GLOO_SOCKET_IFNAME", "no interface eth7", "one of eth0"),
    (["10.0.0.1"], "lo", 2, PROBLEM, "GLOO_SOCKET_IFNAME", "other hosts cannot reach lo", "one of eth0"),
]


@pytest.mark.parametrize(("leads_to", "chosen", "hosts", "level", "check", "text", "remedy"), NETWORK)
def test_network(leads_to: list[str], chosen: str, hosts: int, level: str, check: str, text: str, remedy: str) -> None:
    the_one(check_network("a", leads_to, INTERFACES, chosen, has_others=hosts > 1), level, check, text, remedy)


@pytest.mark.parametrize(("leads_to", "chosen"), [(["10.0.0.1"], ""), (["127.0.1.1", "10.0.0.1"], ""), ([], "eth0")])
def test_a_network_that_is_well(leads_to: list[str], chosen: str) -> None:
    assert is_well(check_network("a", leads_to, INTERFACES, chosen, has_others=True))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"a": 1,}', "line 1, column"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "a run has one of them; turn one off."),
        (None, "No such file"),
        # What only `check-config` said.
        ('{"optimizer": {"type": "Muon"}, "paceline": {"pipeline": {}}}', "a pipeline cannot use it"),
    ],
)
def test_a_json_that_is_none(text: str | None, error: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    the_one(installation.config(str(path)), PROBLEM, "deepspeed JSON", error, f"correct {path}")


@pytest.mark.parametrize(
    ("ranks", "pipeline", "text"),
    [
        (8, {"stages": 4}, "on 8 ranks: 4 stages, data-parallel size 2"),
        (2, {"partition": [0, 4, 8]}, "on 2 ranks: 2 stages, data-parallel size 1"),
        (6, {"stages": 4}, "does not run on the 6 ranks of this job: paceline.pipeline.stages is 4"),
        (4, {"partition": [0, 3, 5, 8]}, "does not run on the 4 ranks of this job: "),
    ],
)
def test_a_json_in_a_job(ranks: int, pipeline: dict[str, object], text: str, tmp_path: Path) -> None:
    """Whether it goes with the job's ranks; what the command line fills in, or a model decides, stays open."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "paceline": {"pipeline": pipeline}}))
    *notes, found = installation.config(str(path), ranks)
    assert found.level == OK
    assert [one.level for one in notes] == [NOTE] * text.startswith("does not")
    assert text in [*notes, found][0].text


JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_place_in_a_job() -> None:
    assert Place.of({}) is None
    assert Place.of({**JOB, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert Place.of(JOB) == Place(1, 2, 0, 2, "a", 29500)
    assert Place.of({**JOB, "LOCAL_RANK": "1", "LOCAL_SIZE": "1"}) == Place(1, 2, 1, 1, "a", 29500)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "2"), ("WORLD_SIZE", ""), ("MASTER_PORT", "99999"), ("MASTER_ADDR", ""), ("RANK", "x")]
)
def test_half_a_job(name: str, value: str) -> None:
    with pytest.raises(Unmet) as error:
        Place.of({**JOB, name: value})
    assert f"{name}={value!r}" in error.value.finding.text
