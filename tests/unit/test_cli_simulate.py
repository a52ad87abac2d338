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
from support.saves import small_file_system

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
        "rank       busy_s       idle_s  peak activations  peak stages   peak_bytes",
        "   0         0.96         0.24                 7            7            0",
        "   1         0.96         0.24                 5            5            0",
        "   2         0.96         0.24                 3            3            0",
        "   3         0.96         0.24                 1            1            0",
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
        *("1f1b", "kfkb k=2", "kfkb k=4", "kfkb k=8", "eager slack=1", "eager slack=2", "gpipe"),
        *("interleaved chunks=2", "dualpipev", "zbh1", "zbh2", "zbv", "vhalf", "vmin", "dualpipev_split"),
        *("generated from zbh2", "multidirection staleness=0", "multidirection", "one_direction"),
    ]
    assert [round(row["makespan_s"], 3) for row in rows[:3]] == [1.728, 1.267, 1.269]
    assert main(["simulate", *SHAPE, "--compare", *SECONDS, "--transfer", "0.021"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = "schedule step_s speed-up bubble peak activations peak stages peak_bytes"
    assert lines[0].split() == titles.split()
    assert lines[2].split() == ["kfkb", "k=2", "1.267", "1.364", "24.2%", "8", "8", "0"]
    assert len(lines) == 20
    assert len({len(line) for line in lines}) == 1


def test_messages_that_take_different_times(capsys):
    """If all of them took what they take in the mean, most schedules would look the same."""
    given = ["--stages", "8", "--micro-batches", "32", "--forward", "1", "--backward", "2"]
    samples = ["--transfer-samples", "0.1,0.1,0.1,0.1,4"]
    rows = {row["schedule"]: row for row in answer(capsys, *given, *samples, "--compare")}
    flat = {row["schedule"]: row for row in answer(capsys, *given, "--transfer", "0.88", "--compare")}
    assert {name: row["makespan_s"] for name, row in rows.items()} == pytest.approx(
        {name: row["makespan_s"] for name, row in flat.items()}
    )
    assert rows["eager slack=1"]["makespan_s"] == pytest.approx(rows["eager slack=2"]["makespan_s"])
    assert rows["eager slack=1"]["mean_s"] > 1.08 * rows["eager slack=2"]["mean_s"]
    assert all(row["makespan_s"] < row["mean_s"] < row["p90_s"] for row in rows.values())
    assert "mean_s" not in flat["1f1b"]
    assert main(["simulate", *given, *samples, "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["schedule", "mean_s", "p90_s", "step_s"]
    assert len({len(line) for line in lines}) == 1
    few = ["--stages", "2", "--micro-batches", "4", "--forward", "1", "--backward", "2"]
    assert main(["simulate", *few, "--transfer-samples", "0.001,0.008", "--compare"]) == 0  # some do not notice
    assert len(capsys.readouterr().out.splitlines()) > 10
    for schedule in ("1f1b", "one_direction"):
        assert main(["simulate", *given, *samples, "--schedule", schedule]) == 0
        assert "in the mean over messages, p90" in capsys.readouterr().out


def test_compare_without_a_flush(capsys):
    """By hand without transfers: the flushes cost 9, 3 + 4 and nothing, multidirection 1 a round."""
    rows = answer(capsys, "--stages", "4", "--micro-batches", "16", "--compare", "--forward", "1", "--backward", "2")
    found = {row["schedule"]: row["makespan_s"] for row in rows}
    expected = {"1f1b": 57, "multidirection staleness=0": 55, "multidirection": 52, "one_direction": 48}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("shape", [("4", "6"), ("7", "7"), ("1", "4")])
def test_compare_leaves_out_what_there_is_not(capsys, shape):
    rows = answer(capsys, "--stages", shape[0], "--micro-batches", shape[1], "--compare", *SECONDS)
    assert [row["schedule"] for row in rows if "direction" in row["schedule"]] == ["one_direction"]


@pytest.mark.parametrize(("num_micro_batches", "makespan_s"), [("8", 0.51), ("16", 0.99)])
def test_split_backwards(capsys, num_micro_batches, makespan_s):
    shape = ["--stages", "4", "--micro-batches", num_micro_batches, "--schedule", "zbv"]
    step = answer(capsys, *shape, *SECONDS, "--weight", "0.02")
    assert step["makespan_s"] == pytest.approx(makespan_s)
    assert step["idle_s"] == pytest.approx([0.03] * 4)
    assert step["bubble_fraction"] == pytest.approx(0.03 / makespan_s)
    assert (step["stages"], step["peak_stages"]) == (8, [4.0] * 4)
    assert max(step["peak_activations"]) <= 8
    assert max(step["peak_deferred"]) > 0
    assert answer(capsys, *shape, *SECONDS) == step, "half of the backward unless told otherwise"


def test_what_needs_no_gradient_runs_before_it_is_there(capsys):
    shape = [*SHAPE, "--schedule", "1f1b", "--forward", "1", "--backward", "3"]
    waiting, early = answer(capsys, *shape), answer(capsys, *shape, "--ahead", "1")
    assert waiting["makespan_s"] - early["makespan_s"] == 3.0
    assert early["busy_s"] == waiting["busy_s"]


def test_several_stages_a_rank(capsys):
    """Each is a part of a rank's whole one; messages are as large."""
    shape = [*SHAPE, "--schedule", "interleaved", *SECONDS]
    assert answer(capsys, *shape)["makespan_s"] == pytest.approx(16 * 0.06 + 3 * 0.06 / 2)
    three = ["--stages", "4", "--micro-batches", "12", "--schedule", "interleaved", "--chunks", "3"]
    assert answer(capsys, *three, *SECONDS)["makespan_s"] == pytest.approx(12 * 0.06 + 3 * 0.06 / 3)


def test_costs_of_several_stages_a_rank_from_a_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    costs = Costs((0.01,) * 8, (0.02,) * 8, activation_bytes=(2.0,) * 8, deferred_bytes=(1.0,) * 8)
    path.write_text(json.dumps(costs.to_dict()))
    step = answer(capsys, "--costs", str(path), "--stages", "4", "--micro-batches", "8", "--schedule", "zbv")
    assert step["makespan_s"] == pytest.approx(0.51)
    assert max(step["peak_bytes"]) <= 16
    best = answer(capsys, "--costs", str(path), "--stages", "4", "--micro-batches", "8", "--schedule", "generated")
    assert best["makespan_s"] == pytest.approx(0.51)
    assert best["stages"] == 8
    assert main(["simulate", "--costs", str(path), "--stages", "3", "--micro-batches", "8", "--schedule", "zbv"]) == 2
    assert "the costs are of 8 stages and the schedule has 6" in capsys.readouterr().err


def test_generated_within_memory(capsys):
    """1F1B's first stage keeps 4 GiB."""
    shape = [*SHAPE, *SECONDS, "--activation-bytes", str(2**30)]
    before = answer(capsys, *shape)
    assert max(before["peak_bytes"]) == 4 * 2**30
    found = answer(capsys, *shape, "--schedule", "generated", "--memory-gib", "3")
    assert max(found["peak_bytes"]) <= 3 * 2**30
    assert found["makespan_s"] < before["makespan_s"]
    assert answer(capsys, *shape, "--schedule", "generated")["makespan_s"] == pytest.approx(0.99)


def test_multidirection(capsys):
    units = ["--forward", "1", "--backward", "2"]
    step = answer(capsys, "--stages", "4", "--micro-batches", "8", "--schedule", "multidirection", *units)
    assert step["schedule"] == "multidirection"
    assert (step["stages"], step["micro_batches"]) == (4, 8)
    assert step["makespan_s"] == step["period_s"] == 26.0
    assert step["first_step_s"] == 29.0
    assert step["bubble_fraction"] == pytest.approx(2 / 26)
    assert step["busy_s"] == [24.0] * 4
    assert step["idle_s"] == [2.0] * 4
    assert step["peak_activations"] == [3, 4, 4, 3]
    assert step["mismatch"] == [1, 1, 1, 1]


def test_directions(capsys):
    """Fewer of them hold less and idle more: a fifth instead of a twenty-fifth, with eight devices."""
    units = ["--forward", "1", "--backward", "2"]
    shape = ["--stages", "8", "--micro-batches", "8", "--schedule", "multidirection", *units]
    two, four = (answer(capsys, *shape, "--directions", count) for count in "24")
    assert two["schedule"] == "multidirection directions=2"
    assert (two["period_s"], four["period_s"]) == (30, 25)
    assert four == answer(capsys, *shape)
    rows = answer(capsys, "--stages", "8", "--micro-batches", "8", "--compare", *units)
    assert [row["schedule"] for row in rows[-5:]] == [
        *("multidirection staleness=0", "multidirection"),
        *("multidirection directions=2 staleness=0", "multidirection directions=2", "one_direction"),
    ]


def test_multidirection_with_a_flush(capsys):
    units = ["--forward", "1", "--backward", "2"]
    shape = ["--stages", "4", "--micro-batches", "8", "--schedule", "multidirection", "--staleness", "0"]
    step = answer(capsys, *shape, *units)
    assert step["schedule"] == "multidirection staleness=0"
    assert step["makespan_s"] == 29.0
    assert "period_s" not in step
    assert step["critical_path_s"]["compute"] == 29.0
    explicit = answer(capsys, *shape[:-1], "1", *units)
    assert explicit == answer(capsys, *shape[:-2], *units)


def test_one_direction(capsys):
    step = answer(capsys, "--stages", "4", "--micro-batches", "2", "--schedule", "one_direction", *SECONDS)
    assert step["period_s"] == pytest.approx(2 * 0.06)
    assert step["first_step_s"] == pytest.approx(5 * 0.06)
    assert step["mismatch"] == [2, 1, 1, 0]
    assert step["peak_activations"] == [4, 3, 2, 1]


def test_text_without_a_flush(capsys):
    argv = ["--schedule", "multidirection", "--forward", "1", "--backward", "2"]
    assert main(["simulate", "--stages", "4", "--micro-batches", "4", *argv, "--transfer", "0.25"]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == [
        "multidirection: 4 stages, 4 micro-batches",
        "step:          14.25 s in the steady state, of which 15.8% bubble; the first takes 17.75 s",
        "mismatch:      by stage 1 1 1 1 (most updates from forward to backward)",
        "rank       busy_s       idle_s  peak activations  peak stages   peak_bytes",
        "   0           12         2.25                 3            3            0",
    ]


def test_pictures_without_a_flush_are_of_three_steps(tmp_path, capsys):
    trace = tmp_path / "steps.json"
    shape = ["--stages", "2", "--micro-batches", "2", "--schedule", "multidirection"]
    answer(capsys, *shape, *SECONDS, "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    compute = [event for event in events if event.get("cat") == "compute"]
    assert len(compute) == 3 * 2 * 2 * 2  # steps, micro-batches, stages, forward and backward


def test_pictures_and_traces(tmp_path, capsys):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    answer(capsys, *SHAPE, *SECONDS, "--trace", str(trace))
    assert json.loads(trace.read_text())
    pytest.importorskip("matplotlib")
    answer(capsys, "--stages", "2", "--micro-batches", "2", *SECONDS, "--draw", str(picture))
    assert "<svg" in picture.read_text()


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    path = tmp_path / "missing" / "step.json"
    assert main(["simulate", *SHAPE, *SECONDS, "--trace", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    why = "No such file or directory"
    assert err == f"paceline: cannot write {path} ({why}): choose another file with --draw or --trace.\n"


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
        ([*SHAPE, *SECONDS, "--transfer", "1", "--transfer-samples", "1,2"],
         "--transfer-samples says what --transfer would say: give one or the other."),
        ([*SHAPE, *SECONDS, "--transfer-samples", "1,-2"],
         "--transfer-samples -2 is no number of seconds from 0 upwards."),
        *(([*SHAPE, *SECONDS, flag, ""], f"{flag}: the name of a file is empty; give one, or leave {flag} out.")
          for flag in ("--draw", "--trace", "--costs", "--schedule-file")),
        ([*SHAPE, *SECONDS, "--transfer", "inf"], "--transfer inf is no number of seconds from 0 upwards."),
        ([*SHAPE, "--forward", "1e308", "--backward", "1e308", "--compare"],
         "--forward is too large or too small to be computed with: choose units that bring it near 1."),
        ([*SHAPE, *SECONDS, "--schedule", "kfbk"],
         "schedule type 'kfbk' is unknown: choose one of 1f1b, gpipe, kfkb, eager, interleaved, dualpipev, zbh1, "
         "zbh2, zbv, vhalf, vmin, dualpipev_split, generated, multidirection, one_direction."),
        ([*SHAPE, *SECONDS, "--schedule", "zbv", "--chunks", "2"], "chunks=2 has no meaning for the schedule 'zbv'"),
        ([*SHAPE, *SECONDS, "--schedule", "interleaved", "--k", "2"], "k=2 has no meaning for the schedule 'interl"),
        ([*SHAPE, *SECONDS, "--schedule", "interleaved", "--chunks", "0"], "num_chunks=0 must be 1 or more"),
        ([*SHAPE, *SECONDS, "--schedule", "generated", "--slack", "1"], "slack=1.0 has no meaning for the schedule 'g"),
        ([*SHAPE, *SECONDS, "--schedule", "generated", "--memory-gib", "1"],
         "--memory-gib needs to know what micro-batches keep: give --activation-bytes too."),
        ([*SHAPE, *SECONDS, "--schedule", "generated", "--memory-gib", "nan", "--activation-bytes", "1"],
         "--memory-gib nan is no size: give GiB, above 0."),
        ([*SHAPE, *SECONDS, "--schedule", "generated", "--memory-gib", "1", "--activation-bytes", "1e12"],
         "no schedule of 16 micro-batches on 4 ranks fits into memory: the one that needs least keeps 1e+12 bytes"),
        ([*SHAPE, *SECONDS, "--activation-bytes", "-1"], "--activation-bytes -1 is no number of bytes from 0 upwards."),
        ([*SHAPE, *SECONDS, "--weight", "0.05"], "weight_s[0] is 0.05 and backward_s[0] 0.04: give the part of the"),
        ([*SHAPE, *SECONDS, "--ahead", "0.05"], "ahead_s[0] is 0.05 and backward_s[0] 0.04: give the part of the"),
        ([*SHAPE, *SECONDS, "--weight", "1,2"], "--weight has 2 numbers: give one, or 4, one a stage."),
        (["--stages", "4", "--micro-batches", "6", "--schedule", "interleaved", *SECONDS],
         "num_micro_batches=6 is no multiple of num_ranks=4"),
        (["--stages", "0", "--micro-batches", "6", "--schedule", "generated", *SECONDS], "--stages 0 must be 1"),
        ([*SHAPE, *SECONDS, "--schedule", "kfkb", "--k", "0"], "k"),
        ([*SHAPE, *SECONDS, "--k", "2"], "k=2 has no meaning for the schedule '1f1b'"),
        (["--stages", "7", "--micro-batches", "7", "--schedule", "multidirection", *SECONDS],
         "7 devices have no multi-direction order"),
        (["--stages", "4", "--micro-batches", "6", "--schedule", "multidirection", *SECONDS],
         "6 micro-batches a step do not fill rounds of 4, one a device: take 4 or 8."),
        (["--stages", "8", "--micro-batches", "8", "--schedule", "multidirection", "--directions", "3", *SECONDS],
         "8 devices have no order of 3 directions"),
        ([*SHAPE, *SECONDS, "--schedule", "kfkb", "--directions", "2"],
         "directions=2 has no meaning for the schedule 'kfkb': leave it out."),
        ([*SHAPE, *SECONDS, "--schedule", "multidirection", "--k", "2"],
         "k=2 has no meaning for the schedule 'multidirection': leave it out."),
        ([*SHAPE, *SECONDS, "--schedule", "multidirection", "--staleness", "2"],
         "staleness=2 is not possible: give 1, or 0 for a flush at the end of every step."),
        ([*SHAPE, *SECONDS, "--schedule", "one_direction", "--staleness", "1"],
         "staleness=1 has no meaning for the schedule 'one_direction': leave it out."),
        ([*SHAPE, *SECONDS, "--staleness", "0"], "staleness=0 has no meaning for the schedule '1f1b': leave it out."),
        ([*SHAPE, *SECONDS, "--schedule", "one_direction", "--slack", "1"], "slack=1.0 has no meaning for the"),
        (["--stages", "0", "--micro-batches", "1", "--schedule", "one_direction", *SECONDS], "num_stages=0 must be 1"),
        ([*SHAPE, *SECONDS, "--compare", "--staleness", "0"], "--compare says what --staleness would say: give one or"),
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
        ('{"forward_s": [1],\n "backward_s": [2],}', f"line 2, column {19 if sys.version_info >= (3, 13) else 20}: "),
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


@pytest.mark.parametrize("more", [[], ["--compare"], ["--schedule", "multidirection"]])
def test_runs_light(more):
    """Neither the help nor a run waits for what training needs."""
    heavy = ("torch", "transformers", "deepspeed", "pydantic", "numpy", "matplotlib")
    code = (
        "import sys; from paceline.launch.cli import main;"
        f"assert main({['simulate', *SHAPE, *SECONDS, *more]}) == 0;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stages", "4", "--micro-batches", "1000000000"], "--micro-batches 1000000000 on 4 stages are too many to"),
        (["--stages", "1000000000", "--micro-batches", "1"], "--micro-batches 1 on 1000000000 stages are too many to"),
        (["--stages", "2", "--micro-batches", "1" + "0" * 400], "are too many to simulate (about 1e+99 forwards"),
        (["--stages", "64", "--micro-batches", "4096", "--compare"], "are too many to simulate (about 3.53e+07"),
        (["--stages", "64", "--micro-batches", "4096", "--draw", "x.svg"], "are too many to draw (about 5.24e+05"),
        (["--stages", "4096", "--micro-batches", "4", "--schedule", "one_direction"], "are too many to simulate"),
    ],
)
def test_what_would_take_minutes_is_refused(capsys, argv, message):
    assert main(["simulate", *argv, *SECONDS]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.endswith("): give fewer.\n")


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e300", "1e-300"])
def test_costs_that_cannot_be_computed_with(capsys, tmp_path, number):
    path = tmp_path / "costs.json"
    path.write_text(f'{{"forward_s": [1, 1], "backward_s": [2, {number}]}}')
    assert main(["simulate", "--costs", str(path), "--micro-batches", "4"]) == 2
    assert capsys.readouterr().err == (
        f"paceline: {path}: backward_s[1] is too large or too small to be computed with: choose units that bring it "
        "near 1.\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "too many brackets inside each other"), ('{"step_s": ' + "9" * 5000 + "}", "bring it near 1.")],
)
def test_costs_that_no_one_has_written(capsys, tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert main(["simulate", "--costs", str(path), "--micro-batches", "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paceline: {path}: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_full_disk_is_told_with_the_file(capsys):
    assert main(["simulate", *SHAPE, *SECONDS, "--trace", "/dev/full"]) == 2
    assert capsys.readouterr().err.startswith("paceline: cannot write /dev/full (No space left on device): choose")


@pytest.mark.parametrize(("flag", "name"), [("--draw", "step.svg"), ("--draw", "step.png"), ("--trace", "step.json")])
def test_a_picture_for_which_there_is_no_room_is_not_begun(capsys, tmp_path, flag, name):
    with small_file_system(tmp_path / "disk", "8k") as disk:
        picture = disk / name
        picture.write_text("earlier")
        with pytest.raises(OSError, match="No space left"):
            (disk / "rest").write_bytes(bytes(20_000))
        assert main(["simulate", *SHAPE, *SECONDS, flag, str(picture)]) == 2
        assert capsys.readouterr().err.startswith(f"paceline: cannot write {picture} (No space left on device): choose")
        assert picture.read_text() == "earlier"
        assert {path.name for path in disk.iterdir()} == {name, "rest"}
