"""Lines of a run's metrics file, with fakes of the engine's parts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config.section import PacelineConfig
from paceline.planning.switching import Decision
from paceline.planning.tuning import EXPERTS, SCHEDULE, DecisionLog, DecisionRecord
from paceline.report.metrics import TIMES
from paceline.report.run_records import LOADS, METRICS, START, SUMMARY
from paceline.runtime import run_log
from paceline.runtime.run_log import RunLog


class Clock:
    """A second of computing since the last time."""

    def read(self) -> dict[str, float]:
        return dict.fromkeys(TIMES, 0.0) | {"compute_s": 0.75, "wall_s": 1.0}


class Control:
    """The only rank."""

    def together(self, doing: str) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Engine:
    """The parts of an engine that a run's records tell of."""

    device, stage_id, dp_world_size, cut = "cpu", 0, 1, 4
    global_steps = global_samples = skipped_steps = 0
    rounding_errors = None

    def __init__(self) -> None:
        self.module = SimpleNamespace(
            parts=[0, 2, 4],
            held=[0],
            profile=None,
            total_parameters=2,
            anatomy=SimpleNamespace(num_layers=2),
            adapters=None,
            config=SimpleNamespace(model_type="llama"),
            describe=lambda: ["stage 0: embedding"],
            parameters=lambda: [torch.zeros(3)],
            expert_layers={"mlp": SimpleNamespace(num_empty=1)},
        )
        self.decisions, self.clock, self.averager = DecisionLog(), Clock(), None
        self.schedule = SimpleNamespace(name="kfkb k=2, micro-batch 4")
        self.optimizer = SimpleNamespace(max_change=None, loss_scale=1.0)
        self.monitor, self.experts = SimpleNamespace(enabled=False), SimpleNamespace(follow_load=True)
        self.kept: list[Any] = []

    def grad_norm(self) -> float:
        return 0.5

    def fp16_enabled(self) -> bool:
        return False

    def natural_gradient_report(self) -> None:
        return None

    def keep_records(self, run_dir: Path, num_steps: int) -> None:
        self.kept.append((run_dir, num_steps))


