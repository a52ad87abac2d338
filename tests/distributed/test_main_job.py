"""The main job as people start it: through the launcher, on its embedded default, and with their own flags."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.jobs import TINY, finetune, finetune_as_a_process, flags
from support.ranks import OF_A_LAUNCHER, RANK_ENVIRONMENT, RankError, free_port, launch, run_ranks


@pytest.mark.launcher
def test_embedded_default_through_the_launcher(tmp_path: Path) -> None:
    """What the quickstart runs, only shorter: trains, evaluates, exports, loads again and completes a line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "model"
    own = flags(max_steps=12, eval_steps=6, logging_steps=6, sample_every=12, output_dir=output)
    argv = ["--module", "paceline.launch.finetune", *own]
    done = launch(argv, num_ranks=2)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "Traceback" not in told
    assert "Warning" not in told
    perplexities = [float(value) for value in re.findall(r"held-out loss [\d.]+, perplexity ([\d.]+)", told)]
    assert len(perplexities) == 3
    assert perplexities[2] < perplexities[1] < perplexities[0]
    samples = re.findall(r"('    def .*) continues as (.*)", told)
    assert len(samples) == 2
    assert samples[0] == samples[1]  # by the pipeline after its last step, and by what was exported
    assert re.search(r"step 6/12: loss \d\.\d+, grad norm \d\.?\d*, s/step ", told)
    assert told.count("config: {") == 1
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.vocab_size == len(tokenizer)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["perplexity"] == pytest.approx(perplexities[2], rel=1e-2)
    assert [rank["holds"] for rank in summary["ranks"]] == [
        "embedding, layers 0-1 (1.08 M parameters)",
        "layers 2-3, head (1.08 M parameters)",
    ]
    for rank in summary["ranks"]:
        assert rank["peak_memory_bytes"] > 0
        parts = sum(rank[name] for name in ("compute_s", "communication_s", "idle_s", "other_s"))
        assert parts == pytest.approx(rank["wall_s"], rel=0.05)
    assert summary["tokens"] == 12 * 8 * 128
    assert summary["model_flop_per_s"] > 0
    (pair,) = json.loads((output / "report.json").read_text())["timelines"]
    assert (pair["step"], (pair["before"] or pair["after"])["step"]) == (None, 12)
    assert "The last recorded step" in (output / "report.html").read_text()
    report = json.loads((output / "report.json").read_text())
    assert report["run"]["command"] == f"deepspeed --num_gpus 2 --module paceline.launch.finetune {' '.join(own)}"
    (row,) = report["samples"]
    assert (row["step"], repr(row["prompt"]), repr(row["completion"])) == (12, *samples[0])
    assert [path.name for path in output.glob("model*")] == ["model.safetensors"]


