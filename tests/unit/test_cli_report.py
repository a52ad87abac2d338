"""``paceline report``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.launch.cli import main
from support.pages import check_page

RUNS = Path(__file__).parent / "report" / "runs"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUNS / "tuned", tmp_path / "tuned"))


def test_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, *wrote = out.splitlines()
    assert first.startswith("tuned: 60 steps, loss 6.130, held-out loss 6.738, 1,096 tokens/s, a step ")
    assert first.endswith(" ms, 4 switches in 14 looks")
    assert wrote == [f"wrote {run_dir / 'report.html'}", f"wrote {run_dir / 'report.json'}"]
    check_page((run_dir / "report.html").read_text())


def test_as_json_elsewhere(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "deep" / "page.html"
    before = sorted(run_dir.rglob("*"))
    assert main(["report", str(run_dir), "--output", str(page), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(page.with_suffix(".json").read_text())
    assert shown["run"]["name"] == "tuned"
    assert sorted(run_dir.rglob("*")) == before


def test_a_killed_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "summary.json").unlink()
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("tuned: 60 steps so far, loss")
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[1].replace('"step": 2', '"step": 1'))
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("tuned: 1 step so far, loss")


def test_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        shutil.copytree(RUNS / "island0", tmp_path / f"island{number}")
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("wrote") and line.endswith(".html")] == [
        f"wrote {tmp_path / f'island{number}' / 'report.html'}" for number in range(2)
    ]
    assert main(["report", str(tmp_path / "island1"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["name"] == "island1"
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["island0", "island1"]
    assert main(["report", str(tmp_path), "-o", "page.html"]) == 2
    assert "holds 2 islands" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere is no directory: give the output directory of a run."),
        (["."], "holds no records of a run"),
        (["tuned", "-o", "page.pdf"], "page.pdf: the page is an .html file; choose this suffix."),
        (["tuned", "-o", "tuned/run.json/page.html"], "cannot write tuned/run.json/page.html"),
        (["broken"], "line 1 is not what a run writes"),
    ],
)
def test_wrong_input_is_one_line(
    run_dir: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    Path("broken").mkdir()
    Path("broken", "metrics.jsonl").write_text("[]\n")
    assert main(["report", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    assert message in err
