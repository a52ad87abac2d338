"""``paceline profile``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from paceline.launch.cli import main
from paceline.measure.profile_file import Profile

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_file_and_its_facts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.json"
    assert main(["profile", model, "--micro-batch-size", "2", "--output", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    profile = Profile.load(path)
    assert (profile.micro_batch_size, profile.sequence_length, profile.gradient_checkpointing) == (2, 64, False)
    assert [item.name for item in profile.items] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert profile.model["num_hidden_layers"] == 3
    assert [device.speed for device in profile.devices] == [1.0]
    assert set(profile.versions) == {"paceline", "torch", "transformers"}
    assert shown["file"] == str(path)
    assert [(row["kind"], row["count"]) for row in shown["kinds"]] == [
        ("Embedding", 1),
        ("LlamaDecoderLayer", 3),
        ("Head", 1),
    ]
    assert shown["kinds"][1]["forward_s"] == profile.items[1].forward_s


def test_as_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"{model}/config.json", "--seq-length", "16", "--dtype", "bfloat16", "--gradient-checkpointing"]
    assert main(["profile", *argv, "--output", str(tmp_path / "p.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama, bfloat16, micro-batches of 1 x 16 tokens, gradient checkpointing"
    assert lines[2].split() == ["kind", *lines[2].split()[1:]]
    layer = lines[4].split()
    assert layer[:2] == ["LlamaDecoderLayer", "3"]
    assert layer[-1] == "9280"
    assert lines[-1] == f"written to {tmp_path / 'p.json'}"


def test_what_is_no_file_is_not_replaced(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as /dev/null: the whole file comes under another name first."""
    os.mkfifo(tmp_path / "pipe")
    assert main(["profile", model, "--seq-length", "8", "--output", str(tmp_path / "pipe")]) == 2
    assert "it is no name of a file but a device or a pipe, which a file would replace" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seq-length", "65"], "sequence_length is 65 and the model has 64 positions: give at most 64."),
        (["--micro-batch-size", "0"], "micro_batch_size is 0: give a whole number from 1 upwards."),
        (
            ["--output", "/proc/none/p.json"],
            "--output /proc/none/p.json: its directory does not exist; make it, or give another path.",
        ),
        (["--output", ""], "--output : it is no name of a file but a directory; give another path."),
        (["--output", "/proc/p.json"], "profile /proc/p.json cannot be written: "),
    ],
)
def test_what_cannot_be(argv: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", model, "--seq-length", "8", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paceline: {message}")
    assert err.count("\n") == 1


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path / "nothing")]) == 2
    assert "does not exist: give a directory" in capsys.readouterr().err


def test_what_has_no_room_is_told_before_it_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**{**SIZES, "vocab_size": 2**31, "hidden_size": 2**12}).save_pretrained(tmp_path / "large")
    path = tmp_path / "p.json"
    assert main(["profile", str(tmp_path / "large"), "--output", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paceline: embedding needs about 6.55e+04 GiB and ")
    assert err.endswith("give a smaller --micro-batch-size or --seq-length, or measure on a larger device.\n")
    assert not path.exists()