def losses(folder: Path, ranks: int, stages: int, **changes: Any) -> list[float]:
    folder.mkdir()
    ds_config = folder / "ds.json"
    ds_config.write_text(json.dumps({"train_batch_size": 8, "paceline": {"pipeline": {"stages": stages}}}))
    values = TINY | {"per_device_train_batch_size": 2, "logging_steps": 1, **changes}
    argv = flags(**values, deepspeed=ds_config, output_dir=folder / "model")
    for code, errors in run_ranks(finetune, ranks, argv):
        assert code == 0, errors
    lines = [json.loads(line) for line in (folder / "model" / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines if "sample" not in line]


def test_the_same_run_for_every_number_of_stages_and_replicas(tmp_path: Path) -> None:
    """Same samples in every step, same weights at the start, same decay groups: the same losses."""
    changes = {"weight_decay": 0.1, "gradient_checkpointing": True}
    wanted = losses(tmp_path / "1", 1, 1, **changes)
    assert len(wanted) == 5
    for ranks, stages in ((2, 1), (4, 2)):
        got = losses(tmp_path / f"{ranks}x{stages}", ranks, stages, **changes)
        assert got == pytest.approx(wanted, rel=1e-5), (ranks, stages)


def test_completing_lines_changes_nothing(tmp_path: Path) -> None:
    wanted = losses(tmp_path / "silent", 2, 2, max_steps=2)
    assert losses(tmp_path / "told", 2, 2, max_steps=2, sample_every=1, sample_prompt="    def f(") == wanted


def test_an_epoch_and_a_schedule_of_deepspeeds(tmp_path: Path) -> None:
    """Steps follow from epochs, and the JSON's schedule from the steps."""
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    }
    ds_config = tmp_path / "ds.json"
    ds_config.write_text(json.dumps({"scheduler": scheduler, "paceline": {"pipeline": {"stages": 2}}}))
    values = {k: v for k, v in TINY.items() if k != "max_steps"}
    values |= {"num_train_epochs": 2, "max_train_samples": 43, "gradient_accumulation_steps": 2, "logging_steps": 1}
    argv = flags(**values, warmup_ratio=0.5, eval_strategy="epoch", deepspeed=ds_config, output_dir=tmp_path / "model")
    ranks = run_ranks(finetune, 2, argv)
    assert [code for code, _ in ranks] == [0, 0], ranks
    told = "each epoch leaves out 3 of 43 samples, others each time, which do not fill a global batch of 4"
    assert [errors.count(told) for _, errors in ranks] == [1, 0]
    lines = [json.loads(line) for line in (tmp_path / "model" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert len(rates) == 20
    assert rates[0] == 0.0  # those that steps were taken with, not the next one's
    assert rates.index(max(rates)) in (10, 11)
    assert rates[-1] <= max(rates) / 5
    assert [line["step"] for line in lines if "perplexity" in line] == [0, 10, 20]


def test_a_finished_run_is_neither_lost_nor_overwritten_unless_asked(tmp_path: Path) -> None:
    """Started again to go on from its last checkpoint, it keeps its summary."""
    output = tmp_path / "model"
    argv = flags(**TINY | {"max_steps": 2, "gradient_accumulation_steps": 8}, save_steps=1, output_dir=output)
    resuming = [*argv, "--resume_from_checkpoint", "auto"]
    assert [code for code, _ in run_ranks(finetune, 2, resuming)] == [0, 0]
    before = (output / "summary.json").read_text()
    assert json.loads(before)["train_loss"] > 0
    assert [code for code, _ in run_ranks(finetune, 2, resuming)] == [0, 0]
    assert (output / "summary.json").read_text() == before
    ((code, errors), _) = run_ranks(finetune, 2, argv)
    assert code == 2
    assert "already holds a model: choose another directory, or replace it with --overwrite_output_dir" in errors
    assert [code for code, _ in run_ranks(finetune, 2, [*argv, "--overwrite_output_dir"])] == [0, 0]
    assert (output / "summary.json").read_text() != before


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="needs a machine without flash_attn")
def test_attention_that_is_not_installed(tmp_path: Path) -> None:
    settings = TINY | {"gradient_accumulation_steps": 8, "attn_implementation": "flash_attention_2"}
    argv = flags(**settings, output_dir=tmp_path / "model")
    results = run_ranks(finetune, 2, argv)
    assert [code for code, _ in results] == [2, 2]
    errors = "".join(text for _, text in results)
    assert "--attn_implementation flash_attention_2: " in errors
    assert "install what it needs, or choose eager or sdpa." in errors


def with_something_to_do_at_the_end(argv: list[str], made: Path, *unset: str) -> None:
    """The job of a process in which somebody, as wandb, does his last as Python ends."""
    atexit.register(made.touch)
    finetune_as_a_process(argv, *unset)


def test_python_alone(tmp_path: Path) -> None:
    argv = flags(**TINY | {"max_steps": 1}, output_dir=tmp_path / "model")
    with pytest.raises(RankError, match="died with exit status 0"):
        run_ranks(with_something_to_do_at_the_end, 1, argv, tmp_path / "made", *OF_A_LAUNCHER)
    assert (tmp_path / "made").exists()
    again = tmp_path / "made again"
    with pytest.raises(RankError, match="died with exit status 2"):  # there is a model already
        run_ranks(with_something_to_do_at_the_end, 1, argv, again, *OF_A_LAUNCHER)
    assert again.exists()
    assert json.loads((tmp_path / "model" / "summary.json").read_text())["stages"] == 1


@pytest.mark.launcher
def test_a_script_by_its_path() -> None:
    """As `deepspeed --launcher slurm` starts it; files beside it are named as those of the standard library."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "launch" / "finetune.py"), "--model_type", "nope"],
        check=False,
        capture_output=True,
        text=True,
        env=environment | RANK_ENVIRONMENT,
    )
    assert (done.returncode, "--model_type nope: transformers has no such type" in done.stderr) == (2, True), (
        done.stderr
    )


@pytest.mark.launcher
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("def f(x):\n    return x\n" * 1000)
    prefix = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    argv = flags(**TINY | {"max_steps": 1, "gradient_accumulation_steps": 8}, output_dir=tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*prefix, "-m", "paceline.launch.finetune", *argv, "--train_file", str(tmp_path / "train.txt")],
        check=False,
        capture_output=True,
        text=True,
        env=environment | RANK_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "model" / "summary.json").read_text())["stages"] == 2
