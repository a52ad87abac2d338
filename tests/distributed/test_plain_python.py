"""A script without a launcher, as a notebook's first cell is one: its process is the only rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks import OF_A_LAUNCHER, PATIENCE_S, RANK_ENVIRONMENT, run_ranks

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


def alone(way: str, folder: str) -> float:
    """The script in a process that has imported everything."""
    for name in OF_A_LAUNCHER:
        del os.environ[name]
    sys.argv = ["-c", way, folder]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, names)
    return names["loss"]


@pytest.fixture(scope="module")
def loss() -> float:
    """Loss of one step by a loop of one's own."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER} | RANK_ENVIRONMENT
    command = [sys.executable, "-c", SCRIPT, "initialize"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.rpartition("loss ")[2].split()[0])


def test_a_loop_of_ones_own(loss: float) -> None:
    assert 4.0 < loss < 5.0  # ln 97


@pytest.mark.parametrize("way", ["pipeline", "deepspeed"])
def test_the_trainer(loss: float, way: str, tmp_path: Path) -> None:
    """With a pipeline, and with DeepSpeed alone."""
    assert run_ranks(alone, 1, way, str(tmp_path)) == [pytest.approx(loss, rel=1e-5)]
