"""A script as people have it: a Hugging Face Trainer with a DeepSpeed JSON, for plans that no pipeline runs.

deepspeed --num_gpus 2 --module paceline.launch.patched tests/support/trainer_job.py --deepspeed tp2.json --model DIR …
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class StepTimes(TrainerCallback):
    """Seconds from the begin of a step to the begin of the next."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun.append(time.perf_counter())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.begun.append(time.perf_counter())

    @property
    def step_s(self) -> list[float]:
        """One number a step."""
        return [after - before for before, after in zip(self.begun, self.begun[1:], strict=False)]


def main(argv: Sequence[str] | None = None) -> None:
    """Train a model of random weights on random tokens; rank 0 writes losses and seconds of steps, if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args(argv)
    ds_config = json.loads(Path(args.deepspeed).read_text())
    training = TrainingArguments(
        output_dir=str(Path(args.deepspeed).parent / "trainer"),
        deepspeed=args.deepspeed,
        per_device_train_batch_size=ds_config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=ds_config["gradient_accumulation_steps"],
        max_steps=args.steps,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    samples = args.steps * training.train_batch_size * training.gradient_accumulation_steps
    tokens = torch.randint(3, model.config.vocab_size, (samples * training.world_size, args.length))
    times = StepTimes()
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=training, train_dataset=data, callbacks=[times])
    trainer.train()
    if dist.get_rank() == 0 and args.output is not None:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        args.output.write_text(json.dumps({"losses": losses, "step_s": times.step_s}))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
