"""Recorded steps of pipelines whose ranks hold several stages, or whose steps run into each other."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.launch.cli import main
from paceline.report import step_records
from paceline.schedules import asynchronous
from paceline.schedules.families import dualpipev, interleaved
from paceline.schedules.schedule import Schedule
from paceline.schedules.split_families import zbh1
from paceline.schedules.stream import UPDATE, Stream
from paceline.schedules.timeline import Timeline
from support import expert_pipelines
from support.jobs import TINY, ds_config, finetune, flags, model_config, step_batches
from support.pages import check_page
from support.ranks import run_ranks

MICRO_BATCHES, STEPS = 4, 4

CASES: dict[str, tuple[int, Any, Schedule | Stream]] = {
    "interleaved": (2, {"type": "interleaved", "chunks": 2}, interleaved(2, MICRO_BATCHES, 2)),
    "dualpipev": (2, {"type": "dualpipev"}, dualpipev(2, MICRO_BATCHES)),
    "multidirection": (4, {"type": "multidirection"}, asynchronous.multidirection(4, MICRO_BATCHES)),
    "multidirection with a flush": (
        *(2, {"type": "multidirection", "staleness": 0, "directions": 2}),
        asynchronous.multidirection(2, MICRO_BATCHES, 2).unrolled(1),
    ),
    "one_direction": (3, {"type": "one_direction"}, asynchronous.one_direction(3, MICRO_BATCHES)),
}


def train(folder: Path, devices: int, schedule: Any, section: dict[str, Any], flush_after: int) -> list[float]:
    import paceline

    torch.manual_seed(3)
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES,
        paceline={"pipeline": {"stages": devices, "schedule": schedule}, **section},
    )
    engine, *_ = paceline.initialize(model=model_config("llama", num_hidden_layers=6), config=config)
    engine.keep_records(folder, STEPS)
    losses = []
    for step in range(STEPS):
        losses.append(engine.train_batch(iter((step_batches(step) * 2)[:MICRO_BATCHES])).item())
        if step == flush_after:
            engine.flush()
    engine.destroy()
    return losses


def ran(line: Timeline, rank: int) -> list[tuple[str, int, int]]:
    """Computations of a rank in the order in which they began."""
    own = sorted((s for s in line.spans if s.rank == rank and s.kind in ("F", "B")), key=lambda span: span.start_s)
    return [(span.kind, span.micro_batch, span.chunk) for span in own]


def expected(order: Schedule | Stream, rank: int, begun: int) -> list[tuple[str, int, int]]:
    if isinstance(order, Schedule):
        return [tuple(action) for action in order.orders[rank]]  # type: ignore[misc]
    windows = [[a for a in order.window(r, begun) if a.kind != UPDATE] for r in range(order.num_ranks)]
    oldest = max(action.lag for window in windows for action in window)
    return [(a.kind, (oldest - a.lag) * MICRO_BATCHES + a.micro_batch, a.chunk) for a in windows[rank]]


@pytest.mark.parametrize("name", CASES)
def test_a_record_has_every_action_once_in_order_on_its_stage(name: str, tmp_path: Path) -> None:
    """And to record a step changes no number."""
    devices, schedule, order = CASES[name]
    flush_after = 1  # of four steps: the third one begins a run anew, where nothing lags
    traced = {"report": {"trace_every": 1}}
    losses = run_ranks(train, devices, tmp_path / "traced", devices, schedule, traced, flush_after)
    if name == "one_direction":
        plain = {"report": {"html": False}}
        assert losses == run_ranks(train, devices, tmp_path / "plain", devices, schedule, plain, flush_after)
        assert not (tmp_path / "plain").exists()
    records = step_records.read(tmp_path / "traced")
    assert [record.step for record in records] == [1, 2, 3, 4]
    routes = order.routes or (tuple(stage % devices for stage in range(order.num_stages)),)
    for record, begun in zip(records, (0, 1, 0, 1), strict=True):
        assert record.predicted is not None
        assert record.predicted_s is not None
        assert record.predicted_s > 0
        assert record.measured.stages == record.predicted.stages
        for rank in range(devices):
            wanted = expected(order, rank, begun)
            assert ran(record.measured, rank) == ran(record.predicted, rank) == wanted
            for _, micro_batch, chunk in wanted:
                stage = record.measured.stage(rank, chunk)
                assert stage is not None
                assert routes[micro_batch % len(routes)][stage] == rank
        assert record.measured.transfers
        for sent in record.measured.transfers:
            stage = record.measured.stage(sent.source, sent.chunk)
            assert stage is not None
            step = 1 if sent.kind == "activation" else -1
            assert routes[sent.micro_batch % len(routes)][stage + step] == sent.target


def train_and_move_experts(folder: Path) -> list[bool]:
    """Whether each step was flushed by its end: experts move wherever there is something to be gained."""
    from dataclasses import replace

    from paceline.planning.switching import SwitchRule

    consider = SwitchRule.consider
    SwitchRule.consider = lambda *args: replace(consider(*args), switch=True)  # type: ignore[method-assign]
    pipeline = {"stages": 2, "partition": "uniform", "schedule": "one_direction"}
    sections = {"moe": {"rebalance_every": 3}, "report": {"trace_every": 1}}
    engine = expert_pipelines.make(expert_pipelines.Case(), 2, 2, pipeline=pipeline, **sections)
    engine.keep_records(folder, STEPS)
    flushed = []
    for step in range(STEPS):
        expert_pipelines.steps(engine, step, 1)
        flushed.append(engine.asynchronous.is_settled)
    engine.destroy()
    return flushed


def test_a_step_is_recorded_that_was_flushed_at_its_end(tmp_path: Path) -> None:
    """Where experts move after it."""
    for flushed in run_ranks(train_and_move_experts, 4, tmp_path):
        assert flushed == [False, False, True, False]
    assert [record.step for record in step_records.read(tmp_path)] == [1, 2, 3, 4]


SLEEPS_S = 0.2
"""Seconds of each forward of the second replica."""


def train_unequal(folder: Path) -> None:
    import paceline

    pipeline = {"stages": 1, "unequal_replicas": {"micro_batches": [3, 1]}}
    sections = {"pipeline": pipeline, "report": {"trace_every": STEPS}}
    engine, *_ = paceline.initialize(
        model=model_config(), config=ds_config(gradient_accumulation_steps=2, paceline=sections)
    )
    engine.keep_records(folder, STEPS)
    if engine.grid.data_parallel_id:
        engine.module.models[0].register_forward_pre_hook(lambda *_: time.sleep(SLEEPS_S))
    for step in range(STEPS):
        engine.train_batch(iter(step_batches(step)))
    engine.destroy()


def test_a_prediction_is_of_the_replica_that_was_recorded(tmp_path: Path) -> None:
    """Its micro-batches, and its times: the slower replica has fewer."""
    run_ranks(train_unequal, 2, tmp_path)
    (record,) = step_records.read(tmp_path)
    assert record.predicted is not None
    for line in (record.measured, record.predicted):
        forwards = [span.end_s - span.start_s for span in line.spans if span.kind == "F"]
        assert len(forwards) == 3
        assert max(forwards) < SLEEPS_S


def train_split(folder: Path) -> str:
    import paceline

    pipeline = {"stages": 2, "schedule": "1f1b"}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": pipeline})
    engine, *_ = paceline.initialize(model=model_config("llama", num_hidden_layers=4), config=config)
    engine.set_schedule(zbh1(2, MICRO_BATCHES))
    engine.keep_records(folder, 2)
    for step in range(2):
        engine.train_batch(iter((step_batches(step) * 2)[:MICRO_BATCHES]))
    engine.destroy()
    return str(engine.schedule.name)


def test_split_backwards_are_recorded_beside_their_prediction(tmp_path: Path) -> None:
    order = zbh1(2, MICRO_BATCHES)
    assert run_ranks(train_split, 2, tmp_path) == [order.name] * 2
    (record,) = step_records.read(tmp_path)
    assert record.predicted is not None
    for line in (record.measured, record.predicted):
        for rank in range(2):
            own = sorted((s for s in line.spans if s.rank == rank and s.micro_batch >= 0), key=lambda s: s.start_s)
            assert [(s.kind, s.micro_batch, s.chunk) for s in own] == [tuple(a) for a in order.orders[rank]]
        assert Counter(sent.kind for sent in line.transfers) == dict.fromkeys(("activation", "gradient"), MICRO_BATCHES)


def test_the_report_of_a_run_has_its_last_step_whatever_the_schedule(tmp_path: Path) -> None:
    config, output, name = tmp_path / "ds.json", tmp_path / "model", "multidirection"
    section = {"pipeline": {"stages": 2, "schedule": {"type": name, "directions": 2}}}
    config.write_text(json.dumps({"gradient_accumulation_steps": 4, "paceline": section}))
    for code, errors in run_ranks(finetune, 2, flags(**TINY | {"max_steps": 3}, deepspeed=config, output_dir=output)):
        assert code == 0, errors
    (record,) = step_records.read(output)
    assert record.step == 3
    page = check_page((output / "report.html").read_text())
    assert any(key == "aria-label" and name in value for key, value in page.attributes)
    assert main(["trace", str(output)]) == 0
    events = json.loads((output / "trace" / "step-3.perfetto.json").read_text())["traceEvents"]
    slices = [event["args"] for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    held = {(0, 0), (1, 1), (0, 1), (1, 0)}
    assert {(args["chunk"], args["stage"]) for args in slices} == held
