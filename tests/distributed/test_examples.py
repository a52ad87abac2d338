"""Every example of launch/examples trains."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from support.archipelago import lighthouse
from support.ranks import PATIENCE_S, RANK_ENVIRONMENT, free_port, run_ranks

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"
LOOPS = {
    "pipeline": [],
    "adaptive": [],
    "compressed": [],
    "hetero": [],
    "unequal_replicas": [],
    "asynchronous": [],
    "natural_gradient": [],
    "experts": ["--family", "mixtral"],
}
TRAINERS = {"trainer": ["trainer.py"], "lora": ["trainer.py", "--lora"], "sft": ["sft.py"]}


def run_example(script: str, argv: list[str]) -> Any:
    return runpy.run_path(str(EXAMPLES / script))["main"](argv)


def run_loops(cases: dict[str, list[str]]) -> dict[str, list[float]]:
    """All on one world."""
    return {name: run_example("own_loop.py", [str(EXAMPLES / f"{name}.json"), *more]) for name, more in cases.items()}


def test_own_loop_with_every_json() -> None:
    for found in run_ranks(run_loops, 2, LOOPS):
        assert {name: len(losses) for name, losses in found.items()} == dict.fromkeys(LOOPS, 6)
        assert all(isfinite(loss) for losses in found.values() for loss in losses)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(name: str, tmp_path: Path) -> None:
    script, *more = TRAINERS[name]
    argv = [str(EXAMPLES / "pipeline.json"), "--output_dir", str(tmp_path), *more]
    losses = run_ranks(run_example, 2, script, argv)[0]
    assert len(losses) == 4
    assert (tmp_path / ("adapter_model.safetensors" if name == "lora" else "model.safetensors")).exists()
    assert (tmp_path / "report.html").exists()


def test_an_island(tmp_path: Path) -> None:
    """The least number of islands in this JSON is one, so that it can be tried alone."""
    config = json.loads((EXAMPLES / "islands.json").read_text())
    with lighthouse() as address:
        config["paceline"]["averaging"]["lighthouse"] = address
        (tmp_path / "islands.json").write_text(json.dumps(config))
        argv = [str(tmp_path / "islands.json")]
        losses = run_ranks(run_example, 2, "own_loop.py", argv, env={**RANK_ENVIRONMENT, "PACELINE_ISLAND": "0"})[0]
    assert len(losses) == 6


@pytest.mark.launcher
def test_a_plan_and_its_run() -> None:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": search, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    environment["MASTER_PORT"] = str(free_port())
    run = subprocess.run(
        ["bash", str(EXAMPLES / "plan.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "3 strategies" in run.stdout
    assert "step 4/4: loss" in run.stdout + run.stderr


def test_every_example_is_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or f"]({path.name})" in listed, path.name
        assert len(path.read_text().splitlines()) <= 60, path.name
    assert set(LOOPS) | {"islands"} == {path.stem for path in EXAMPLES.glob("*.json")}
