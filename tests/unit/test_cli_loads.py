"""``paceline loads``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.launch.cli import main


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A layer whose experts moved once."""
    path = tmp_path / "loads.jsonl"
    placements = ([[0, 1], [2, 3]], [[0, 3], [2, 1]])
    with path.open("w") as file:
        for step, placement in zip((10, 20), placements, strict=True):
            layer = {"name": "layers.0.mlp", "loads": [6, 2, 1, 1], "placement": placement}
            file.write(json.dumps({"step": step, "steps": 10, "layers": [layer]}) + "\n")
    return path


def test_a_summary(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loads", str(log)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "load of the most loaded device over the mean, in the first window, in the last, and on average:",
        "layer         windows  first   last   mean  unmoved  moves  experts moved",
        "layers.0.mlp        2  1.600  1.400  1.500    1.600      1              2",
    ]
    assert [path.name for path in log.parent.iterdir()] == [log.name]


def test_a_picture(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "loads.svg"
    assert main(["loads", str(log), "-o", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {picture}"
    assert "layers.0.mlp" in picture.read_text()


def test_as_json(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "loads.svg")
    assert main(["loads", str(log), "--output", picture, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "layers": [
            {
                "name": "layers.0.mlp",
                "windows": 2,
                "first": 1.6,
                "last": 1.4,
                "mean": 1.5,
                "unmoved": 1.6,
                "moves": 1,
                "moved": 2,
            }
        ],
        "picture": picture,
    }
    assert main(["loads", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["picture"] is None


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", [], "is empty"),
        (b"\xff\n", [], "not UTF-8 text"),
        (b"{}\n", [], "loads.jsonl, line 1 is no window of expert loads"),
        (b"[[1, 2]]\n", [], "(it is a list): remove it, or give a file of expert loads that a run has written."),
        (b"[" * 100_000 + b"\n", [], "line 1 is no window of expert loads (it is nested too deeply)"),
        (None, ["no-such-file"], "no-such-file: No such file or directory"),
        (None, ["-o", "loads.gif"], "choose one of these suffixes"),
        (None, ["-o", "no-such-folder/loads.svg"], "cannot write no-such-folder/loads.svg"),
    ],
)
def test_wrong_input_is_one_line(
    log: Path, content: bytes | None, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        log.write_bytes(content)
    assert main(["loads", str(log), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    assert message in err
