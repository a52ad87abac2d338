"""The main job goes on from its checkpoints: same weights as without a break, for every kind of data and any shape."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import Checkpoint
from support.jobs import TINY, finetune, flags
from support.ranks import run_ranks

STEPS, STOP = 5, 3


def weights(output: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(output.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def job(output: Path, **changes: Any) -> list[str]:
    """With a number of micro-batches, which leaves no choice of stages: two."""
    settings = {**TINY, "lr_scheduler_type": "constant", "save_steps": STOP, "eval_strategy": "no", "logging_steps": 2}
    settings["gradient_accumulation_steps"] = 8
    return flags(**{**settings, "max_steps": STEPS, "output_dir": output, **changes})


def run(argv: list[str], num_ranks: int = 2) -> list[tuple[int, str]]:
    results = run_ranks(finetune, num_ranks, argv)
    assert all(code == 0 for code, _ in results), results
    return results


def data_of(kind: str, folder: Path) -> dict[str, Any]:
    """Rows with a number each, so that a lost or repeated one changes the weights."""
    if kind == "blocks":
        return {}
    file = folder / f"{kind}.jsonl"
    rows = [{"text": f"row {i} " + "word " * (i % 13)} for i in range(400)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train_file": file, "streaming": True, "shuffle_buffer_size": 50, "packing": True}


@pytest.mark.parametrize("kind", ["blocks", "stream packed"])
def test_interrupted_in_mid_epoch(kind: str, tmp_path: Path) -> None:
    data = data_of(kind, tmp_path)
    drop = {"max_train_samples"} if kind.startswith("stream") else set()

    def argv(output: str, **changes: Any) -> list[str]:
        parts = job(tmp_path / output, **data, **changes)
        at = [i for i, part in enumerate(parts) if part.removeprefix("--") in drop]
        return [part for i, part in enumerate(parts) if i not in at and i - 1 not in at]

    run(argv("whole"))
    run(argv("parts", max_steps=STOP))
    run(argv("parts", resume_from_checkpoint="true"))
    wanted, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    reports = [line["step"] for line in lines if "tokens_per_s" in line]
    assert reports == sorted(set(reports))


def test_into_another_shape(tmp_path: Path) -> None:
    """Two stages are saved; one stage and two replicas with ZeRO-1 go on, with the same samples a step."""
    run(job(tmp_path / "whole", gradient_accumulation_steps=4))
    run(job(tmp_path / "parts", gradient_accumulation_steps=4, max_steps=STOP))
    other = tmp_path / "ds.json"
    other.write_text(json.dumps({"zero_optimization": {"stage": 1}, "paceline": {"pipeline": {"stages": 1}}}))
    resumed = job(tmp_path / "parts", gradient_accumulation_steps=2, deepspeed=other, resume_from_checkpoint="auto")
    run(resumed)
    wanted, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_into_another_shape_with_batches_left_open(tmp_path: Path) -> None:
    """Two stages take eight micro-batches where nothing is said, one stage takes one: the checkpoint's batch stays."""
    output, file = tmp_path / "run", tmp_path / "ds.json"

    def argv(steps: int, stages: int, **changes: Any) -> list[str]:
        file.write_text(json.dumps({"paceline": {"pipeline": {"stages": stages}}}))
        parts = job(output, deepspeed=file, max_steps=steps, save_steps=1, **changes)
        at = parts.index("--per_device_train_batch_size"), parts.index("--gradient_accumulation_steps")
        return [part for i, part in enumerate(parts) if i not in at and i - 1 not in at]

    run(argv(1, 2))
    [(_, told)] = run(argv(2, 1, resume_from_checkpoint="true"), 1)
    assert told.count("a global batch of 8, as before the checkpoint\n") == 1


