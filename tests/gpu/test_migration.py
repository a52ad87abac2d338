"""Layers that move between stages on one GPU: the losses of a run without, for every precision."""

from __future__ import annotations

import os
from typing import Any

import pytest

from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks

pytestmark = pytest.mark.gpu

STEPS = 6
MOVES = {1: [0, 2, 6], 2: [0, 4, 6], 4: [0, 3, 6]}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}
ONE_GPU = {
    "DS_ACCELERATOR": "cuda",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
}


def run(zero: int, precision: str, moves: dict[int, list[int]]) -> dict[str, Any]:
    import paceline

    optimizer = {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}}
    replicas = int(os.environ["WORLD_SIZE"]) // 2
    config = ds_config(
        2,
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        optimizer=optimizer,
        zero_optimization={"stage": zero},
        **PRECISIONS[precision],
    )
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    losses = []
    for step in range(STEPS):
        if step in moves:
            engine.repartition(moves[step])
        batches = step_batches(step)[engine.grid.data_parallel_id :: replicas]
        losses.append(float(engine.train_batch(iter(batches))))
    moved = {parameter.device.type for parameter in engine.module.parameters()}
    found = {"losses": losses, "devices": moved, "migrations": len(engine.migrations)}
    engine.destroy()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (1, 4)])
def test_moved_layers_train_on_as_without(zero: int, ranks: int, precision: str) -> None:
    stayed, moved = (run_ranks(run, ranks, zero, precision, moves, timeout=280, env=ONE_GPU) for moves in ({}, MOVES))
    for found, wanted in zip(moved, stayed, strict=True):
        assert (found["devices"], found["migrations"]) == ({"cuda"}, len(MOVES))
        # Kernels may add up in another order from run to run.
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5 if precision == "fp32" else 1e-3)
