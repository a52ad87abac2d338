"""A checkpoint loads into another number of stages, replicas, another partition and ZeRO stage, exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import Checkpoint
from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks
from support.saves import assert_same_tensors

BEFORE, AFTER = 3, 4
INTO = {(2, 1): (4, 1), (1, 2): (3, 1), (3, 1): (2, 2), (2, 2): (1, 1)}
"""Shape (stages, replicas) that is saved, and the one that it is loaded into."""
VARIANTS = [(0, "fp32"), (1, "bf16")], [(1, "fp32"), (0, "bf16")]
"""ZeRO stage and precision with which the shapes are saved in turn; they are loaded with the other ZeRO stage."""


def make(stages: int, zero: int, dtype: str, partition: Any = "uniform", **changes: Any) -> Any:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        zero_optimization={"stage": zero},
        bf16={"enabled": dtype == "bf16"},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}},
        paceline={"pipeline": {"stages": stages, "partition": partition}},
    )
    engine, *_ = paceline.initialize(model=model_config(**{"tie_word_embeddings": False, **changes}), config=config)
    return engine


def steps(engine: Any, first: int, count: int) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    return [
        engine.train_batch(iter(step_batches(step)[replica::replicas])).item() for step in range(first, first + count)
    ]


def save(root: str, stages: int, variants: list[tuple[int, str]]) -> dict[str, list[float]]:
    """Train, save, and go on without a break: the reference."""
    losses = {}
    for zero, dtype in variants:
        engine = make(stages, zero, dtype)
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(f"{root}/{zero}{dtype}", tag="saved", client_state={"seen": BEFORE})
        losses[f"{zero}{dtype}"] = steps(engine, BEFORE, AFTER)
        engine.destroy()
    return losses


def load(root: str, stages: int, variants: list[tuple[int, str]]) -> dict[str, list[float]]:
    """Load into this shape and the other ZeRO stage; what was loaded is saved again as it is."""
    losses = {}
    for zero, dtype in variants:
        engine = make(stages, 1 - zero, dtype, partition="parameters")
        path, state = engine.load_checkpoint(f"{root}/{zero}{dtype}")
        assert path is not None
        assert path.endswith("saved")
        assert state == {"seen": BEFORE}
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(f"{root}/{zero}{dtype}", tag="again")
        losses[f"{zero}{dtype}"] = steps(engine, BEFORE, AFTER)
        engine.destroy()
    return losses


@pytest.mark.parametrize("shape", list(INTO), ids=lambda shape: "x".join(map(str, shape)))
def test_every_shape_into_another(shape: tuple[int, int], tmp_path: Path) -> None:
    stages, replicas = shape
    variants = VARIANTS[list(INTO).index(shape) % 2]
    wanted = run_ranks(save, stages * replicas, str(tmp_path), stages, variants)[0]
    into_stages, into_replicas = INTO[shape]
    found = run_ranks(load, into_stages * into_replicas, str(tmp_path), into_stages, variants)
    for zero, dtype in variants:
        key = f"{zero}{dtype}"
        assert_same_tensors(tmp_path / key / "saved", tmp_path / key / "again")
        for rank in found:
            if dtype == "fp32" and replicas == into_replicas:  # every sum runs in the same order
                assert rank[key] == wanted[key]
            else:
                relative = 1e-5 if dtype == "fp32" else 1e-2
                assert rank[key] == pytest.approx(wanted[key], rel=relative)


def tied(root: str, stages: int, partition: Any, load: bool) -> list[float]:
    engine = make(stages, 1, "fp32", partition, tie_word_embeddings=True)
    if load:
        engine.load_checkpoint(root)
    else:
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(root)
    return steps(engine, BEFORE, 3)


def test_tied_weights_and_uneven_stages(tmp_path: Path) -> None:
    """The tied weight is stored once; it loads into both of its copies, or into one."""
    wanted = run_ranks(tied, 4, str(tmp_path), 2, [0, 2, 6], False)[0]
    stored = Checkpoint.open(tmp_path / f"global_step{BEFORE}")
    assert "lm_head.weight" not in stored.names
    for world_size, stages, partition in ((3, 3, [0, 1, 5, 6]), (1, 1, [0, 6])):
        found = run_ranks(tied, world_size, str(tmp_path), stages, partition, True)
        assert found[0] == pytest.approx(wanted, rel=1e-5)


def another_model(root: str) -> None:
    make(2, 0, "fp32", hidden_size=64).load_checkpoint(root)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    from support.ranks import RankError

    run_ranks(tied, 2, str(tmp_path), 2, "uniform", False)
    with pytest.raises(RankError, match=r"does not fit: its model\S+ has the shape \[\d+, 32\], the model's"):
        run_ranks(another_model, 2, str(tmp_path))
