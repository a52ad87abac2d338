"""``paceline trace``."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.launch.cli import main
from paceline.report.step_records import StepRecord, write
from support.timelines import gpipe_timeline


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that recorded steps 10 and 20, and step 30 without a prediction."""
    predicted, measured = gpipe_timeline(2, 3), gpipe_timeline(2, 3, backward_s=0.05)
    for step in (10, 20):
        write(tmp_path, StepRecord(step, "gpipe", predicted, measured, predicted.end_s, measured.end_s))
    write(tmp_path, StepRecord(30, "gpipe", None, measured, None, measured.end_s))
    return tmp_path


def test_a_step(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir), "--step", "20"]) == 0
    out, err = capsys.readouterr()
    folder = run_dir / "trace"
    assert err == ""
    assert out.splitlines() == [
        "step 20, gpipe: measured 330.0 ms, predicted 290.0 ms (+13.8%)",
        "largest difference: rank 1 took for B0 50.0 ms, predicted 40.0 ms",
        "rank   compute    other     idle   idle  predicted:   compute    other     idle   idle",
        "   0  210.0 ms  30.0 ms  90.0 ms  27.3%              180.0 ms  30.0 ms  80.0 ms  27.6%",
        "   1  210.0 ms  90.0 ms  30.0 ms   9.1%              180.0 ms  80.0 ms  30.0 ms  10.3%",
        f"wrote {folder / 'step-20.svg'}",
        f"wrote {folder / 'step-20.perfetto.json'}, for https://ui.perfetto.dev",
    ]
    picture = ElementTree.parse(folder / "step-20.svg").getroot()
    titles = {"".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert "predicted: step 20, gpipe: 290.0 ms, 19.0% bubble" in titles
    assert "measured: step 20, gpipe: 330.0 ms, 18.2% bubble" in titles
    events = json.loads((folder / "step-20.perfetto.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["predicted: step 20, gpipe", "measured: step 20, gpipe"]


def test_the_last_step_by_default(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 30, gpipe: measured 330.0 ms"
    assert lines[1].split() == ["rank", "compute", "other", "idle", "idle"]
    assert lines[2].split() == ["0", "210.0", "ms", "30.0", "ms", "90.0", "ms", "27.3%"]
    # what was drawn is not taken for a record
    assert main(["trace", str(run_dir)]) == 0


def test_as_json_elsewhere(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_dir / "deep" / "pictures"
    assert main(["trace", str(run_dir), "--step", "10", "--output", str(output), "--format", "png", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["picture"] == str(output / "step-10.png")
    assert shown["perfetto"] == str(output / "step-10.perfetto.json")
    assert sorted(path.name for path in output.iterdir()) == ["step-10.perfetto.json", "step-10.png"]
    assert (shown["step"], shown["schedule"]) == (10, "gpipe")
    assert (shown["measured_s"], shown["predicted_s"]) == pytest.approx((0.33, 0.29))
    assert shown["measured"][0] == pytest.approx(
        {"rank": 0, "compute_s": 0.21, "other_s": 0.03, "idle_s": 0.09, "idle_share": 0.09 / 0.33}
    )
    assert shown["predicted"][1]["idle_share"] == pytest.approx(0.03 / 0.29)
    assert shown["largest_difference"] == {
        "rank": 1,
        "is_wait": False,
        "action": "B0",
        "predicted_s": pytest.approx(0.04),
        "measured_s": pytest.approx(0.05),
        "text": "rank 1 took for B0 50.0 ms, predicted 40.0 ms",
    }
    assert main(["trace", str(run_dir), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["predicted"] is shown["predicted_s"] is shown["largest_difference"] is None


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_shown(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir), "--step", "15"]) == 2
    assert "--step 15 was not recorded: choose one of 10, 20, 30." in one_line(capsys)
    assert main(["trace", str(run_dir / "nowhere")]) == 2
    assert "nowhere is no directory" in one_line(capsys)
    assert main(["trace", str(run_dir), "--output", ""]) == 2
    assert "--output: the name of a directory is empty; give one" in one_line(capsys)
    (run_dir / "file").write_text("")
    assert main(["trace", str(run_dir), "--output", str(run_dir / "file")]) == 2
    assert "choose another folder with --output" in one_line(capsys)
    (run_dir / "trace" / "step-20.json").write_text("{}")
    assert main(["trace", str(run_dir)]) == 2
    assert "step-20.json is no record of a step" in one_line(capsys)
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty")]) == 2
    assert '"trace_every": N' in one_line(capsys)


def test_many_records_make_a_short_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 31):
        write(tmp_path, StepRecord(step, "gpipe", None, gpipe_timeline(1, 1), None, 0.1))
    assert main(["trace", str(tmp_path), "--step", "99"]) == 2
    assert "choose one of …, 11, 12, " in one_line(capsys)


def test_two_different_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, StepRecord(1, "gpipe", gpipe_timeline(2), gpipe_timeline(3), 0.3, 0.3))
    assert main(["trace", str(tmp_path)]) == 2
    assert "2 ranks were predicted and 3 measured" in one_line(capsys)
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step-1.json"]  # nothing half done


def test_the_format_is_one_of_two(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trace", str(run_dir), "--format", "gif"])
    assert stop.value.code == 2
    assert "gif" in capsys.readouterr().err
