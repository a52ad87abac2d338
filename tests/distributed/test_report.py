"""The page of a run that the main job makes on real ranks, against what the run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.cli import main
from paceline.report.comparison import format_duration
from support.jobs import TINY, finetune, flags
from support.pages import check_page
from support.ranks import run_ranks

LATENCY_S = 0.05
STEPS, EVERY = 18, 4


def write_config(folder: Path, report: dict[str, Any], **pipeline: Any) -> Path:
    path = folder / "ds.json"
    section = {"pipeline": {"stages": 2, **pipeline}, "report": report}
    path.write_text(json.dumps({"gradient_accumulation_steps": 4, "paceline": section}))
    return path


def run_believing_in_slow_links(argv: list[str]) -> tuple[int, str]:
    """The job on ranks that are told that messages take long, so that another order than 1F1B looks good at once."""
    from paceline.runtime import rank_reports as observer

    compare = observer.compare_clocks
    observer.compare_clocks = lambda *args: (compare(*args)[0], LATENCY_S)
    return finetune(argv)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Output directory of a run that looks at schedule and partition every four steps, and what it said."""
    folder = tmp_path_factory.mktemp("report")
    config = write_config(
        folder,
        {},
        partition={"method": [0, 2, 6], "repartition_every": EVERY},
        schedule={"type": "adaptive", "retune_every": EVERY},
    )
    values = TINY | {"max_steps": STEPS, "logging_steps": 3, "eval_steps": 7}
    argv = flags(**values, eval_strategy="steps", deepspeed=config, output_dir=folder / "model")
    ranks = run_ranks(run_believing_in_slow_links, 2, argv)
    for code, errors in ranks:
        assert code == 0, errors
    return folder / "model", ranks[0][1]


def test_the_job_writes_a_page_and_says_where(tuned: tuple[Path, str]) -> None:
    output, told = tuned
    page = check_page((output / "report.html").read_text())
    assert f"report written to {output / 'report.html'}" in told
    assert page.headings == [
        *(
            "Loss, learning rate, gradient norm",
            "Command and JSON",
            "What was decided",
            "Step time",
            "Before and after",
            "Ranks",
            "Stages and links, as measured",
            "The run",
        )
    ]
    assert f"--output_dir {output}" in page.words
    assert f'"retune_every": {EVERY}' in page.words


def test_the_page_tells_what_was_decided(tuned: tuple[Path, str]) -> None:
    output, _ = tuned
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((output / "report.json").read_text())
    page = check_page((output / "report.html").read_text())
    raw = [line["decision"] for line in lines if "decision" in line]
    assert {decision["step"] for decision in raw} == {6, 10, 14}
    assert any(decision["switched"] for decision in raw)
    assert [(d["step"], d["kind"], d["switched"], d["why"]) for d in report["decisions"]] == [
        (d["step"], d["what"], d["switched"], d["why"]) for d in raw
    ]
    for decision in report["decisions"]:
        assert decision["why"] in page.words
        if decision["after"] is not None and decision["after"]["measured_s"] is not None:
            assert format_duration(decision["after"]["measured_s"]) in page.words
    measured = {line["look"]["step"]: line["look"] for line in lines if "look" in line}
    assert [row["step"] for row in report["links"]] == [6, 10, 14]
    assert all(edge["latency_s"] == LATENCY_S for row in report["links"] for edge in row["between"])
    for row in report["stages"]:
        assert row["forward_s"] == measured[row["step"]]["forward_s"]
        assert row["measured_s"] == next(d["measured_s"] for d in raw if d["step"] == row["step"])


def test_every_step_is_told_as_it_ran(tuned: tuple[Path, str]) -> None:
    output, told = tuned
    report = json.loads((output / "report.json").read_text())
    summary = json.loads((output / "summary.json").read_text())
    ran = report["configurations"]
    assert [step for one in ran for step in range(one["first_step"], one["last_step"] + 1)] == list(range(1, STEPS + 1))
    assert all(second > 0 for one in ran for second in one["seconds"])
    assert ran[0] | {"seconds": [], "last_step": 0} == ran[0] | {
        **{"first_step": 1, "last_step": 0, "schedule": "1f1b", "micro_batch_size": 2, "partition": [0, 2, 6]},
        **{"moves": 0, "seconds": []},
    }
    assert ran[-1]["partition"] == summary["boundaries"]
    assert f"{ran[-1]['schedule']}, micro-batch {ran[-1]['micro_batch_size']}" == summary["schedule"]
    assert report["headline"]["tokens_per_s"] == summary["tokens_per_s"]
    # What runs is at the end of each line of progress.
    last = next(line for line in reversed(told.splitlines()) if f"step {STEPS}/{STEPS}: loss" in line)
    assert "s/step" in last
    assert f" · {ran[-1]['schedule']} · " in last


