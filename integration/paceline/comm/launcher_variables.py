"""The variables that ranks meet by, where MPI's or Slurm's launcher has started them with others."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

_OTHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""Those that torch and DeepSpeed read, and in the same order those of Open MPI, of MPICH and Intel MPI, and of srun."""

_PORT = 29500
"""DeepSpeed's and torch's."""

_MOST_JOBS = 1000
"""Jobs with ports of their own on one host."""


def translate(environment: MutableMapping[str, str]) -> None:
    """Write RANK, WORLD_SIZE and the others, where a process that ``mpirun`` or ``srun`` has started lacks them.

    Where rank 0 is, Slurm says, and MPI if all ranks are on this host; otherwise MASTER_ADDR and MASTER_PORT stay
    absent. A task to which Slurm shows GPUs of its own is made the only rank of its host, so that it takes the first.
    A single process, and one that another launcher has started within such a step, is left as it is.
    """
    if environment.get("RANK"):
        return
    found = _found(environment)
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= found.keys() or found["WORLD_SIZE"] == "1":
        return
    found |= _meeting(environment, found)
    if _sees_its_own_devices(environment, found.get("LOCAL_WORLD_SIZE", "1")):
        found |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in found.items():
        if not environment.get(name):
            environment[name] = value


def _found(environment: Mapping[str, str]) -> dict[str, str]:
    """Values of the first launcher that says both rank and size: tasks of srun may have MPI's variables too."""
    found: dict[str, str] = {}
    for place in range(3):
        names = {name: others[place] for name, others in _OTHERS.items() if place < len(others)}
        found = {name: environment[other] for name, other in names.items() if environment.get(other)}
        if {"RANK", "WORLD_SIZE"} <= found.keys():
            break
    if "LOCAL_WORLD_SIZE" not in found and (size := _slurms_local_size(environment)):
        found["LOCAL_WORLD_SIZE"] = size
    if "LOCAL_RANK" not in found and environment.get("SLURM_LOCALID"):
        found["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    return found


def _slurms_local_size(environment: Mapping[str, str]) -> str:
    """Tasks of this step on this host: of ``"4(x2),3"``, 4 on each of the first two hosts, 3 on the third."""
    counts: list[str] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [match[1]] * int(match[2] or 1)
    host = environment.get("SLURM_NODEID", "")
    return counts[int(host)] if host.isdecimal() and int(host) < len(counts) else ""


def _sees_its_own_devices(environment: Mapping[str, str], local_size: str) -> bool:
    """Whether Slurm shows each task on this host other GPUs than its neighbours, as with ``--gpus-per-task``."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return bool(visible and environment.get("SLURM_GPUS_PER_TASK")) and len(visible.split(",")) < int(local_size)


def _meeting(environment: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    job = environment.get("SLURM_JOB_ID", "")
    port = str(_PORT + (int(job) % _MOST_JOBS if job.isdecimal() else 0))
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if first := _first_host(environment.get("SLURM_STEP_NODELIST", "")):
        return {"MASTER_ADDR": first, "MASTER_PORT": port}
    return {}


def _first_host(hosts: str) -> str:
    """The first in Slurm's list, such as ``"gpu[03-05,09],cpu1"``. It has the first task, unless ``--distribution`` is
    ``arbitrary``."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^\[,]*))?", hosts)
    return "" if match is None else "".join(part or "" for part in match.groups())
