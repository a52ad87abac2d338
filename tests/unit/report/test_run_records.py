"""Records of a run, read back. Those in ``runs/`` were written by the main job on real ranks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.report.run_records import read, runs_in, write_start

RUNS = Path(__file__).parent / "runs"


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A run of two stages whose schedule and layers changed."""
    return Path(shutil.copytree(RUNS / "tuned", tmp_path / "tuned"))


def test_everything_is_read(tuned: Path) -> None:
    records = read(tuned)
    lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert (records.name, records.problems) == ("tuned", ())
    assert [line["loss"] for line in records.having("loss")] == [line["loss"] for line in lines if "loss" in line]
    assert [line["step"] for line in records.having("eval_loss")] == [0, 20, 40, 60]
    assert records.inner("decision") == [line["decision"] for line in lines if "decision" in line]
    assert records.inner("look") == [line["look"] for line in lines if "look" in line]
    kinds = (records.having("loss"), records.having("eval_loss"), records.inner("decision"), records.inner("look"))
    assert sum(map(len, kinds)) == len(lines)
    assert [trace.step for trace in records.traces] == [8, 12, 48, 52]
    assert records.summary is not None
    assert records.summary["steps"] == records.start["planned_steps"] == 60


def test_a_killed_run_ends_in_the_middle_of_a_line(tuned: Path) -> None:
    whole = read(tuned)
    (tuned / "summary.json").unlink()
    text = (tuned / "metrics.jsonl").read_text()
    (tuned / "metrics.jsonl").write_text(text[:-20])
    records = read(tuned)
    assert records.summary is None
    assert records.lines == whole.lines[:-1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": \n{"step": 2}\n', "metrics.jsonl, line 2 is not what a run writes"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl, line 1 is not what a run writes (it is no object with a st"),
        ("metrics.jsonl", '{"step": true}\n', "metrics.jsonl, line 1 is not what a run writes"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "metrics.jsonl, line 1 is not what a run writes (it is nested"),
        ("summary.json", "[]", "summary.json is not what a run writes (it is no object): remove it."),
        ("run.json", "{", "run.json is not what a run writes"),
        ("run.json", "[" * 100_000, "run.json is not what a run writes (it is nested too deeply): remove it."),
    ],
)
def test_what_no_run_writes_is_one_line(tuned: Path, name: str, content: str, message: str) -> None:
    (tuned / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(tuned)
    assert "\n" not in str(caught.value)


def test_pictures_and_loads_that_cannot_be_read_are_left_out(tuned: Path) -> None:
    (tuned / "trace" / "step-8.json").write_text("{}")
    (tuned / "expert_loads.jsonl").write_text("{}\n")
    start = json.loads((tuned / "run.json").read_text())
    (tuned / "run.json").write_text(json.dumps({**start, "expert_loads": "expert_loads.jsonl"}))
    records = read(tuned)
    assert (records.traces, records.loads) == ((), None)
    assert ["step-8.json is no record" in records.problems[0], "line 1 is no window" in records.problems[1]] == [
        True
    ] * 2


def test_what_an_earlier_run_said_of_later_steps_goes(tuned: Path) -> None:
    cut_off = (tuned / "metrics.jsonl").read_text() + '{"step": 3'
    (tuned / "metrics.jsonl").write_text(cut_off)
    drawn = [f"step-{step}.{kind}" for step in (12, 48, 60) for kind in ("perfetto.json", "png", "svg")]
    for name in (*drawn, "step-48.txt"):
        (tuned / "trace" / name).touch()
    write_start(tuned, {"first_step": 12, "rate": float("inf")})
    files = {path.name for path in (tuned / "trace").iterdir()}
    assert files == {"step-8.json", "step-12.json", *drawn[:3], "step-48.txt"}
    records = read(tuned)
    kinds = (*records.having("loss"), *records.inner("decision"), *records.inner("look"))
    assert max(line["step"] for line in kinds) == 12
    assert records.summary is None
    assert [trace.step for trace in records.traces] == [8, 12]
    assert records.start == {"first_step": 12, "rate": None, "resumed_after": [12]}
    for step in (14, 20, 17, 17):
        write_start(tuned, {"first_step": step})
    assert read(tuned).start["resumed_after"] == [12, 14, 17]
    write_start(tuned, {"first_step": 0})
    records = read(tuned)
    assert records.start["resumed_after"] == []
    assert (records.having("loss"), records.traces) == ([], ())


def test_loads_are_those_of_the_run(tuned: Path) -> None:
    """Not of an earlier one in the same directory; a line that was cut off is left out."""
    loads = (RUNS / "experts" / "expert_loads.jsonl").read_text()
    (tuned / "expert_loads.jsonl").write_text(loads)
    assert read(tuned).loads is None
    start = json.loads((tuned / "run.json").read_text())
    (tuned / "run.json").write_text(json.dumps({**start, "expert_loads": "expert_loads.jsonl"}))
    whole = read(tuned).loads
    assert whole
    (tuned / "expert_loads.jsonl").write_text(loads[:-30])
    records = read(tuned)
    assert records.problems == ()
    assert records.loads == {name: windows[:-1] for name, windows in whole.items()}


def test_a_run_or_the_islands_in_a_directory(tmp_path: Path) -> None:
    assert runs_in(RUNS / "tuned") == [RUNS / "tuned"]
    for number in (10, 2):
        shutil.copytree(RUNS / "island0", tmp_path / f"island{number}")
    (tmp_path / "island3").mkdir()  # wrote nothing
    assert runs_in(tmp_path) == [tmp_path / "island2", tmp_path / "island10"]
    with pytest.raises(ValueError, match="holds no records of a run"):
        runs_in(tmp_path / "island3")
    with pytest.raises(ValueError, match="is no directory"):
        runs_in(tmp_path / "nowhere")
