"""The main job on conversations, prompts and streams: the same run for every number of stages and replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.jobs import TINY, finetune, flags
from support.ranks import run_ranks

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def sample(kind: str, i: int) -> dict[str, Any]:
    question, answer = f"what is {i}?", f"it is {i}" + " indeed" * (i % 5)
    if kind == "messages":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    return {"prompt": question, "completion": answer}


def run(folder: Path, kind: str, ranks: int, stages: int, options: dict[str, Any], switches: list[str]) -> list[Any]:
    folder.mkdir()
    file, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    file.write_text("".join(json.dumps(sample(kind, i)) + "\n" for i in range(90)))
    held_out.write_text("".join(json.dumps(sample(kind, i)) + "\n" for i in range(90, 103)))
    (folder / "chat.jinja").write_text(TEMPLATE)
    ds_config = folder / "ds.json"
    ds_config.write_text(json.dumps({"train_batch_size": 8, "paceline": {"pipeline": {"stages": stages}}}))
    values = {name: value for name, value in TINY.items() if name != "max_train_samples"} | options
    values |= {"logging_steps": 1, "block_size": 48, "train_file": file, "validation_file": held_out}
    values |= {"deepspeed": ds_config, "output_dir": folder / "model", "chat_template_path": folder / "chat.jinja"}
    for code, errors in run_ranks(finetune, ranks, flags(**values) + switches):
        assert code == 0, errors
    lines = [json.loads(line) for line in (folder / "model" / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines] + [lines[-2]["tokens"]]


@pytest.mark.parametrize(
    ("kind", "options", "switches"),
    [
        ("messages", {"shuffle_buffer_size": 20}, ["--packing", "--streaming"]),
        ("prompts", {"pad_to_multiple_of": 8}, []),
    ],
    ids=["messages-packed-streamed", "prompts-padded"],
)
def test_the_same_run_in_every_shape(kind: str, options: dict[str, Any], switches: list[str], tmp_path: Path) -> None:
    wanted = run(tmp_path / "1", kind, 1, 1, options, switches)
    assert len(wanted) == 6
    assert wanted[3] < wanted[0]
    got = run(tmp_path / "4", kind, 4, 2, options, switches)
    assert got[:-1] == pytest.approx(wanted[:-1], rel=1e-5)


def test_an_evaluation_without_held_out_data_is_said(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(sample("prompts", i)) + "\n" for i in range(40)))
    values = {**TINY, "max_steps": 1, "block_size": 48, "train_file": file, "output_dir": tmp_path / "model"}
    values |= {"validation_split_percentage": 0}
    for strategy, is_said in (("steps", True), ("no", False)):
        switches = ["--eval_strategy", strategy, "--overwrite_output_dir"]
        ((code, errors),) = run_ranks(finetune, 1, flags(**values) + switches)
        assert code == 0, errors
        said = f"--eval_strategy {strategy}: there are no held-out data, and nothing is evaluated; hold some out with"
        assert (said in errors) == is_said, errors


def test_a_stream_without_max_steps(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(sample("messages", 0)) + "\n")
    ((code, errors),) = run_ranks(finetune, 1, ["--streaming", *flags(train_file=file, model_type="llama")])
    assert code == 2
    assert "--streaming True: a stream has no known end to count epochs by. Remedy: --max_steps" in errors
