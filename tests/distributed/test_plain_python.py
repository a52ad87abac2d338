"""A script without a launcher, as a notebook's first cell is one: its process is the only rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ranks import OF_A_LAUNCHER, PATIENCE_S, RANK_ENVIRONMENT

SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
import paceline

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=97))
ids = torch.arange(4 * 16).reshape(4, 16)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "paceline": {"pipeline": {"stages": 1}},
}
if sys.argv[1] == "initialize":
    engine, *_ = paceline.initialize(model=model, config=config)
    batches = [{"input_ids": half, "labels": half} for half in ids.split(2)]
    loss = engine.train_batch(iter(batches)).item()
else:
    if sys.argv[1] == "deepspeed":
        del config["paceline"]
    args = TrainingArguments(
        sys.argv[2], deepspeed=config, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", learning_rate=1e-3, weight_decay=0.0)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    loss = paceline.PacelineTrainer(model=model, args=args, train_dataset=rows).train().training_loss
print("loss", loss)
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """One step each by a loop of one's own, by a Trainer with a pipeline, and by one with DeepSpeed alone."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER} | RANK_ENVIRONMENT
    directory = tmp_path_factory.mktemp("plain")
    processes = {
        way: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, way, str(Path(directory, way))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way in ("initialize", "pipeline", "deepspeed")
    }
    found = {}
    for way, process in processes.items():
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{way}: {errors}"
        found[way] = float(out.rpartition("loss ")[2].split()[0])
    return found


def test_a_loop_of_ones_own(losses: dict[str, float]) -> None:
    assert 4.0 < losses["initialize"] < 5.0  # ln 97


@pytest.mark.parametrize("way", ["pipeline", "deepspeed"])
def test_the_trainer(losses: dict[str, float], way: str) -> None:
    assert losses[way] == pytest.approx(losses["initialize"], rel=1e-5)
