"""Make one process a world of its own, where no launcher has made it part of a larger one."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping

_LAUNCHED = (
    *("RANK", "LOCAL_RANK"),  # torchrun, accelerate, deepspeed
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE"),  # MPI, which DeepSpeed asks for ranks
)
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # Slurm sets the second for what srun starts, not for a batch script


def is_alone(environment: Mapping[str, str]) -> bool:
    """Whether this process was started by itself: plain ``python``, a notebook."""
    if any(environment.get(name) for name in _LAUNCHED):
        return False
    return all(environment.get(name, "1") in ("", "1") for name in _SIZES)


def become_a_world(environment: MutableMapping[str, str]) -> None:
    """Write what ``init_distributed`` reads: rank 0 of 1, meeting nobody at a free port of this host."""
    port = str(free_port())
    environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
