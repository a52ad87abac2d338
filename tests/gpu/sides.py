"""A capability on two accelerators, and how far apart they are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from gpu.capabilities import CAPABILITIES, Capability
from gpu.training import BEGIN, END
from paceline.checkpoint import Checkpoint
from support.ranks import run_ranks

REHEARSAL = os.environ.get("PACELINE_GPU_TESTS_ON") == "cpu"
"""Whether both sides run on the CPU: everything but CUDA itself, on a machine without a GPU."""

SHARED = os.environ.get("PACELINE_GPU_TESTS_SHARED")
"""Folder of what capabilities gave on the CPU, for the tests of one call of :file:`run.py`."""

ON_CPU = {"DS_ACCELERATOR": "cpu"}
ONE_GPU = {
    "DS_ACCELERATOR": "cuda",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
}
EACH_ITS_OWN = {"DS_ACCELERATOR": "cuda", "NCCL_SOCKET_IFNAME": "lo"}
EACH_A_HOST = {
    **ONE_GPU,
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_NCHANNELS": "2",
    "PACELINE_GPU_TESTS_HOSTS": "1",
}
"""One GPU, NCCL all the same: it takes ranks with other host numbers for ranks of other hosts, each with its own GPU.

It shows order, hangs and numbers, not speed: the ranks take turns on the GPU.
"""

PARAMETERS = ("master", "value")
"""Kinds of a checkpoint that are no optimizer's state."""


@dataclass(frozen=True)
class Side:
    """What became of a capability: of each rank, and of all parameters at the begin and in the end."""

    ranks: list[dict[str, Any]]
    begin: dict[str, Tensor]
    end: dict[str, Tensor]
    states: dict[str, Tensor]


def run(name: str, folder: Path, env: Mapping[str, str]) -> Side:
    """All ranks, or those of all islands."""
    capability = CAPABILITIES[name]
    folder.mkdir()
    ranks = _islands(name, capability, folder, env) if capability.islands > 1 else _ranks(name, folder, env)
    begin, end, states = ({}, {}, {}) if not (folder / END).exists() else _saved(folder)
    for number, rank in enumerate(ranks):
        begin |= {f"{key} of rank {number}": tensor for key, tensor in rank.pop(BEGIN, {}).items()}
        end |= {f"{key} of rank {number}": tensor for key, tensor in rank.pop(END, {}).items()}
    return Side(ranks, begin, end, states)


def run_on_cpu(name: str, folder: Path) -> Side:
    """Run a capability on the CPU; tests of one :file:`run.py` that compare with the same share it."""
    if SHARED is None:
        return run(name, folder, ON_CPU)
    kept = Path(SHARED, f"{name}.pt")
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            torch.save(run(name, folder, ON_CPU), kept)
        side: Side = torch.load(kept, weights_only=False)
    return side


def _ranks(name: str, folder: Path, env: Mapping[str, str], **options: Any) -> list[dict[str, Any]]:
    return run_ranks(act, CAPABILITIES[name].ranks, name, str(folder), options, env=env)


def _islands(name: str, capability: Capability, folder: Path, env: Mapping[str, str]) -> list[dict[str, Any]]:
    from support.archipelago import lighthouses

    with lighthouses(1) as (light,), ThreadPoolExecutor(capability.islands) as pool:
        numbers = range(capability.islands)
        environments = [{**env, "PACELINE_ISLAND": str(number)} for number in numbers]
        islands = [pool.submit(_ranks, name, folder, env, light=light) for env in environments]
        for island in as_completed(islands):
            island.result()  # what failed first is the cause: the others wait for it
    return [rank for island in islands for rank in island.result()]


def act(name: str, folder: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: the job, and on what it ran."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    capability = CAPABILITIES[name]
    if "PACELINE_GPU_TESTS_HOSTS" in os.environ:
        host = f"host{os.environ['RANK']}"
        os.environ.update(NCCL_HOSTID=host, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(folder)
    found = capability.job(folder, **capability.options, **options)
    backend = dist.get_backend() if dist.is_initialized() else None  # the main job leaves its group
    gpu, num_bytes = "", 0
    if get_accelerator().device_name() == "cuda":
        gpu, num_bytes = str(torch.cuda.get_device_properties(None).uuid), torch.cuda.max_memory_allocated()
    return {**found, "gpu": gpu, "gpu_bytes": num_bytes, "backend": backend}


def _saved(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Parameters at the begin and in the end, and the optimizer's states."""
    begin, end = ({**_read(folder / tag)} for tag in (BEGIN, END))
    states = {key: end.pop(key) for key in list(end) if not key.endswith(PARAMETERS)}
    return {key: tensor for key, tensor in begin.items() if key in end}, end, states


def _read(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    return {
        f"{name}, {kind}": checkpoint.read(name, kind) for name in checkpoint.names for kind in checkpoint.kinds(name)
    }


def assert_ran_on(side: Side, backend: str, num_gpus: int) -> None:
    """All ranks: with this backend, on so many GPUs together."""
    assert {rank["backend"] for rank in side.ranks} <= {backend, None}
    assert len({rank["gpu"] for rank in side.ranks if rank["gpu"]}) == num_gpus
    if num_gpus:
        assert all(rank["gpu"] and rank["gpu_bytes"] for rank in side.ranks)
        assert {device for rank in side.ranks for device in rank["devices"]} <= {"cuda"}


def assert_trained(side: Side) -> None:
    """There is something to compare: finite losses that differ, parameters that have changed."""
    losses = [loss for rank in side.ranks for loss in rank["losses"]]
    assert all(math.isfinite(loss) for loss in losses), losses
    assert len(set(losses)) > 1, losses
    both = side.begin.keys() & side.end.keys()
    assert not both or any(not torch.equal(side.begin[key], side.end[key]) for key in both)


def differences(found: Side, wanted: Side) -> dict[str, float]:
    """As in :class:`~gpu.capabilities.Tolerance`.

    Raises:
        AssertionError: what must be equal is not.
    """
    assert len(found.ranks) == len(wanted.ranks)
    for ours, theirs in zip(found.ranks, wanted.ranks, strict=True):
        assert ours["facts"] == theirs["facts"]
    _assert_equal(found.begin, wanted.begin)
    changed = {key: tensor.double() - wanted.begin[key] for key, tensor in wanted.end.items() if key in wanted.begin}
    return {
        "losses": max(_relative(a["losses"], b["losses"]) for a, b in zip(found.ranks, wanted.ranks, strict=True)),
        "norms": max(_relative(a["norms"], b["norms"]) for a, b in zip(found.ranks, wanted.ranks, strict=True)),
        "changes": _apart(found.end, wanted.end, changed or wanted.end),
        "states": _apart(found.states, wanted.states, wanted.states),
    }


def _relative(found: Sequence[float | None], wanted: Sequence[float | None]) -> float:
    assert [value is None for value in found] == [value is None for value in wanted], (found, wanted)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)


def _apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> float:
    """The norm of all differences, of that of ``scale``."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    apart = _norm(found[key].double() - tensor for key, tensor in wanted.items())
    whole = _norm(tensor.double() for tensor in scale.values())
    return apart / whole if whole else apart


def _norm(tensors: Any) -> float:
    return float(sum((tensor.square().sum().item() for tensor in tensors), 0.0)) ** 0.5


def _assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), f"{key} begins otherwise"
