"""Whether a process was started by itself, and what makes it a world."""

from __future__ import annotations

import pytest

from paceline.comm.single_process import become_a_world, is_alone


@pytest.mark.parametrize(
    ("environment", "alone"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "host"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "0"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"PMIX_RANK": "0"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True),
        ({"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, True),  # srun --pty bash
    ],
)
def test_who_is_alone(environment: dict[str, str], alone: bool) -> None:
    assert is_alone(environment) is alone


def test_a_world_of_one() -> None:
    environment = {"MASTER_PORT": "29500", "PATH": "kept"}
    become_a_world(environment)
    port = environment.pop("MASTER_PORT")
    assert port != "29500", "a notebook may run beside a job"
    assert environment == {
        "PATH": "kept",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert not is_alone(environment)