def test_with_another_weight_decay(tmp_path: Path) -> None:
    """The JSON has none, so that --weight_decay counts, and is 0; with another one there are other groups."""
    file, output = tmp_path / "ds.json", tmp_path / "run"
    file.write_text(
        json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "paceline": {"pipeline": {"stages": 1}}})
    )
    changes = {"deepspeed": file, "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear"}
    run(job(output, max_steps=1, save_steps=1, **changes), 1)
    checkpoint = Checkpoint.open(output / "checkpoint-1")
    assert [group["options"]["weight_decay"] for group in checkpoint.rank_states[0]["groups"]] == [0.0]
    checkpoint.close()
    [(_, told)] = run(job(output, max_steps=2, weight_decay=0.1, resume_from_checkpoint="true", **changes), 1)
    assert told.count("the weight decay 0.1 gives way to the checkpoint's, 0\n") == 1


def asked_to_stop(argv: list[str]) -> tuple[int, str]:
    """Rank 1 alone gets a SIGTERM in the middle of training, which has begun: before that there is nothing to save."""
    from paceline.supervise.watch import WATCH

    if os.environ["RANK"] == "1":

        def ask() -> None:
            while WATCH.step < 0:
                stop.wait(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        stop = threading.Event()
        threading.Thread(target=ask, daemon=True).start()
    return finetune(argv)


def test_one_rank_is_asked_and_all_stop_together(tmp_path: Path) -> None:
    many = {"max_steps": 400, "save_steps": 1000, "logging_steps": 1000}
    results = run_ranks(asked_to_stop, 2, job(tmp_path / "run", **many))
    assert [code for code, _ in results] == [143, 143]
    assert "stopped by SIGTERM after step" in results[0][1]
    assert "--resume_from_checkpoint true" in results[0][1]
    assert results[1][1] == ""
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    assert (tmp_path / "run" / "latest").read_text().strip() == checkpoint.name
    run(job(tmp_path / "run", **{**many, "max_steps": step + 2}, resume_from_checkpoint="true"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "ran" in line]
    assert [(line["step"], "loss" in line) for line in lines] == [(step, False), (step + 2, True)]
    assert sum(len(ran["seconds"]) for line in lines for ran in line["ran"]) == step + 2
    (told,) = lines[1:]  # of losses from both parts, and of the second one's time
    tokens_a_step = told["tokens"] / (step + 2)
    assert told["tokens_per_s"] * told["step_s"] == pytest.approx(tokens_a_step)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tokens_per_s"] * summary["training_s"] == pytest.approx(2 * tokens_a_step)


def test_every_metric_reaches_the_monitors(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    monitor = {"enabled": True, "output_path": str(tmp_path / "monitor"), "job_name": "run"}
    config.write_text(json.dumps({"csv_monitor": monitor, "paceline": {"pipeline": {"stages": 2}}}))
    run(job(tmp_path / "out", deepspeed=config, eval_strategy="steps", eval_steps=2))
    told = {file.stem for file in (tmp_path / "monitor").rglob("*.csv")}
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    names = set()
    for line in lines:
        for key, value in line.items():
            if key == "ran":  # how each step ran, a list
                continue
            names |= {f"{key}_{inner}" for inner in value} if isinstance(value, dict) else {key}
    assert {"loss", "grad_norm", "eval_loss", "rank0_idle_s"} <= names
    assert {f"Paceline_{name}" for name in names} <= told


def test_a_checkpoint_past_the_last_step(tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(job(output, max_steps=2, save_steps=2, gradient_accumulation_steps=1), 1)
    again = job(output, max_steps=1, gradient_accumulation_steps=1, resume_from_checkpoint="true")
    [(code, told)] = run_ranks(finetune, 1, again)
    assert code == 2
    assert "checkpoint-2 is of step 2, and 1 steps are asked for: nothing is left to train; raise --max_steps" in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume_from_checkpoint": "true"}, "has no complete checkpoint"),
        ({"resume_from_checkpoint": "nowhere"}, "no such directory"),
        ({"save_strategy": "no"}, "cannot stand with --save_strategy no"),
        ({"save_total_limit": 0}, "must be at least 1"),
    ],
)
def test_wrong_flags(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    results = run_ranks(finetune, 2, job(tmp_path / "out", **changes))
    assert [code for code, _ in results] == [2, 2]
    assert message in results[0][1]


def test_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    results = run_ranks(finetune, 2, job(tmp_path / "out", resume_from_checkpoint=tmp_path))
    assert [code for code, _ in results] == [2, 2]
    assert f"--resume_from_checkpoint {tmp_path}: {tmp_path} is a Hugging Face model, no checkpoint" in results[0][1]


def test_an_export_does_not_replace_the_model_that_the_run_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.launch.cli import main

    base, output = tmp_path / "base", tmp_path / "out"
    run(job(base, max_steps=1))
    before = weights(base)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {number} " * 40}) + "\n" for number in range(200)))
    tuned = job(output, max_steps=STOP, model_name_or_path=base, train_file=data)
    of_new_models = {"--model_type", "--config_overrides"}
    pairs = zip(tuned[::2], tuned[1::2], strict=True)
    run([part for pair in pairs if pair[0] not in of_new_models for part in pair])
    export = ["export", str(output), str(base)]
    assert main(export) == 2
    assert f"{base} holds the model that the run began with" in capsys.readouterr().err
    assert all(torch.equal(weights(base)[name], tensor) for name, tensor in before.items())
    assert main([*export, "--overwrite"]) == 0
    assert any(not torch.equal(weights(base)[name], tensor) for name, tensor in before.items())


def test_a_checkpoint_from_elsewhere_is_not_mixed_with_an_earlier_run(tmp_path: Path) -> None:
    """Its checkpoints, model and metrics stay unless they may be overwritten, and then all of them go."""
    source, output = tmp_path / "source", tmp_path / "out"
    run(job(source, max_steps=STOP))
    run(job(output, max_steps=STOP, seed=7))
    before = (output / "metrics.jsonl").read_text()
    resuming = job(output, resume_from_checkpoint=source / f"checkpoint-{STOP}", save_total_limit=1)
    for missing, message in ((None, "already holds a model"), ("config.json", f"holds checkpoint-{STOP} of an ")):
        if missing is not None:
            (output / missing).unlink()
        results = run_ranks(finetune, 2, resuming)
        assert [code for code, _ in results] == [2, 2]
        assert message in results[0][1]
    assert (output / f"checkpoint-{STOP}").exists()
    assert (output / "metrics.jsonl").read_text() == before
    run([*resuming, "--overwrite_output_dir"])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert all(line["step"] > STOP for line in lines)
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]


def test_auto_does_not_start_over_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(job(output, max_steps=STOP))
    (output / f"checkpoint-{STOP}" / "manifest.json").write_text("{")
    results = run_ranks(finetune, 2, job(output, resume_from_checkpoint="auto"))
    assert [code for code, _ in results] == [2, 2]
    assert "no checkpoint in" in results[0][1]
    assert "manifest.json is damaged" in results[0][1]
    (output / "config.json").unlink()
    results = run_ranks(finetune, 2, job(output))
    assert [code for code, _ in results] == [2, 2]
    assert "none of them complete" in results[0][1]
    assert (output / f"checkpoint-{STOP}").exists()  # nobody said that it may go
    run(job(output, resume_from_checkpoint="auto", overwrite_output_dir=True))
    assert (output / "latest").read_text().strip() == f"checkpoint-{STEPS}"


def test_what_is_there_is_not_lost(tmp_path: Path) -> None:
    """Checkpoints of an earlier run are neither mixed with a new one's nor deleted without being told to."""
    output = tmp_path / "out"
    run(job(output, max_steps=STOP))
    (output / "config.json").unlink()
    results = run_ranks(finetune, 2, job(output))
    assert [code for code, _ in results] == [2, 2]
    assert "holds checkpoint-3 of an earlier run: go on from it with --resume_from_checkpoint true" in results[0][1]
    other = {"seed": 7, "resume_from_checkpoint": "true"}
    results = run_ranks(finetune, 2, job(output, **other))
    assert [code for code, _ in results] == [2, 2]
    assert "seed" in results[0][1]
    run(job(output, max_steps=2, overwrite_output_dir=True))
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
