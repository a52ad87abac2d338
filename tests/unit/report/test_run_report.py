"""The report's value, against what real runs recorded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from paceline.report.run_records import read
from paceline.report.run_report import make_report, to_json, write

RUNS = Path(__file__).parent / "runs"


def report_of(name: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The report, the lines, and the summary."""
    lines = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    return make_report(read(RUNS / name)), lines, json.loads((RUNS / name / "summary.json").read_text())


def test_a_run_of_a_pipeline() -> None:
    report, lines, summary = report_of("tuned")
    told = [line for line in lines if "loss" in line]
    run, head = report["run"], report["headline"]
    assert (run["state"], run["steps"], run["stages"], run["boundaries"]) == ("finished", 60, 2, summary["boundaries"])
    assert (head["loss"], head["eval_loss"]) == (told[-1]["loss"], summary["eval_loss"])
    assert head["tokens_per_s"] == summary["tokens_per_s"]
    assert [row["loss"] for row in report["loss"]] == [line["loss"] for line in told]
    assert [row["step_s"] for row in report["steps"]] == [line["step_s"] for line in told]
    assert [row["step"] for row in report["evaluation"]] == [0, 20, 40, 60]
    assert len(report["decisions"]) == sum("decision" in line for line in lines)
    assert report["ranks"] == summary["ranks"]
    looks = [line["look"] for line in lines if "look" in line]
    assert [row["forward_s"] for row in report["stages"]] == [look["forward_s"] for look in looks]
    for row, look in zip(report["links"], looks, strict=True):
        down, up = row["between"]
        assert (down["from"], down["to"], down["bytes_per_s"]) == (0, 1, look["down"][0]["bytes_per_s"])
        assert (up["from"], up["to"], up["latency_s"]) == (1, 0, look["up"][0]["latency_s"])
    seconds = [s for one in report["configurations"] for s in one["seconds"]]
    assert len(seconds) == 60
    saved = head["saved"]
    assert saved["saved_s"] == pytest.approx(saved["before"]["median_s"] * 52 - sum(seconds[8:]))
    for absent in ("experts", "islands", "natural", "problems"):
        assert report[absent] == []


def test_recorded_steps_on_both_sides_of_a_switch() -> None:
    report, _, _ = report_of("tuned")
    assert [d["step"] for d in report["decisions"] if d["switched"]] == [8, 32, 40, 48]
    found = [
        (pair["step"], *(pair[when] and pair[when]["step"] for when in ("before", "after")))
        for pair in report["timelines"]
    ]
    assert found == [(8, 8, 12), (32, 12, None), (40, None, 48), (48, 48, 52)]


def test_a_run_whose_experts_moved() -> None:
    report, lines, _ = report_of("experts")
    windows = [json.loads(line) for line in (RUNS / "experts" / "expert_loads.jsonl").read_text().splitlines()]
    moves = [line["decision"] for line in lines if "decision" in line and line["decision"]["switched"]]
    assert sum(layer["moved"] for layer in report["experts"]) == sum(d["moved"] for d in moves if d["step"] < 50)
    for place, layer in enumerate(report["experts"]):
        assert layer["layer"] == windows[0]["layers"][place]["name"]
        assert layer["steps"] == [window["step"] for window in windows]
        assert layer["placement"] == windows[-1]["layers"][place]["placement"]
    assert report["timelines"] == report["links"] == []


def test_an_island_with_natural_gradients() -> None:
    report, lines, _ = report_of("island0")
    assert report["islands"] == [{"step": x["step"], **x["averaging"]} for x in lines if "averaging" in x]
    assert len(report["islands"]) > 2
    natural = [line for line in lines if "natural_gradient" in line]
    assert [row["updates"] for row in report["natural"]] == [line["natural_gradient"]["updates"] for line in natural]
    assert report["run"]["island"] == 0
    assert report["decisions"] == []


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    kept = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    while json.loads(kept[-1])["step"] > 30:
        kept.pop()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(kept) + '{"step": 3')
    report = make_report(read(tmp_path / "run"))
    told = [line for line in map(json.loads, kept) if "loss" in line]
    assert (report["run"]["state"], report["run"]["steps"], report["run"]["planned_steps"]) == ("unfinished", 30, 60)
    assert report["ranks"] == []
    whole_s = sum(line["step_s"] * 2 for line in told)
    assert report["headline"]["tokens_per_s"] == pytest.approx(told[-1]["tokens"] / whole_s)
    start = json.loads((tmp_path / "run" / "run.json").read_text()) | {"first_step": 0, "first_tokens": 100}
    (tmp_path / "run" / "run.json").write_text(json.dumps(start))  # another process trained on some, between reports
    rate = make_report(read(tmp_path / "run"))["headline"]["tokens_per_s"]
    assert rate == pytest.approx((told[-1]["tokens"] - 100) / whole_s)
    steady = [s for one in report["configurations"] for s in (one["seconds"][1:] or one["seconds"])]
    assert report["headline"]["median_step_s"] == median(steady)
    assert (
        max(trace["step"] for pair in report["timelines"] for trace in (pair["before"], pair["after"]) if trace) == 12
    )


