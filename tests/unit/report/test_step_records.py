"""What a run records of its steps: written whole, read strictly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.report.step_records import StepRecord, read, write
from support.timelines import gpipe_timeline


def record(step: int, **changes: Any) -> StepRecord:
    predicted, measured = gpipe_timeline(2, 2, name="predicted"), gpipe_timeline(2, 2, backward_s=0.05)
    return replace(StepRecord(step, "gpipe", predicted, measured, predicted.end_s, measured.end_s), **changes)


def test_round_trip_in_order_of_steps(tmp_path: Path) -> None:
    records = [record(step) for step in (2, 9, 10)]
    records[1] = replace(records[1], predicted=None, predicted_s=None)
    for one in reversed(records):
        path = write(tmp_path, one)
        assert path == tmp_path / "trace" / f"step-{one.step}.json"
    assert read(tmp_path) == records
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "step-10.json",
        "step-2.json",
        "step-9.json",
    ]


def test_the_file(tmp_path: Path) -> None:
    one = record(7)
    values = json.loads(write(tmp_path, one).read_text())
    assert list(values) == ["step", "schedule", "predicted", "measured", "predicted_s", "measured_s"]
    assert values["predicted"]["spans"][0] == [0, "F", 0, 0, 0.0, 0.02]
    assert (values["step"], values["schedule"], values["measured_s"]) == (7, "gpipe", one.measured_s)


def test_a_step_that_ran_again_replaces_its_record(tmp_path: Path) -> None:
    write(tmp_path, record(5))
    write(tmp_path, record(5, schedule="kfkb k=2"))
    assert [one.schedule for one in read(tmp_path)] == ["kfkb k=2"]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, record(5))
    with pytest.raises(ValueError, match="JSON"):
        write(tmp_path, record(5, measured_s=float("nan")))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step-5.json"]
    assert read(tmp_path) == [record(5)]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, record(5))
    for name in ("step-5.svg", "step-5.perfetto.json", ".step-6.json.4711", "notes.json"):
        (tmp_path / "trace" / name).write_text("{")
    assert read(tmp_path) == [record(5)]


@pytest.mark.parametrize("prepare", [lambda run: None, lambda run: (run / "trace").mkdir()])
def test_nothing_recorded(tmp_path: Path, prepare: Any) -> None:
    prepare(tmp_path)
    with pytest.raises(
        ValueError, match=r'no recorded steps in trace/: set "paceline": \{"report": \{"trace_every": N\}'
    ):
        read(tmp_path)
    with pytest.raises(ValueError, match="elsewhere is no directory: give the output directory of a run"):
        read(tmp_path / "elsewhere")


SPAN = [0, "F", 0, 0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"step": 6}, "it says step 6"),
        ({"more": 1}, "exactly step, schedule, predicted, measured, predicted_s, measured_s"),
        ({"measured": None}, "no timeline"),
        ({"measured": {"num_ranks": 1}}, "no timeline"),
        ({"measured": {"num_ranks": 1, "spans": [[0, "F"]]}}, "no timeline"),
        ({"measured": {"num_ranks": 1, "spans": [[*SPAN[:4], "soon", 1.0]]}}, "start_s is 'soon', not a time"),
        ({"measured": {"num_ranks": 1, "spans": [[*SPAN[:4], 2.0, 1.0]]}}, "ends before it starts"),
        ({"measured": {"num_ranks": 1, "spans": [[1, *SPAN[1:]]]}}, "rank 1 is not one of 1"),
        ({"predicted": {"num_ranks": 1, "spans": [[None, *SPAN[1:]]]}}, "rank None is not one of 1"),
        ({"predicted": {"num_ranks": 1, "spans": [[False, *SPAN[1:]]]}}, "rank False is not one of 1"),
        ({"predicted": {"num_ranks": 1, "spans": [[0.0, *SPAN[1:]]]}}, "rank 0.0 is not one of 1"),
        ({"measured": {"num_ranks": 1, "spans": [[0, None, *SPAN[2:]]]}}, "kind of a span is None"),
        ({"measured": {"num_ranks": 1, "spans": [[0, "", *SPAN[2:]]]}}, "kind of a span is ''"),
        ({"measured": {"num_ranks": 10**9, "spans": [SPAN]}}, "num_ranks is 1000000000 and must be a whole number up"),
        ({"measured": {"num_ranks": 1, "spans": [[0, "F", "0", *SPAN[3:]]]}}, "micro_batch of a span is '0'"),
        ({"measured_s": None}, "measured_s is None, not a time in seconds"),
        ({"predicted_s": -1.0}, "predicted_s is -1.0, not a time in seconds"),
        ({"measured_s": float("nan")}, "measured_s is nan"),
    ],
)
def test_a_foreign_record_is_named(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    write(tmp_path, record(4))
    path = write(tmp_path, record(5))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=rule) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{path} is no record of a step (")
    assert str(error.value).endswith("): remove it, or record again.")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("step-5.json", b'{"step": 5, "sched'),
        ("step-5.json", b"\xff\xfe"),
        ("step-5.json", b"[]"),
        ("step-05.json", b"{}"),
        ("step-last.json", b"{}"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, record(4))
    (tmp_path / "trace" / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"trace/{name} is no record of a step \(.+\): remove it") as error:
        read(tmp_path)
    assert "\n" not in str(error.value)
