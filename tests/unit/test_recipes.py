"""The shell scripts: they parse, and the recipes call the launcher as they should."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "launch" / "recipes"
SCRIPTS = [
    REPOSITORY / ".ci" / "run",
    REPOSITORY / "tests" / "run.sh",
    *sorted((REPOSITORY / "launch").glob("*.sh")),
    *sorted(RECIPES.glob("*.sh")),
    *sorted(RECIPES.glob("*.sbatch")),
]
ARGUMENTS = ["--deepspeed", "config.json", "--model_name_or_path", "my model"]
VARIABLES = ("CUDA_VISIBLE_DEVICES", "DRY_RUN", "MASTER_ADDR", "MASTER_PORT", "NUM_GPUS")

DEEPSPEED = """#!/usr/bin/env bash
hostfile=$(sed -n 's/.*--hostfile \\([^ ]*\\) .*/\\1/p' <<<"$*")
printf '<%s> ' "${@/$hostfile/HOSTFILE}"
echo "$(paste -sd, "$hostfile")"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $* == "show hostnames node-[a-b]" ]]; then printf 'node-a\\nnode-b\\n'; else echo "scontrol $*"; fi
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done
exit "${SRUN_CODE:-0}"
"""


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    done = run("bash", "-n", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_node() -> None:
    finetune = (
        "--master_port 29500 --module paceline.launch.finetune --deepspeed config.json --model_name_or_path my model\n"
    )
    recipe = RECIPES / "one_node.sh"
    assert run("bash", recipe, *ARGUMENTS, DRY_RUN="1").stdout == f"deepspeed {finetune}"
    assert run("bash", recipe, *ARGUMENTS, DRY_RUN="1", NUM_GPUS="4").stdout == f"deepspeed --num_gpus 4 {finetune}"


def test_several_nodes() -> None:
    recipe, hostfile = RECIPES / "several_nodes.sh", RECIPES / "hostfile.example"
    done = run("bash", recipe, hostfile, "--epochs", "1", DRY_RUN="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    assert done.stdout == (
        f"deepspeed --hostfile {hostfile} --master_addr 10.0.0.1 --master_port 1234 "
        "--module paceline.launch.finetune --epochs 1\n"
    )


def test_several_nodes_without_hostfile() -> None:
    done = run("bash", RECIPES / "several_nodes.sh", "--epochs", "1", DRY_RUN="1")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_the_launcher_reads_the_example_of_a_hostfile() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(RECIPES / "hostfile.example"))) == {"node-a": 4, "node-b": 4}


def test_slurm(tmp_path: Path) -> None:
    for name, text in {"deepspeed": DEEPSPEED, "scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "TMPDIR": str(tmp_path),
        "SLURM_CPUS_ON_NODE": "16",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node-[a-b]",
    }
    done = run("bash", RECIPES / "slurm.sbatch", "--model_name_or_path", "my model", **slurm)
    assert done.returncode == 0, done.stderr
    expected = (
        "<--no_ssh> <--node_rank> <{node}> <--hostfile> <HOSTFILE> <--master_addr> <node-a> <--master_port> <24567> "
        "<--module> <paceline.launch.finetune> <--resume_from_checkpoint> <auto> <--model_name_or_path> <my model> "
        "node-a slots=8,node-b slots=8"
    )
    assert done.stdout.splitlines() == [expected.format(node=0), expected.format(node=1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepspeed", "scontrol", "srun"]

    failed = run("bash", RECIPES / "slurm.sbatch", **slurm, SRUN_CODE="1")
    assert failed.returncode == 1
    assert "requeue" not in failed.stdout
    stopped = run("bash", RECIPES / "slurm.sbatch", **slurm, SRUN_CODE="143")
    assert stopped.returncode == 143
    assert stopped.stdout.splitlines()[-1] == "scontrol requeue 1234567"