def decided(what: str, step: int, switched: bool = True) -> DecisionRecord:
    return DecisionRecord(what, step, switched, Decision(switched, "why", 2.0, 1.0, 0.5, 1.0, 0.0), 1.0, {})


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, RunLog]:
    """A log whose training has begun."""
    monkeypatch.setattr(run_log, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    section = PacelineConfig.model_validate({"pipeline": {"stages": 2}, "moe": {}})
    plan: Any = SimpleNamespace(
        section=section,
        report=section.report,
        moe=SimpleNamespace(loads_file=None),
        ds_config={},
        **{"stages": 2, "data_parallel": 1, "micro_batches": 8, "micro_batch_size": 4},
    )
    engine: Any = Engine()
    control: Any = Control()
    log = RunLog(engine, tmp_path, plan, control)
    log.begin(10)
    return engine, log


def lines(log: RunLog) -> list[dict[str, Any]]:
    log.metrics.close()
    return [json.loads(line) for line in (log.run_dir / METRICS).read_text().splitlines()]


def test_the_start_names_the_plan_and_the_file_of_loads(begun: tuple[Engine, RunLog]) -> None:
    engine, log = begun
    assert engine.kept == [(log.run_dir, 10)]
    start = json.loads((log.run_dir / START).read_text())
    assert (start["stages"], start["micro_batches"], start["planned_steps"]) == (2, 8, 10)
    assert start["expert_loads"] == LOADS
    assert start["paceline"]["pipeline"]["stages"] == 2
    assert log.totals.parameters == 2, "room without an expert is none"


def test_decisions_and_measurements_come_before_the_line_of_their_interval(begun: tuple[Engine, RunLog]) -> None:
    engine, log = begun
    log.add_step(1, 0.25, 2.0, 100)
    engine.decisions.add([decided(SCHEDULE, 1), decided(EXPERTS, 1), decided(EXPERTS, 1, switched=False)])
    engine.decisions.add_measurement({"step": 1, "measured_s": 0.25})
    running = log.add_step(2, 0.75, 4.0, 300)
    assert running.moves == 1
    told = log.report(2, 0.1, 1e-3)
    *written, look, line = lines(log)
    assert [(entry["step"], entry["decision"]["what"]) for entry in written] == [
        *((1, "schedule"), (1, "experts"), (1, "experts"))
    ]
    assert look == {"step": 1, "look": {"step": 1, "measured_s": 0.25}}
    assert line == told
    assert (line["loss"], line["grad_norm"], line["tokens"], line["tokens_per_s"]) == (3.0, 0.5, 400, 400.0)
    assert [(row["step"], row["moves"], row["seconds"]) for row in line["ran"]] == [(1, 0, [0.25]), (2, 1, [0.75])]
    assert engine.decisions.decisions == []


def test_a_folder_that_is_removed_has_what_comes_after(
    begun: tuple[Engine, RunLog], caplog: pytest.LogCaptureFixture
) -> None:
    """A line goes to a file that has a name, and the report of the run knows how it began."""
    log, start = begun[1], (begun[1].run_dir / START).read_text()
    log.add_step(1, 0.25, 2.0, 100)
    log.report(1, 0.1, 1e-3)
    shutil.rmtree(log.run_dir)
    log.add_step(2, 0.25, 2.0, 100)
    log.report(2, 0.1, 1e-3)
    assert [line["step"] for line in lines(log)] == [2]
    assert (log.run_dir / START).read_text() == start
    assert "metrics.jsonl was removed while the run writes it: it begins anew at step 2" in caplog.text


def test_a_run_that_is_left_keeps_what_was_not_reported(begun: tuple[Engine, RunLog]) -> None:
    engine, log = begun
    log.add_step(1, 0.25, 2.0, 100)
    engine.decisions.add([decided(EXPERTS, 1)])
    log.leave(1)
    decision, ran = lines(log)
    assert decision["decision"]["what"] == "experts"
    assert ran["ran"][0]["seconds"] == [0.25]


def test_a_run_that_ended_badly_is_warned_of(begun: tuple[Engine, RunLog], caplog: pytest.LogCaptureFixture) -> None:
    engine, log = begun
    log.evaluation = {"eval_loss": 2.0}
    for step, skipped in enumerate((1, 1, 2)):  # the last one alone is how a loss scale finds its height
        engine.skipped_steps = skipped
        log.add_step(step, 1.0, 2.0, 8)
    log.warn_of_the_end()
    assert not caplog.records
    engine.skipped_steps += 1
    log.add_step(3, 1.0, 2.0, 8)
    log.evaluation = {"eval_loss": math.nan}
    log.warn_of_the_end()
    told = "the last 2 steps were skipped, as their gradients were not finite and the held-out loss is nan; go on from"
    assert [told in record.message for record in caplog.records] == [True]


def test_a_summary_that_cannot_be_written_does_not_end_the_run(
    begun: tuple[Engine, RunLog], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script writes its model after it. What a full disk or a kill has left of one is no summary."""
    engine, log = begun
    monkeypatch.setattr(run_log, "skeleton", lambda config: None)
    monkeypatch.setattr(run_log, "flops_per_token", lambda *_, **__: 1.0)
    file = log.run_dir / SUMMARY
    file.mkdir()
    summary = log.summary(10, 8, 2.0)
    assert summary is not None
    assert summary["steps"] == 10
    assert [record.getMessage() for record in caplog.records] == [f"{file} is not written: Is a directory"]
    file.rmdir()
    file.write_text('{"steps": 10, "tok')
    engine.global_steps = 10
    log.begin(10)
    assert log.summary(10, 8, 2.0) == json.loads(file.read_text())
