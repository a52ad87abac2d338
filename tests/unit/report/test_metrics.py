"""Metrics file and summary."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.report.metrics import TIMES, MetricsFile, RankTotals, keep_until, summarize, table, write_whole


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    metrics.write({"step": 1, "loss": 2.5})
    metrics.write({"step": 2, "loss": math.nan, "ranks": [{"idle_s": math.inf}]})
    # on disk before it is closed: a killed run leaves what it had
    lines = [json.loads(line) for line in (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None, "ranks": [{"idle_s": None}]}]
    metrics.close()


def test_arrays_are_lists(tmp_path: Path) -> None:
    """As ``compute_metrics`` may return them."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1, "of_labels": np.array([0.5, np.nan]), "mean": np.float32(0.5), "count": torch.tensor(3)})
    metrics.close()
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert found == {"step": 1, "of_labels": [0.5, None], "mean": 0.5, "count": 3}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full: it runs there")
def test_a_full_disk_ends_the_file_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(Path("/dev/full"))
    for step in range(3):
        metrics.write({"step": step})
    metrics.close()
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full ends before step 0: No space left on device"
    ]


@pytest.mark.parametrize("line", ["\0\0\0}", '{"step": null}'])
def test_a_line_that_cannot_be_read_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 cannot be read .*: remove it"):
        keep_until(file, 1)


def test_what_a_link_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(file)
    for content in ("new", "newer"):
        write_whole(link, content)
        assert link.is_symlink()
        assert file.read_text() == content
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", tmp_path / "none" / "below"):
        with pytest.raises(OSError, match=f"'{path}'$"):
            write_whole(path, "content")


def test_a_pipe_takes_what_is_written() -> None:
    """As ``/dev/stdout`` does."""
    ends = os.pipe()
    write_whole(Path(f"/dev/fd/{ends[1]}"), b"content")
    assert os.read(ends[0], 100) == b"content"
    for end in ends:
        os.close(end)


def test_no_path_writes_nothing() -> None:
    MetricsFile(None).write({"step": 1})


def test_what_a_run_that_goes_on_keeps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    keep_until(file, 3)
    assert not file.exists()
    lines = [f'{{"step": {step}}}\n' for step in (1, 3, 4)]
    file.write_text("".join(lines) + '{"step": 5')
    keep_until(file, 3)
    assert file.read_text() == "".join(lines[:2])
    metrics = MetricsFile(file)
    metrics.write({"step": 4})
    metrics.close()
    assert file.read_text() == "".join(lines)
    keep_until(file, 0)
    assert list(tmp_path.iterdir()) == []


def test_summary_adds_up() -> None:
    ranks = [RankTotals(rank, rank, f"layers {rank}", 10) for rank in range(2)]
    for _ in range(2):
        for rank in ranks:
            rank.add({"compute_s": 1.0, "communication_s": 0.5, "idle_s": 0.25, "other_s": 0.25, "wall_s": 2.0})
    summary = summarize(
        ranks, steps=8, tokens=4000, flops_per_token=1e6, train_loss=1.0, evaluation={"perplexity": math.inf},
        facts={"model_type": "llama"},
    )  # fmt: skip
    assert summary["training_s"] == 4.0
    assert summary["tokens_per_s"] == 1000.0
    assert summary["tokens_per_s_per_rank"] == 500.0
    assert summary["model_flop_per_s"] == 1e9
    assert summary["perplexity"] is None
    assert summary["ranks"][1]["compute_s"] == 2.0
    json.dumps(summary, allow_nan=False)
    text = table(summary)
    assert "8 steps, 4,000 tokens in 4.0 s: 1,000 tokens/s (500 a rank), 1.0 GFLOP/s" in text
    assert "   1      1      50%          25%   12%" in text


def test_a_resumed_run_is_measured_by_its_own_part() -> None:
    ranks = [RankTotals(0, 0, "layers 0", 10)]
    ranks[0].add({**dict.fromkeys(TIMES, 0.0), "wall_s": 2.0})
    summary = summarize(
        ranks, steps=8, first_step=6, tokens=4000, first_tokens=3000, flops_per_token=1e6, train_loss=1.0,
        evaluation=None, facts={},
    )  # fmt: skip
    assert (summary["steps"], summary["resumed_from_step"], summary["tokens"]) == (8, 6, 4000)
    assert summary["tokens_per_s"] == 500.0
    assert table(summary).startswith("steps 7 to 8, 1,000 tokens in 2.0 s: 500 tokens/s")
    assert table({**summary, "resumed_from_step": 8}).startswith("all 8 steps were done before, ")
