"""Two runs into one output directory: the second one is refused, by the job and by the Trainer, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.supervise.output_lock import FILE_NAME, Claim
from support.jobs import TINY, finetune, flags, model_config
from support.ranks import run_ranks


def test_the_job(tmp_path: Path) -> None:
    argv = flags(**TINY, output_dir=tmp_path, resume_from_checkpoint="true")
    claim = Claim(tmp_path)
    told = run_ranks(finetune, 2, argv)
    assert [code for code, _ in told] == [2, 2]
    assert told[0][1].count("two runs would overwrite each other's files") == 1
    claim.release()

    told = run_ranks(finetune, 2, argv)
    assert [code for code, _ in told] == [2, 2]
    assert "has no complete checkpoint" in told[0][1], "the claim is not in the way"
    assert list(tmp_path.glob(f"**/{FILE_NAME}")) == [], "given up where a run fails"


def trainer(output: str) -> str:
    from transformers import AutoModelForCausalLM, TrainingArguments

    import paceline

    config = {"zero_optimization": {"stage": 1}, "paceline": {"pipeline": {"stages": 2}}}
    args = TrainingArguments(output, deepspeed=config, max_steps=1, report_to=[], use_cpu=True)
    model = AutoModelForCausalLM.from_config(model_config())
    rows: list[Any] = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
    try:
        paceline.PacelineTrainer(model=model, args=args, train_dataset=rows).train()
    except ValueError as error:
        return str(error)
    return "trained"


def test_the_trainer(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    told = run_ranks(trainer, 2, str(tmp_path))
    assert all("two runs would overwrite each other's files" in text for text in told)
    claim.release()
    assert run_ranks(trainer, 2, str(tmp_path)) == ["trained"] * 2
    assert not (tmp_path / FILE_NAME).exists()
