"""What facts mean, by values."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline.doctor.finding import NOTE, OK, PROBLEM, Finding
from paceline.doctor.installation import judge

GIB = 2**30
WELL: dict[str, Any] = {
    "failed": {},
    "python": {"version": "3.11.7", "asked": ">=3.10", "executable": "/usr/bin/python"},
    "packages": {
        "paceline": "0.1.0",
        "asked": {"torch": ">=2.11", "deepspeed": "<0.20,>=0.19.8", "tqdm": ""},
        "found": {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "tqdm": "4.70", "trl": None},
    },
    "imports": {"torch": "", "deepspeed": ""},
    "patches": [{"target": "deepspeed:initialize", "problem": "", "optional": False}],
    "devices": {
        "accelerator": "cuda",
        "backend": "nccl",
        "devices": [
            {
                "name": "H200",
                "total_bytes": 139 * GIB,
                "free_bytes": 138 * GIB,
                "compute_mode": "Default",
                "capability": "9.0",
            }
        ],
        "built_for_cuda": "13.0",
        "nccl": "2.28.9",
        "driver": "580.1",
        "has_nvidia": True,
    },
    "machine": {
        "host": "a",
        "system": "Linux",
        "logical_cores": 16,
        "usable_cores": 16,
        "memory_bytes": 64 * GIB,
        "available_bytes": 60 * GIB,
        "cgroup": {"cores": None, "memory_bytes": None},
    },
    "locks": [],
    "disk": [
        {
            "purpose": "--output_dir",
            "path": "/out",
            "free_bytes": 90 * GIB,
            "total_bytes": 100 * GIB,
            "is_folder": True,
            "writable": True,
        }
    ],
    "shared_memory": {"total_bytes": 8 * GIB, "free_bytes": 8 * GIB},
    "limits": {"open_files": [65536, 65536], "locked_bytes": [8 << 20, 8 << 20]},
    "network": {
        "host": "a",
        "addresses": ["10.0.0.1"],
        "master": "",
        "master_addresses": [],
        "interfaces": {
            "lo": {"addresses": ["127.0.0.1"], "is_up": True},
            "eth0": {"addresses": ["10.0.0.1"], "is_up": True},
            "eth1": {"addresses": [], "is_up": False},
        },
        "infiniband": [],
    },
    "environment": {"OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "1"},
    "config": {"path": "ds.json", "error": "", "near_misses": [], "autos": ["optimizer.params.lr"], "section": "{}"},
}


def judged(path: str, value: Any, **job: int) -> list[Finding]:
    """The findings other than ok, with one fact changed: ``"network.addresses"``."""
    facts = copy.deepcopy(WELL)
    place: Any = facts
    *parents, last = path.split(".")
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place[parent]
    place[last] = value
    return [one for one in judge(facts, **job) if one.level != OK]


def test_all_is_well() -> None:
    found = judge(WELL)
    assert {one.level for one in found} == {OK}
    texts = {one.check: one.text for one in found}
    assert texts["torch"] == "2.13.0+cpu, asked for >=2.11"
    assert texts["trl"] == "not installed (optional)"
    assert texts["cuda:0"] == "H200, 139.0 GiB, 138.0 GiB free, capability 9.0"
    assert texts["HF_HUB_OFFLINE"].startswith("1 (with 1, nothing is fetched from the hub")
    assert "optimizer.params.lr" in texts["deepspeed JSON"]


LOCK = {"path": "/x/lock", "age_s": 7200, "holder": None}
CASES: list[tuple[str, Any, dict[str, int], str, str, str, str]] = [
    ("python.version", "3.9.1", {}, PROBLEM, "python", "asks for >=3.10", "this one is 3.9.1"),
    (
        "packages.found.torch",
        "2.9.0",
        {},
        PROBLEM,
        "torch",
        "2.9.0: paceline asks for >=2.11",
        'pip install "torch>=2.11"',
    ),
    ("packages.found.tqdm", None, {}, PROBLEM, "tqdm", "is not installed", 'pip install "tqdm"'),
    ("packages.paceline", None, {}, PROBLEM, "paceline", "not installed", "pip install -e ."),
    ("imports.torch", "OSError: libcudart", {}, PROBLEM, "torch", "cannot be imported", "libcudart"),
    (
        "patches",
        [{"target": "a:b", "problem": "a:b: gone", "optional": False}],
        {},
        PROBLEM,
        "patch",
        "a:b: gone",
        "paceline patches",
    ),
    ("patches", [{"target": "a:b", "problem": "a:b: gone", "optional": True}], {}, NOTE, "patch", "left out: a:b", ""),
    ("devices.devices", [], {}, PROBLEM, "devices", "sees no GPU", "nvidia-smi"),
    ("devices.accelerator", "cpu", {}, NOTE, "devices", "DeepSpeed uses the CPU", "unset DS_ACCELERATOR"),
    ("devices.devices.0.compute_mode", "Prohibited", {}, PROBLEM, "cuda:0", "no process", "nvidia-smi -i 0 -c DEFAULT"),
    ("devices.devices.0.free_bytes", GIB, {}, NOTE, "cuda:0", "1.0 GiB free", "something else uses it"),
    ("machine.cgroup.cores", 2.0, {}, NOTE, "container", "2 cores, and sees 16", "at most 2"),
    ("machine.cgroup.memory_bytes", 8 * GIB, {}, NOTE, "container", "8.0 GiB", ""),
    ("locks", [LOCK], {}, PROBLEM, "build lock", "/x/lock was left 2 hours ago", "rm /x/lock"),
    ("locks", [{**LOCK, "age_s": 5}], {}, NOTE, "build lock", "5 s old", "look again"),
    ("disk.0.free_bytes", GIB // 2, {}, PROBLEM, "--output_dir", "0.5 GiB of", "free some of the disk of /out"),
    ("disk.0.free_bytes", 2 * GIB, {}, NOTE, "--output_dir", "2.0 GiB of", "checkpoint"),
    ("disk.0.writable", False, {}, PROBLEM, "--output_dir", "cannot be written", "make /out writable"),
    ("disk.0.is_folder", False, {}, PROBLEM, "--output_dir", "/out is a file", "give a folder"),
    ("shared_memory.free_bytes", 64 << 20, {}, PROBLEM, "/dev/shm", "0.1 GiB of 8.0 GiB", "--shm-size"),
    ("limits.open_files", [1024, 1024], {}, NOTE, "open files", "at most 1024", "raise the hard limit, 1024"),
    ("limits.open_files", [128, None], {}, PROBLEM, "open files", "at most 128", "ulimit -n 4096"),
    ("network.infiniband", ["mlx5_0"], {}, PROBLEM, "locked memory", "8 MiB", "ulimit -l unlimited"),
    ("network.addresses", [], {"num_hosts": 2}, PROBLEM, "host name", "leads to no address", "GLOO_SOCKET_IFNAME=eth0"),
    ("network.addresses", [], {}, NOTE, "host name", "leads to no address", "for jobs over several hosts"),
    ("network.addresses", ["127.0.1.1"], {}, NOTE, "host name", "127.0.1.1", "for jobs over several hosts"),
    ("network.addresses", ["127.0.1.1"], {"num_hosts": 2}, PROBLEM, "host name", "127.0.1.1", "/etc/hosts"),
    ("network.addresses", ["10.9.9.9"], {"num_hosts": 2}, PROBLEM, "host name", "no interface of this h", "/etc/hosts"),
    (
        "network.addresses",
        ["10.9.9.9"],
        {},
        NOTE,
        "host name",
        "no interface of this host has",
        "for jobs over several",
    ),
    ("network.master", "nowhere", {}, PROBLEM, "MASTER_ADDR", "leads to no address", "--master_addr"),
    (
        "environment.GLOO_SOCKET_IFNAME",
        "eth7",
        {},
        PROBLEM,
        "GLOO_SOCKET_IFNAME",
        "no interface eth7",
        "one of lo, eth0",
    ),
    ("environment.NCCL_SOCKET_IFNAME", "=eth", {}, PROBLEM, "NCCL_SOCKET_IFNAME", "no interface eth", "unset it"),
    ("environment.GLOO_SOCKET_IFNAME", "eth1", {}, PROBLEM, "GLOO_SOCKET_IFNAME", "eth1 is down", "bring eth1 up"),
    (
        "environment.GLOO_SOCKET_IFNAME",
        "lo",
        {"num_hosts": 2},
        PROBLEM,
        "GLOO_SOCKET_IFNAME",
        "not reach lo",
        "of lo, eth0",
    ),
    ("environment.OMP_NUM_THREADS", "many", {}, PROBLEM, "OMP_NUM_THREADS", "'many'", "whole number"),
    (
        "environment.OMP_NUM_THREADS",
        "8",
        {"ranks_on_host": 4},
        NOTE,
        "OMP_NUM_THREADS",
        "by 4 ranks on 16",
        "set it to 4",
    ),
    ("environment.CUDA_LAUNCH_BLOCKING", "1", {}, NOTE, "CUDA_LAUNCH_BLOCKING", "waited for", "unset it"),
    ("config.error", "ds.json, line 1: oh", {}, PROBLEM, "deepspeed JSON", "ds.json, line 1: oh", "correct ds.json"),
    ("config.near_misses", ["did you mean"], {}, NOTE, "deepspeed JSON", "did you mean", ""),
    ("failed.disk", "KeyError: 'x'", {}, PROBLEM, "disk", "could not be looked at: KeyError", "KeyError"),
]


@pytest.mark.parametrize(("path", "value", "job", "level", "check", "text", "remedy"), CASES)
def test_one_thing_is_not_well(
    path: str, value: Any, job: dict[str, int], level: str, check: str, text: str, remedy: str
) -> None:
    found = [one for one in judged(path, value, **job) if one.check == check]
    assert [one.level for one in found] == [level], judged(path, value, **job)
    assert text in found[0].text
    assert remedy in found[0].remedy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("environment.GLOO_SOCKET_IFNAME", "eth0"),
        ("environment.NCCL_SOCKET_IFNAME", "eth"),
        ("environment.NCCL_SOCKET_IFNAME", "^docker"),
        ("environment.RANK", "0"),
        ("locks", [{**LOCK, "holder": 77}]),
        ("limits.open_files", [None, None]),
        ("packages.found.trl", "9.9"),
    ],
)
def test_what_is_no_problem(path: str, value: Any) -> None:
    assert judged(path, value) == []


def test_more_ranks_than_gpus() -> None:
    (shared,) = [one for one in judge(WELL, ranks_on_host=2) if one.level != OK]
    assert (shared.level, shared.check) == (NOTE, "devices")
    (exclusive, _) = judged("devices.devices.0.compute_mode", "Exclusive_Process", ranks_on_host=2)
    assert exclusive.level == PROBLEM


def test_one_cause_has_one_remedy() -> None:
    """Without DeepSpeed neither the patches nor the devices can be looked at."""
    facts = {**WELL, "imports": {"torch": "", "deepspeed": "no"}, "failed": {"patches": "no", "devices": "no"}}
    del facts["patches"], facts["devices"]
    found = [one for one in judge(facts) if one.level != OK]
    assert [(one.level, one.check) for one in found] == [(PROBLEM, "deepspeed"), (NOTE, "patches"), (NOTE, "devices")]


def test_facts_that_cannot_be_judged_are_a_finding() -> None:
    """Never a traceback, whatever a machine says of itself."""
    (found,) = judged("python.asked", "three or more")
    assert (found.level, found.check) == (PROBLEM, "python")
    assert "InvalidSpecifier" in found.text
    assert judge({}) == []
