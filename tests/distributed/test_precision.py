"""Every precision with ZeRO 0 and 1, activation checkpointing, clipping, tied weights and unequal stages."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from support.jobs import ds_config, model_config, step_batches, train_alone
from support.ranks import run_ranks

STEPS = 3
UNEVEN = [0, 1, 4, 6]
"""The embedding alone; three layers; a layer and the head, whose weight is the embedding's."""
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-3}
"""Relative, of losses against fp32 in a single process."""


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs without its instructions; torch computes it there all the same, slowly."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def make(dtype: str, zero: int, partition: Any, checkpointing: bool = False, **changes: Any) -> Any:
    import paceline

    allow_fp16()
    config = ds_config(
        gradient_accumulation_steps=8,
        gradient_clipping=0.5,
        zero_optimization={"stage": zero},
        paceline={"pipeline": {"stages": len(partition) - 1, "partition": partition}},
        **changes.pop("config", {}),
    )
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {}), **changes}
    if checkpointing:
        config["pipeline"] = {"activation_checkpoint_interval": 1}
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    return engine


def losses() -> dict[str, list[float]]:
    found = {}
    for dtype, (zero, checkpointing) in product(TOLERANCE, ((0, False), (1, True))):
        engine = make(dtype, zero, UNEVEN, checkpointing)
        found[f"{dtype} {zero}"] = [engine.train_batch(iter(step_batches(step))).item() for step in range(STEPS)]
        dtypes = {p.dtype for p in engine.module.parameters()}
        masters = {owned.master.dtype for owned in engine.optimizer.owned}
        assert masters == {torch.float32}, masters
        assert len(dtypes) == 1, dtypes
        assert str(dtypes.pop()).endswith({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype])
        engine.destroy()
    return found


def test_every_precision() -> None:
    alone = run_ranks(train_alone, 1, clipping=0.5, steps=STEPS)[0]["losses"]
    for rank in run_ranks(losses, len(UNEVEN) - 1):
        for dtype, tolerance in TOLERANCE.items():
            one, other = rank[f"{dtype} 0"], rank[f"{dtype} 1"]
            assert one == pytest.approx(alone, rel=tolerance), dtype
            assert other == one, f"{dtype}: ZeRO 0, and ZeRO 1 with activation checkpointing"


def overflowing(stage: int) -> dict[str, Any]:
    """One step in which the gradients of one stage alone are too large for fp16."""
    engine = make("fp16", 1, UNEVEN, initial_scale_power=8, hysteresis=1, loss_scale_window=2)
    before = [p.detach().clone() for p in engine.module.parameters()]
    scales, unchanged = [], []
    for step in range(5):
        handle = None
        if step == 1 and engine.stage_id == stage:
            victim = next(p for p in engine.module.parameters() if p.requires_grad)
            handle = victim.register_hook(lambda gradient: gradient.fill_(65504) * 2)
        engine.train_batch(iter(step_batches(step)))
        if handle is not None:
            handle.remove()
        now = [p.detach().clone() for p in engine.module.parameters()]
        unchanged.append(all(torch.equal(a, b) for a, b in zip(before, now, strict=True)))
        before = now
        scales.append(engine.optimizer.loss_scale)
    return {
        "scales": scales,
        "unchanged": unchanged,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
    }


@pytest.mark.parametrize("stage", [0, 2])
def test_an_overflow_on_one_stage_skips_the_step_on_all(stage: int) -> None:
    """The dynamic loss scale is one for all stages: halved by the overflow, doubled after two good steps."""
    ranks = run_ranks(overflowing, 3, stage)
    for rank in ranks:
        assert rank["unchanged"] == [False, True, False, False, False]
        assert rank["scales"] == ranks[0]["scales"]
        assert rank["scales"][:3] == [256, 128, 128]
        assert rank["scales"][-1] == 256
        assert rank["skipped"] == 1
        assert rank["steps"] == 5


def averages(dtype: str) -> Any:
    engine = make("bf16", 1, [0, 3, 6], config={"data_types": {"grad_accum_dtype": dtype}})
    engine.train_batch(iter(step_batches(0)))
    gradients = engine.optimizer.layout.gradient_dtype
    loss = engine.train_batch(iter(step_batches(1))).item()
    engine.destroy()
    return str(gradients), loss


def both_averages() -> list[Any]:
    return [averages(dtype) for dtype in ("fp32", "bf16")]


def test_gradients_accumulate_in_fp32_unless_told_otherwise() -> None:
    (wide, wanted), (narrow, loss) = run_ranks(both_averages, 2)[0]
    assert (wide, narrow) == ("torch.float32", "torch.bfloat16")
    assert loss == pytest.approx(wanted, rel=1e-2)
