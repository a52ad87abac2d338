"""``paceline simulate``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.launch.cli import main
from paceline.schedules.costs import Costs
from paceline.schedules.families import interleaved, kfkb
from paceline.schedules.text import to_text

SHAPE = ["--stages", "4", "--micro-batches", "16"]
SECONDS = ["--forward", "0.02", "--backward", "0.04"]


def answer(capsys, *argv):
    assert main(["simulate", *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_json(capsys):
    step = answer(capsys, *SHAPE, "--schedule", "kfkb", "--k", "2", *SECONDS, "--transfer", "0.021")
    assert step["schedule"] == "kfkb k=2"
    assert step["makespan_s"] == pytest.approx(1.267)
    assert step["peak_activations"] == [8, 6, 4, 2]
    assert step["idle_s"] == pytest.approx([0.307] * 4)
    assert step["busy_s"] == pytest.approx([0.96] * 4)
    assert step["bubble_fraction"] == pytest.approx(0.307 / 1.267)
    assert step["peak_bytes"] == [0.0] * 4
    assert step["critical_path_s"] == pytest.approx({"compute": 1.12, "transfer": 0.147, "step": 0.0})


def test_text(capsys):
    assert main(["simulate", *SHAPE, "--schedule", "eager", "--slack", "1", *SECONDS, "--latency", "0.01"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "eager slack=1: 4 stages, 16 micro-batches",
        "step:          1.2 s, of which 20.0% bubble",
        "critical path: compute 1.14 s, transfer 0.06 s",
        "rank       busy_s       idle_s  peak activations   peak_bytes",
        "   0         0.96         0.24                 7            0",
        "   1         0.96         0.24                 5            0",
        "   2         0.96         0.24                 3            0",
        "   3         0.96         0.24                 1            0",
    ]


def test_1f1b_unless_said_otherwise(capsys):
    step = answer(capsys, *SHAPE, *SECONDS)
    assert step["schedule"] == "1f1b"
    assert step["makespan_s"] == pytest.approx(19 * 0.06)


def test_one_number_a_stage_and_a_boundary(capsys):
    each = ["--forward", "1,2", "--backward", "2,3", "--transfer", "0.5", "--latency", "0.25"]
    step = answer(capsys, "--stages", "2", "--micro-batches", "1", *each)
    assert step["makespan_s"] == 1 + 0.75 + 2 + 3 + 0.75 + 2
    assert step["busy_s"] == [3.0, 5.0]


def test_costs_from_a_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    costs = Costs((0.02,) * 4, (0.04,) * 4, activation_bytes=(10.0,) * 4, fixed_bytes=(1.0, 2.0, 3.0, 4.0), step_s=1.0)
    path.write_text(json.dumps(costs.to_dict()))
    step = answer(capsys, "--costs", str(path), "--micro-batches", "16")
    assert step["stages"] == 4
    assert step["makespan_s"] == pytest.approx(19 * 0.06 + 1.0)
    assert step["peak_bytes"] == [41.0, 32.0, 23.0, 14.0]


def test_schedule_from_a_file(tmp_path, capsys):
    path = tmp_path / "schedule.txt"
    path.write_text(to_text(kfkb(4, 16, 2)))
    step = answer(capsys, "--schedule-file", str(path), *SECONDS, "--transfer", "0.021")
    assert step["makespan_s"] == pytest.approx(1.267)
    path.write_text(to_text(interleaved(2, 4, 2)))
    step = answer(capsys, "--schedule-file", str(path), "--forward", "1,1,1,1", "--backward", "2")
    assert step["stages"] == 4
    assert len(step["busy_s"]) == 2


def test_compare(capsys):
    rows = answer(capsys, *SHAPE, "--compare", *SECONDS, "--transfer", "0.021")
    assert [row["schedule"] for row in rows] == [
        *("1f1b", "kfkb k=2", "kfkb k=4", "kfkb k=8", "eager slack=1", "eager slack=2", "gpipe")
    ]
    assert [round(row["makespan_s"], 3) for row in rows[:3]] == [1.728, 1.267, 1.269]
    assert main(["simulate", *SHAPE, "--compare", *SECONDS, "--transfer", "0.021"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["schedule", "step_s", "speed-up", "bubble", "peak", "activations", "peak_bytes"]
    assert lines[2].split() == ["kfkb", "k=2", "1.267", "1.364", "24.2%", "8", "0"]
    assert len(lines) == 8


def test_pictures_and_traces(tmp_path, capsys):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    answer(capsys, *SHAPE, *SECONDS, "--trace", str(trace))
    assert json.loads(trace.read_text())
    pytest.importorskip("matplotlib")
    answer(capsys, "--stages", "2", "--micro-batches", "2", *SECONDS, "--draw", str(picture))
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (SECONDS, "--stages is missing: give a number, or a schedule with --schedule-file."),
        (["--stages", "4", *SECONDS], "--micro-batches is missing: give a number, or a schedule with --schedule-file."),
        (SHAPE, "--forward is missing: give its seconds, or all costs with --costs."),
        ([*SHAPE, "--forward", "1"], "--backward is missing: give its seconds, or all costs with --costs."),
        ([*SHAPE, "--forward", "1,2", "--backward", "2"], "--forward has 2 numbers: give one, or 4, one a stage."),
        ([*SHAPE, *SECONDS, "--transfer", "1,2"], "--transfer has 2 numbers: give one, or 3, one a boundary."),
        ([*SHAPE, *SECONDS, "--latency", "-1"], "--latency -1 is no number of seconds from 0 upwards."),
        ([*SHAPE, *SECONDS, "--transfer", "inf"], "--transfer inf is no number of seconds from 0 upwards."),
        ([*SHAPE, *SECONDS, "--schedule", "kfbk"], "schedule type 'kfbk' is unknown"),
        ([*SHAPE, *SECONDS, "--schedule", "kfkb", "--k", "0"], "k"),
        ([*SHAPE, *SECONDS, "--k", "2"], "k=2 has no meaning for the schedule '1f1b'"),
        (["--stages", "0", "--micro-batches", "1", *SECONDS], "num_stages=0 must be 1 or more."),
        ([*SHAPE, *SECONDS, "--compare", "--k", "2"], "--compare says what --k would say: give one or the other."),
        ([*SHAPE, "--schedule-file", "x", *SECONDS], "--schedule-file says what --stages, --micro-batches would say"),
        ([*SHAPE, "--costs", "x", *SECONDS], "--costs says what --forward, --backward would say"),
        ([*SHAPE, "--costs", "nowhere.json"], "nowhere.json: No such file or directory; give a file with the JSON of"),
        (["--schedule-file", "nowhere", *SECONDS], "nowhere: No such file or directory; give a file with a schedule"),
    ],
)  # fmt: skip
def test_one_clear_line(capsys, argv, message):
    assert main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paceline: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"forward_s": [1],\n "backward_s": [2],}', "line 2, column 20: "),
        ("[1, 2]", "holds list, costs are an object {...}."),
        ('{"forward_s": [1], "bakward_s": [2]}', '"bakward_s" is not a key of the costs; did you mean "backward_s"?'),
        ('{"forward_s": [1], "backward_s": [2, 3]}', "backward_s has 2 values and there are 1 stages"),
    ],
)
def test_bad_costs_file(tmp_path, capsys, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert main(["simulate", "--micro-batches", "4", "--costs", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paceline: {path}")
    assert message in err
    assert err.count("\n") == 1


def test_numbers_are_numbers(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *SHAPE, "--forward", "0.02,x", "--backward", "1"])
    assert stop.value.code == 2
    assert "'0.02,x' is no number and no list of numbers like 0.02,0.03" in capsys.readouterr().err


def test_runs_light():
    """Neither the help nor a run waits for what training needs."""
    heavy = ("torch", "transformers", "deepspeed", "pydantic", "numpy", "matplotlib")
    code = (
        "import sys; from paceline.launch.cli import main;"
        f"assert main({['simulate', *SHAPE, *SECONDS]}) == 0;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
