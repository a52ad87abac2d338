"""Every example of launch/examples trains."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import cli
from support.archipelago import lighthouse
from support.jobs import finetune
from support.ranks import PATIENCE_S, RANK_ENVIRONMENT, run_ranks

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"
LOOPS = {
    "pipeline": [],
    "adaptive": [],
    "compressed": [],
    "hetero": [],
    "unequal_replicas": [],
    "asynchronous": [],
    "natural_gradient": [],
    "slices": [],
    "experts": ["--family", "mixtral"],
}
TRAINERS = {"trainer": ["trainer.py"], "lora": ["trainer.py", "--lora"], "sft": ["sft.py"]}


def run_example(script: str, argv: list[str]) -> Any:
    return runpy.run_path(str(EXAMPLES / script))["main"](argv)


def run_loops(cases: dict[str, list[str]]) -> dict[str, list[float]]:
    """All on one world. What they do every second step they do twice."""
    return {
        name: run_example("own_loop.py", [str(EXAMPLES / f"{name}.json"), "--steps", "4", *more])
        for name, more in cases.items()
    }


def test_own_loop_with_every_json() -> None:
    for found in run_ranks(run_loops, 2, LOOPS):
        assert {name: len(losses) for name, losses in found.items()} == dict.fromkeys(LOOPS, 4)
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
        argv = [str(tmp_path / "islands.json"), "--steps", "4"]
        losses = run_ranks(run_example, 2, "own_loop.py", argv, env={**RANK_ENVIRONMENT, "PACELINE_ISLAND": "0"})[0]
    assert len(losses) == 4


COMMAND = """#!{python}
import sys
from multiprocessing.connection import Client
with Client({address!r}) as line:
    line.send(sys.argv)
    sys.exit(line.recv())
"""


@contextmanager
def commands(folder: Path, **acts: Callable[[list[str]], Any]) -> Iterator[str]:
    """A PATH on which commands are calls of this process, whose results are their status, or what they complain of."""
    with Listener(str(folder / "line")) as listener:
        for name in acts:
            (folder / name).write_text(COMMAND.format(python=sys.executable, address=listener.address))
            (folder / name).chmod(0o755)

        def serve() -> None:
            while True:
                with listener.accept() as line:
                    command, *argv = line.recv()
                    if command == "end":
                        return
                    try:
                        told = acts[Path(command).name](argv)
                    except Exception as error:
                        told = f"{type(error).__name__}: {error}"
                    line.send(told)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(serve)
            try:
                yield os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
            finally:
                with Client(listener.address) as line:
                    line.send(["end"])


def measured(argv: list[str]) -> int:
    from paceline.launch.measure import main

    return main(argv)


def test_a_plan_and_its_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two commands, without the launcher, which ``test_measured_first`` and the main job's test start."""
    from transformers import AutoConfig

    from paceline.hf.layer_profile import fingerprint

    models: list[Any] = []

    def launched(argv: list[str], function: Callable[[list[str]], Any], module: str) -> list[Any]:
        assert argv[:3] == ["--num_gpus", "2", "--master_port"]
        assert argv[4:6] == ["--module", module]
        return run_ranks(function, 2, argv[6:])

    def measure(command: list[str]) -> str:
        return str(launched(command[3:], measured, "paceline.launch.measure"))

    def train(argv: list[str]) -> int:
        ((code, errors), _) = launched(argv, finetune, "paceline.launch.finetune")
        print(errors)
        output = Path(argv[argv.index("--output_dir") + 1])
        for path in (output.parent / "config.json", output):
            models.append({**fingerprint(AutoConfig.from_pretrained(path)), "vocab_size": None})  # the tokenizer's
        return code

    monkeypatch.setattr("paceline.launch.plan._output", measure)
    with commands(tmp_path, paceline=cli.main, deepspeed=train) as path:
        run = subprocess.run(
            ["bash", str(EXAMPLES / "plan.sh")],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-3000:]
    planned, trained = models
    assert planned == trained
    told = capfd.readouterr().out
    assert "3 strategies" in told
    assert "step 4/4: loss" in told


def test_every_example_is_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or f"]({path.name})" in listed, path.name
        assert len(path.read_text().splitlines()) <= 60, path.name
    assert set(LOOPS) | {"islands"} == {path.stem for path in EXAMPLES.glob("*.json")}
