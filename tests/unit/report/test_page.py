"""The page: well-formed, whole in itself, and no word in it is taken for markup."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.report.comparison import format_duration, format_figure
from paceline.report.page import render
from paceline.report.page_figures import both, count, percent, size
from paceline.report.run_records import RunRecords, read
from paceline.report.run_report import make_report
from support.pages import check_page

RUNS = Path(__file__).parent / "runs"
HEADINGS = {
    "tuned": ["What was decided", "Step time", "Before and after", "Ranks", "Stages and links, as measured"],
    "experts": ["What was decided", "Step time", "Ranks", "Experts"],
    "island0": ["Step time", "Ranks", "Islands", "Natural gradient"],
}


def page_of(records: RunRecords) -> str:
    return render(make_report(records), records.traces, records.loads)


@pytest.mark.parametrize("name", HEADINGS)
def test_sections_with_data_are_there_and_no_others(name: str) -> None:
    page = check_page(page_of(read(RUNS / name)))
    first = ["Loss, learning rate, gradient norm", "Command and JSON"]
    assert page.headings == [*first, *HEADINGS[name], "The run"]
    assert "None" not in page.words
    assert "nan" not in page.words


def test_every_switch_is_there_with_its_numbers_and_its_reason() -> None:
    records = read(RUNS / "tuned")
    report, page = make_report(records), check_page(page_of(records))
    for decision in report["decisions"]:
        assert decision["why"] in page.words
        for key in ("predicted_now_s", "predicted_best_s"):
            number = both(decision["predicted_now_s"], decision["predicted_best_s"])
            assert number in page.words or format_duration(decision[key]) in page.words
        if decision["after"] and decision["after"]["measured_s"]:
            assert format_duration(decision["after"]["measured_s"]) in page.words
            assert percent(decision["after"]["error"]) in page.words
    assert "2|8 → 4|6" in page.words
    assert "44 schedules compared at step 8" in page.words
    head = report["headline"]
    for number in (format_figure(head["loss"]), f"{head['tokens_per_s']:,.0f}", percent(-head["saved"]["share"])):
        assert number in page.words


def test_timelines_are_drawn() -> None:
    records = read(RUNS / "tuned")
    text = page_of(records)
    page = check_page(text)
    drawn = [value for name, value in page.attributes if name == "aria-label" and value.startswith(("before", "after"))]
    assert [re.findall(r"(?:before|after): step \d+", value) for value in drawn] == [
        *(["before: step 8", "after: step 12"], ["before: step 12"], ["after: step 48"]),
        ["before: step 48", "after: step 52"],
    ]
    trace = next(trace for trace in records.traces if trace.step == 52)
    assert str(format_duration(trace.measured_s)) in drawn[-1]


def test_learning_rate_and_norm_are_drawn_beside_the_loss() -> None:
    """Each over the steps, with what its upright axis counts in the caption."""
    records = read(RUNS / "tuned")
    page = check_page(page_of(records))
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert labels[:3] == [
        "loss over the steps",
        "Learning rate, of the first group of parameters",
        "Norm of all gradients of a step together, before clipping",
    ]
    text = page_of(records)
    axes = [
        re.findall(r">(\d+)</text>", text[text.index(f'aria-label="{label}"') :].partition(">step</text>")[0])
        for label in labels[:3]
    ]
    assert axes[0] == axes[1] == axes[2] != []  # one range of steps
    assert "Loss of a label token, in nats: in training the mean of the steps since the report before" in page.words
    assert "Time of a step, in ms. Upright lines are switches." in page.words
    seconds = make_report(records)
    for one in seconds["configurations"]:
        one["seconds"] = [value * 100 for value in one["seconds"]]
    assert "Time of a step, in s. Upright lines are switches." in check_page(render(seconds)).words


def test_the_command_and_the_json_are_there(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    told = {"command": "deepspeed --module x --max_steps 60", "ds_config": {"gradient_clipping": 0.5}}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    records = read(tmp_path / "run")
    assert make_report(records)["run"] | told == make_report(records)["run"]
    page = check_page(page_of(records))
    assert "Command and JSON deepspeed --module x --max_steps 60" in page.words
    assert '"gradient_clipping": 0.5' in page.words


def test_before_and_after_is_of_switches_only(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if "decision" not in json.loads(line)]
    path.write_text("".join(kept))
    page = check_page(page_of(read(tmp_path / "run")))
    assert "The last recorded step" in page.headings
    assert "Before and after" not in page.headings
    assert "after: step" not in page.words


def test_a_run_that_has_told_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"first_step": 0, "planned_steps": 9}')
    page = check_page(page_of(read(tmp_path)))
    assert page.headings == []
    assert "has not come to its end" in page.words
    assert "0 of 9 steps" in page.words


def test_losses_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line |= {key: None for key in ("loss", "eval_loss") if key in line}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = check_page(page_of(read(tmp_path / "run"))).words
    assert "loss not finite in training, at last held-out loss not finite" in words


def test_what_users_name_is_not_markup(tmp_path: Path) -> None:
    evil = "<script>alert('1')</script>&\"<img src=https://example.org/x onerror=y>"
    folder = tmp_path / "<b>run"
    shutil.copytree(RUNS / "tuned", folder)
    for name in ("run.json", "summary.json"):
        values = json.loads((folder / name).read_text()) | {"hardware": evil, "model_type": evil, "dtype": evil}
        values["versions"] = {evil: evil}
        for rank in values.get("ranks", []):
            rank["holds"] = evil
        (folder / name).write_text(
            json.dumps(values | {"paceline": {evil: evil}, "started": evil, "expert_loads": "expert_loads.jsonl"})
        )
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for row in values.get("ran", []):
            row["schedule"] = evil
        if "decision" in values:
            decision = values["decision"] | {"why": evil}
            if decision["what"] == "schedule":
                decision |= {"from": evil, "to": evil, "predicted_s": {evil: 1.0}}
            else:
                decision["schedule"] = evil
            values["decision"] = decision
        lines.append(json.dumps(values) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    for path in (folder / "trace").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schedule": evil}))
    shutil.copy(RUNS / "experts" / "expert_loads.jsonl", folder)
    loads = (folder / "expert_loads.jsonl").read_text().replace("model.layers.0", "<i>&'")
    (folder / "expert_loads.jsonl").write_text(loads)
    (folder / "trace" / "step-5.json").write_text("{}")
    text = page_of(read(folder))
    page = check_page(text)
    assert evil in page.words
    assert "<i>&'" in page.words
    assert "Not shown: " in page.words


def test_long_runs_stay_small(tmp_path: Path) -> None:
    """A quarter of a million steps, a switch every hundred."""
    rows = [
        {
            "step": 100 * look + 1,
            "schedule": f"kfkb k={look % 4 + 1}",
            "micro_batch_size": 2,
            "partition": [0, 5, 10],
            "moves": 0,
            "seconds": [0.1 + step % 7 / 100 for step in range(100)],
        }
        for look in range(2500)
    ]
    told = {
        "what": "schedule",
        "from": "a",
        "to": "b",
        "why": "w",
        "switch_s": 0.1,
        "measured_s": 1.0,
        "predicted_s": {},
    }
    told |= {"predicted_now_s": 1.0, "predicted_best_s": 0.9}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number, row in enumerate(rows, 1):
            step = 100 * number
            line = {"step": step, "loss": 1 / number, "step_s": 0.1, "tokens": step, "tokens_per_s": 9.0, "ran": [row]}
            print(json.dumps(line), file=file)
            print(
                json.dumps({"step": step, "decision": {**told, "step": step, "switched": number % 2 == 0}}), file=file
            )
    text = page_of(read(tmp_path))
    check_page(text)
    assert len(text) < 1_000_000


def test_numbers_for_people() -> None:
    assert (count(1_246_272), count(12)) == ("1.25 M", "12")
    assert (size(1536), size(9.06e9, "FLOP/s")) == ("1.54 kB", "9.06 GFLOP/s")
    assert both(1.5692, 0.66) == "1.569 s → 0.660 s"
    assert both(0.0102, 0.009) == "10.2 ms → 9.0 ms"
    assert [format_figure(x) for x in (2.7, 11.0, 8.12e-4, 84310.2, 999.96)] == [
        *("2.700", "11.00", "0.0008120", "84,310", "1,000")
    ]
    assert percent(-0.0512) == "\N{MINUS SIGN}5.1 %"
