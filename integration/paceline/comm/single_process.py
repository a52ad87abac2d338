"""Make one process a world of its own, where no launcher has made it part of a larger one."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping

_LAUNCHED = ("RANK", "LOCAL_RANK")  # torchrun, accelerate, deepspeed
_SIZES = (
    *("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "SLURM_STEP_NUM_TASKS",  # for what srun starts, not for a batch script
)


def is_alone(environment: Mapping[str, str]) -> bool:
    """Whether this process is the only one: plain ``python``, a notebook, ``mpirun`` or ``srun`` with one task."""
    if any(environment.get(name) for name in _LAUNCHED):
        return False
    sizes = {environment[name] for name in _SIZES if environment.get(name)}
    return sizes == {"1"} or not (sizes or environment.get("PMIX_RANK"))


def become_a_world(environment: MutableMapping[str, str]) -> None:
    """Write what ``init_distributed`` reads: rank 0 of 1, meeting nobody at a free port of this host."""
    port = str(free_port())
    environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