def test_of_a_run_that_goes_on_only_its_own_part_is_compared(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    start = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**start, "first_step": 50}))
    report = make_report(read(tmp_path / "run"))
    assert report["run"]["resumed_from_step"] == 50
    assert report["headline"]["saved"] is None  # no switch since
    own = [one for one in report["configurations"] if one["first_step"] > 50]
    assert report["headline"]["median_step_s"] == median(s for one in own for s in one["seconds"][1:])
    assert [one["first_step"] for one in report["configurations"]][-1] == 51
    assert report["timelines"][-1]["after"] is None  # step 52 is the other run's


@pytest.mark.parametrize("name", ["tuned", "experts", "island0"])
def test_the_same_records_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    written = []
    for number in range(2):
        page, value = write(RUNS / name, tmp_path / str(number) / "page.html")
        written.append((page.read_bytes(), value.read_bytes()))
        assert value == page.with_suffix(".json")
    assert written[0] == written[1]
    assert json.loads(written[0][1]) == make_report(read(RUNS / name))
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["page.html", "page.json"]


def test_resumed_with_more_stages(tmp_path: Path) -> None:
    """Stages and links are shown since there are as many; the value has all looks."""
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    at, look = next((n, json.loads(line)) for n, line in enumerate(lines) if '"look"' in line)
    for values in look["look"].values():  # as if the first one was of a run of one stage
        if isinstance(values, list) and values:
            values.pop()
    lines[at] = json.dumps(look)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    page, value = write(tmp_path / "run")
    assert [len(row["forward_s"]) for row in json.loads(value.read_text())["stages"]][:2] == [1, 2]
    looks = [json.loads(line)["step"] for line in lines if '"look"' in line]
    heads = re.findall(r"<th[^>]*>at step (\d+)</th>", page.read_text())
    assert heads == [str(looks[1]), str(looks[-1])]


@pytest.mark.parametrize("name", ["summary", "run"])
def test_nothing_else_is_overwritten(name: str, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "tuned", tmp_path / "run")
    page = tmp_path / "run" / f"{name}.html"
    with pytest.raises(ValueError, match=rf"{name}\.json would hold .* choose another --output"):
        write(tmp_path / "run", page)
    assert (tmp_path / "run" / f"{name}.json").read_bytes() == (RUNS / "tuned" / f"{name}.json").read_bytes()
    for _ in range(2):  # a report may be replaced
        write(tmp_path / "run", tmp_path / "page.html")


def test_an_older_run_says_less_and_is_shown(tmp_path: Path) -> None:
    """Without run.json, and lines without ``ran``."""
    (tmp_path / "summary.json").write_text((RUNS / "tuned" / "summary.json").read_text())
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for line in (RUNS / "tuned" / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            values.pop("ran", None)
            if "look" not in values:
                print(json.dumps(values), file=file)
    report = make_report(read(tmp_path))
    assert report["configurations"] == []
    assert report["headline"]["saved"] is None
    assert report["decisions"][3]["after"]["measured_s"] is not None


@pytest.mark.parametrize("summary", ['{"steps": [1]}', '{"steps": 1, "ranks": [{"rank": 0}]}'])
def test_a_summary_of_another_kind_is_one_line(tmp_path: Path, summary: str) -> None:
    (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(ValueError, match=r"holds records that no run of this version writes"):
        write(tmp_path)


def test_records_of_another_kind_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "decision": {"what": "schedule"}}\n')
    with pytest.raises(ValueError, match=r"holds records that no run of this version writes \(KeyError") as caught:
        make_report(read(tmp_path))
    assert "\n" not in str(caught.value)


def test_numbers_that_json_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "step_s": 1.0, "tokens": 5}\n')
    report = make_report(read(tmp_path))
    assert report["loss"][0]["loss"] is None
    to_json(report)