def test_the_steps_around_a_switch_are_recorded_and_drawn(tuned: tuple[Path, str]) -> None:
    output, _ = tuned
    report = json.loads((output / "report.json").read_text())
    first = report["timelines"][0]
    switched = next(decision["step"] for decision in report["decisions"] if decision["switched"])
    assert (first["step"], first["before"]["step"], first["after"]["step"]) == (switched, switched, switched + EVERY)
    assert first["before"]["schedule"].startswith("zbh1")  # tried before the first choice
    assert first["after"]["schedule"] == next(
        f"{one['schedule']}, micro-batch {one['micro_batch_size']}"
        for one in report["configurations"]
        if one["first_step"] <= switched + EVERY <= one["last_step"]
    )
    labels = [
        value for name, value in check_page((output / "report.html").read_text()).attributes if name == "aria-label"
    ]
    assert any(label.startswith(f"before: step {switched}, zbh1") for label in labels)
    assert any(f"after: step {switched + EVERY}, " in label for label in labels)


def test_the_command_makes_the_same_page(tuned: tuple[Path, str], tmp_path: Path) -> None:
    output, _ = tuned
    assert main(["report", str(output), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == (output / "report.html").read_bytes()
    assert (tmp_path / "page.json").read_bytes() == (output / "report.json").read_bytes()


def test_off(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"html": False}, schedule={"type": "adaptive", "retune_every": EVERY})
    argv = flags(**TINY | {"max_steps": 9}, deepspeed=config, output_dir=tmp_path / "model")
    for code, errors in run_ranks(run_believing_in_slow_links, 2, argv):
        assert code == 0, errors
        assert "report written" not in errors
    assert not [path for path in (tmp_path / "model").iterdir() if path.name.startswith(("report", "trace"))]


def test_a_page_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "model"
    (output / "report.html").mkdir(parents=True)
    ranks = run_ranks(finetune, 2, flags(**TINY | {"max_steps": 2}, output_dir=output))
    assert [code for code, _ in ranks] == [0, 0]
    assert "no report: IsADirectoryError" in ranks[0][1]
    AutoModelForCausalLM.from_pretrained(output)
    assert json.loads((output / "summary.json").read_text())["steps"] == 2


@pytest.mark.parametrize(
    ("schedule", "parts", "routes"),
    [
        ({"type": "dualpipev"}, [0, 2, 3, 4, 6], [[0, 1, 1, 0]]),
        ({"type": "multidirection", "directions": 2}, [0, 3, 6], [[0, 1], [1, 0]]),
    ],
    ids=["dualpipev", "multidirection"],
)
def test_stages_of_devices_that_hold_several(
    schedule: dict[str, Any], parts: list[int], routes: list[list[int]], tmp_path: Path
) -> None:
    config = write_config(tmp_path, {}, schedule=schedule, partition={"method": parts, "repartition_every": 2})
    ranks = run_ranks(finetune, 2, flags(**TINY | {"max_steps": 7}, deepspeed=config, output_dir=tmp_path / "model"))
    for code, errors in ranks:
        assert code == 0, errors
    assert f"report written to {tmp_path / 'model' / 'report.html'}" in ranks[0][1]
    lines = [json.loads(line) for line in (tmp_path / "model" / "metrics.jsonl").read_text().splitlines()]
    looks = [line["look"] for line in lines if "look" in line]
    report = json.loads((tmp_path / "model" / "report.json").read_text())
    assert [row["step"] for row in report["stages"]] == [look["step"] for look in looks] == [4, 6]
    for row, look, links in zip(report["stages"], looks, report["links"], strict=True):
        assert look["routes"] == routes
        room = look["room_bytes"]
        assert row["room_bytes"] == [min(room[route[stage]] for route in routes) for stage in range(len(parts) - 1)]
        assert len(row["forward_s"]) == len(links["hosts"]) == len(parts) - 1
    assert "Stages and links, as measured" in check_page((tmp_path / "model" / "report.html").read_text()).headings
