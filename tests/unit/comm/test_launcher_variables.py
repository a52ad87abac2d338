"""Variables that ranks meet by, from those that the launchers of MPI and Slurm set."""

from __future__ import annotations

import pytest

from paceline.comm.launcher_variables import translate

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
INTEL = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-04,09]",
    "SLURM_JOB_ID": "71042",
}
OF_THREE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        (OPEN_MPI, OF_THREE),  # where rank 0 is, it does not say
        ({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, OF_THREE),
        (ONE_HOST, {**OF_THREE, **HERE, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}),
        (INTEL, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **HERE}),
        (
            SLURM,
            {
                **{"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "11", "LOCAL_WORLD_SIZE": "3"},
                **{"MASTER_ADDR": "gpu03", "MASTER_PORT": "29542"},
            },
        ),
        (  # with --gpus-per-task=1 each task has a first GPU of its own
            {**SLURM, "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0", "SLURM_LOCALID": "2"},
            {
                **{"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "11", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "gpu03", "MASTER_PORT": "29542"},
            },
        ),
        (  # with --gpu-bind=none beside it, all GPUs of the node
            {**SLURM, "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_LOCALID": "2"},
            {
                **{"RANK": "8", "LOCAL_RANK": "2", "WORLD_SIZE": "11", "LOCAL_WORLD_SIZE": "3"},
                **{"MASTER_ADDR": "gpu03", "MASTER_PORT": "29542"},
            },
        ),
        ({**SLURM, "MASTER_PORT": "1"}, None),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}, {}),  # torchrun in a step
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}),
        ({}, {}),
    ],
)
def test_variables_that_are_written(environment: dict[str, str], written: dict[str, str] | None) -> None:
    found = dict(environment)
    translate(found)
    if written is None:
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("gpu03", environment["MASTER_PORT"])
    else:
        assert {name: value for name, value in found.items() if name not in environment} == written


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-2]-ib,m1", "n1-ib"), ("a-b[007,9]", "a-b007"), ("m1,n[1-2]", "m1")],
)
def test_the_first_host_of_slurms_lists(hosts: str, first: str) -> None:
    found = {**SLURM, "SLURM_STEP_NODELIST": hosts}
    translate(found)
    assert found["MASTER_ADDR"] == first
