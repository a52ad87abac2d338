"""Islands of the main job: one JSON, one command, another ``--island`` each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.archipelago import Island, lighthouse, run_islands
from support.jobs import TINY, finetune, flags
from support.ranks import free_port, run_ranks


def write_config(folder: Path, averaging: dict[str, Any] | None) -> Path:
    path = folder / "ds.json"
    section = {"pipeline": {"stages": 1}} if averaging is None else {"pipeline": {"stages": 1}, "averaging": averaging}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
    path.write_text(json.dumps({**sizes, "optimizer": optimizer, "paceline": section}))
    return path


def test_two_islands(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "model"
    with lighthouse() as light:
        averaging = {"lighthouse": light, "min_islands": 2, "every_tokens": 100, "decay_tokens": 10_000}
        config = write_config(tmp_path, averaging)
        common = {**TINY, "deepspeed": config, "output_dir": output, "save_steps": 1}
        islands = run_islands([Island(finetune, 1, (flags(**common, island=n),)) for n in range(2)])
        # A checkpoint of its last step, and of before the last average: it looks for the others again.
        write_config(tmp_path, {**averaging, "min_islands": 1, "islands": 2})
        went_on = {**common, "output_dir": tmp_path / "again", "max_steps": 1, "island": 0}
        went_on["resume_from_checkpoint"] = output / "island0/checkpoint-1"
        [again] = run_ranks(finetune, 1, flags(**went_on))
    assert [code for ((code, _),) in islands] == [0, 0], islands
    assert again[0] == 0, again
    assert again[1].count("no other island is there at the end") == 1
    models, first_losses = [], set()
    for number in range(2):
        folder = output / f"island{number}"
        models.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        exchanges = [line["averaging"] for line in lines if "averaging" in line]
        assert [exchange["round"] for exchange in exchanges[1:]] == list(range(1, len(exchanges)))
        assert exchanges[-1]["weights"] == [0.5, 0.5]
        assert exchanges[-1]["bytes_sent"] > 0
        factors = [line["learning_rate_factor"] for line in lines if "loss" in line]
        assert 1 > factors[0] > factors[-1] > 0.1
        first_losses.add(next(line["loss"] for line in lines if "loss" in line))
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert len(first_losses) == 2  # other shares of the data


@pytest.mark.parametrize(
    ("averaging", "more", "message"),
    [
        (None, {"island": 0}, "--island 0: there are no islands without averaging"),
        ({"min_islands": 2}, {"island": 2}, "this is island 2, and the data are divided into 2 shares"),
        ({"min_islands": 2}, {}, "PACELINE_ISLAND is not set: say which island this is"),
        ({"timeout_s": 0.5}, {"island": 0}, "no lighthouse answers at"),
        (
            {"combine_rounds": 2, "combine_weights": "held_out"},
            {"island": 0, "validation_split_percentage": 0},
            "there are no held-out data to fit the weights on: hold some out with --validation_split_percentage",
        ),
    ],
)
def test_wrong_islands(averaging: Any, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    if averaging is not None:
        averaging["lighthouse"] = f"127.0.0.1:{free_port()}"
    config = write_config(tmp_path, averaging)
    ranks = run_ranks(finetune, 1, flags(**TINY, deepspeed=config, output_dir=tmp_path / "model", **more))
    [(code, errors)] = ranks
    assert code == 2
    [line] = [line for line in errors.splitlines() if line.startswith("paceline: error: ")]
    assert message in line
