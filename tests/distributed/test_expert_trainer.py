"""``"paceline": {"moe": …}`` in the JSON of a plain Hugging Face Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import expert_models as models
from support.ranks import RankError, run_ranks

STEPS = 6
SHIPPED = Path(__file__).parents[2] / "ds_configs" / "ep2_rebalance.json"


def trainer_job(
    directory: str, section: dict[str, Any] | None, max_steps: int, resume: bool, moves: bool, accumulation: int
) -> dict[str, Any]:
    """As a script has it, with one line of ours: ``paceline.repair_deepspeed()``.

    Args:
        section: ours; None for the shipped configuration.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import paceline

    paceline.repair_deepspeed()
    if section is None:
        config = json.loads(SHIPPED.read_text())
        config["optimizer"]["params"]["torch_adam"] = True  # nothing is compiled
    else:
        config = models.ds_config(1, 2, accumulation)
        del config["optimizer"]
        config |= {"paceline": section} if section else {}
    num_rows = STEPS * accumulation * 2 * models.BATCH
    rows = [row for step in range(num_rows // models.BATCH) for row in models.batch(step, 0)]
    args = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=models.BATCH,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        deepspeed=config,
        use_cpu=True,
        report_to=[],
        save_strategy="steps",
        save_steps=STEPS // 2,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=models.build("mixtral", **models.EIGHT["mixtral"]),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )

    class Scatter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if moves:
                models.scatter_experts(trainer.deepspeed, state.global_step)

    trainer.add_callback(Scatter())
    trainer.train(resume_from_checkpoint=resume)
    engine = trainer.deepspeed
    rebalancer = getattr(engine, "rebalancer", None)
    placements = rebalancer.placements() if rebalancer else None
    trainer.save_model(directory)
    return {
        "engine": type(engine).__name__,
        "losses": [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry],
        "placements": placements,
        "windows": len(rebalancer.windows) if rebalancer else 0,
        "steps": rebalancer.loads.step if rebalancer else 0,
    }


def saved(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_experts_move_under_the_trainer(tmp_path: Path) -> None:
    """What is saved is what stock DeepSpeed trains, also by a run that is resumed half-way."""
    by_hand = {"moe": {"rebalance_every": 0}}
    stock, whole, halves = tmp_path / "stock", tmp_path / "whole", tmp_path / "halves"
    ranks = run_ranks(trainer_job, 2, str(stock), {}, STEPS, False, False, 2)
    assert ranks[0]["engine"] == "DeepSpeedEngine"

    ranks = run_ranks(trainer_job, 2, str(whole), by_hand, STEPS, False, True, 2)
    assert {rank["engine"] for rank in ranks} == {"PlainEngine"}
    assert ranks[0]["placements"]["model.layers.0.mlp"]["placement"] != [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks[0]["steps"] == STEPS  # steps of the optimizer, of two micro-batches each
    assert same(saved(whole), saved(stock))

    first = run_ranks(trainer_job, 2, str(halves), by_hand, STEPS // 2, False, True, 2)
    resumed = run_ranks(trainer_job, 2, str(halves), by_hand, STEPS, True, False, 2)
    assert any(told["placement"] != [[0, 1, 2, 3], [4, 5, 6, 7]] for told in resumed[0]["placements"].values())
    assert resumed[0]["steps"] == STEPS  # it goes on counting
    assert first[0]["losses"] != resumed[0]["losses"]
    assert same(saved(halves), saved(stock))


def test_the_section_is_read(tmp_path: Path) -> None:
    """Left to itself it looks when it is told to; a key that is wrong stops the script."""
    ranks = run_ranks(trainer_job, 2, str(tmp_path), {"moe": {"rebalance_every": 2}}, STEPS, False, False, 1)
    assert {rank["engine"] for rank in ranks} == {"PlainEngine"}
    assert [rank["windows"] for rank in ranks] == [STEPS // 2, 0]
    with pytest.raises(RankError, match=r'paceline.moe.rebalance_evry is not .* did you mean "rebalance_every"'):
        run_ranks(trainer_job, 2, str(tmp_path), {"moe": {"rebalance_evry": 2}}, STEPS, False, False, 1)


def test_the_shipped_configuration(tmp_path: Path) -> None:
    """Its "auto" values are filled by the Trainer."""
    ranks = run_ranks(trainer_job, 2, str(tmp_path), None, 2, False, True, 1)
    assert {rank["engine"] for rank in ranks} == {"PlainEngine"}
    assert {rank["steps"] for rank in ranks} == {2}
    assert ranks[0]["losses"][0] == pytest.approx(4.57, abs=0.2)
