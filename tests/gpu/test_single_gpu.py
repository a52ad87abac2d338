"""The main job on one GPU: its losses are those of the CPU in fp32, bf16 and fp16; it reports speed and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.jobs import TINY, finetune, flags
from support.ranks import run_ranks

pytestmark = pytest.mark.gpu

STEPS = 20
SIZES = {
    "config_overrides": "hidden_size=256,intermediate_size=512,num_hidden_layers=4,num_attention_heads=4,"
    "num_key_value_heads=4,max_position_embeddings=128",
    "block_size": 128,
    "max_steps": STEPS,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
}


def run(folder: Path, accelerator: str, **precision: Any) -> tuple[list[float], dict[str, Any]]:
    ds_config = folder / f"{accelerator}.json"
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.0, "torch_adam": True}}
    ds_config.write_text(json.dumps({"optimizer": optimizer, "paceline": {"pipeline": {"stages": 1}}, **precision}))
    output = folder / accelerator
    argv = flags(**{**TINY, **SIZES}, deepspeed=ds_config, output_dir=output)
    ((code, errors),) = run_ranks(finetune, 1, argv, timeout=280, env={"DS_ACCELERATOR": accelerator})
    assert code == 0, errors
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], json.loads((output / "summary.json").read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("precision", "relative"),
    [({}, 1e-4), ({"bf16": {"enabled": True}}, 2e-2), ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 2e-2)],
    ids=["fp32", "bf16", "fp16"],
)
def test_main_job_on_cuda(precision: dict[str, Any], relative: float, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses, summary = run(tmp_path, "cuda", **precision)
    wanted, _ = run(tmp_path, "cpu")
    assert len(losses) == len(wanted) == STEPS
    assert losses == pytest.approx(wanted, rel=relative)
    assert losses[-1] < losses[0]
    (rank,) = summary["ranks"]
    print(f"{summary['tokens_per_s']:,.0f} tokens/s, peak memory {rank['peak_memory_bytes'] / 2**20:,.0f} MiB")
    assert summary["tokens_per_s"] > 0
    assert 0 < rank["peak_memory_bytes"] < 4 * 2**30
    assert rank["compute_s"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cuda")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert model.dtype == dtypes.get(next(iter(precision), ""), torch.float32)
