"""Training goes on from a checkpoint bitwise as if it had never stopped, and what cannot be loaded is told."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.jobs import ds_config, model_config, step_batches
from support.ranks import RankError, run_ranks

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def make(dtype: str = "fp32", zero: int = 1) -> Any:
    from deepspeed.accelerator import get_accelerator

    import paceline

    get_accelerator().is_fp16_supported = lambda: True
    config = ds_config(
        2,
        gradient_clipping=0.5,
        zero_optimization={"stage": zero},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 3}},
        gradient_accumulation_steps=4,
    )
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}
    engine, *_ = paceline.initialize(model=model_config("gpt2", **DROPOUT), config=config)
    torch.manual_seed(7 + engine.global_rank)
    return engine


def run(engine: Any, first: int, last: int) -> list[Any]:
    seen: list[Any] = []
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    for step in range(first, last):
        loss = engine.train_batch(iter(step_batches(step)[replica::replicas])).item()
        seen.append([loss, engine.get_lr()[0], engine.optimizer.loss_scale, random.random(), float(np.random.rand())])
    seen.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    return seen


def straight(dtype: str) -> list[Any]:
    return run(make(dtype), 0, 8)[5:]


def first_half(root: str, dtype: str) -> None:
    engine = make(dtype)
    run(engine, 0, 5)
    engine.save_checkpoint(root, client_state={"note": [1, "two"]})


def first_steps(root: str) -> None:
    engine = make()
    for step, tag in enumerate(("early", "late")):
        run(engine, step, step + 1)
        engine.save_checkpoint(root, tag=tag)


def second_half(root: str, dtype: str) -> list[Any]:
    engine = make(dtype)
    torch.rand(3)  # wherever the generators are
    _, state = engine.load_checkpoint(root)
    assert state == {"note": [1, "two"]}
    assert (engine.global_steps, engine.global_samples) == (5, 5 * engine.train_batch_size())
    return run(engine, 5, 8)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_resume_is_bitwise(dtype: str, tmp_path: Path) -> None:
    """Dropout, learning rate, loss scale, the generators of Python and NumPy; two stages, in fp32 two replicas."""
    ranks = {"fp32": 4, "fp16": 2}[dtype]
    wanted = run_ranks(straight, ranks, dtype)
    run_ranks(first_half, ranks, str(tmp_path), dtype)
    found = run_ranks(second_half, ranks, str(tmp_path), dtype)
    for rank, other in zip(wanted, found, strict=True):
        *steps, weights = rank
        *other_steps, other_weights = other
        np.testing.assert_equal([s[:3] for s in other_steps], [s[:3] for s in steps])
        for name, tensor in weights.items():
            assert torch.equal(tensor, other_weights[name]), name


def saves_while_training(root: str) -> list[Any]:
    """Saves without waiting; what is saved is the state of that step, whatever the steps after it do."""
    engine = make()
    run(engine, 0, 5)
    engine.save_checkpoint(root, client_state={"note": [1, "two"]}, wait=False)
    after = run(engine, 5, 8)
    engine.finish_checkpoint()
    return after


def test_a_save_in_the_background_has_the_state_of_its_step(tmp_path: Path) -> None:
    wanted = run_ranks(saves_while_training, 2, str(tmp_path))
    found = run_ranks(second_half, 2, str(tmp_path), "fp32")
    for rank, other in zip(wanted, found, strict=True):
        assert [s[:3] for s in rank[:-1]] == [s[:3] for s in other[:-1]]
        assert all(torch.equal(tensor, other[-1][name]) for name, tensor in rank[-1].items())


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    run_ranks(first_steps, 2, str(root))
    return root


@pytest.mark.parametrize("damage", ["truncated", "torn", "missing"])
def test_a_damaged_file_is_named_on_every_rank_and_the_one_before_offered(
    damage: str, two_checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "late" / "rank_00001.safetensors"
    contents = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(contents[:-10])
    elif damage == "torn":
        contents[-10] ^= 1
        file.write_bytes(contents)
    else:
        file.unlink()
    with pytest.raises(RankError, match=r"rank_00001\.safetensors.*The last complete one before it is .*early"):
        run_ranks(load_tag, 2, str(tmp_path), "late")


def load_tag(root: str, tag: str) -> None:
    make().load_checkpoint(root, tag=tag)


def fails_later(root: str) -> str:
    """A file that one rank cannot write: all of them hear of it at the beginning of a later step."""
    engine = make()
    run(engine, 0, 1)
    engine.save_checkpoint(root, tag="good")

    def write_files(draft: Path) -> None:
        (draft / "no such folder" / "file").write_text("")

    engine.save_checkpoint(root, tag="bad", wait=False, files=write_files)
    try:
        for step in range(1, 500):
            run(engine, step, step + 1)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_failed_save_stops_all_ranks_at_a_step(tmp_path: Path) -> None:
    messages = run_ranks(fails_later, 2, str(tmp_path))
    assert messages[0] == messages[1] or all("was not saved" in message for message in messages)
    assert "bad was not saved" in messages[0]
    assert (tmp_path / "latest").read_text().strip() == "good"


def unsavable(root: str) -> None:
    engine = make()
    engine.save_checkpoint(root, client_state={"who": object()} if engine.global_rank == 0 else {})


def test_state_that_cannot_be_loaded_again_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"meta\['client_state'\]\['who'\] is of type builtins.object"):
        run_ranks(unsavable, 2, str(tmp_path))
    assert not (tmp_path / "latest").exists()
