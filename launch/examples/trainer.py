"""Hugging Face's Trainer with a pipeline: another class and a JSON.

deepspeed --num_gpus 2 launch/examples/trainer.py launch/examples/pipeline.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from paceline import PacelineTrainer


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Losses of the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--output_dir", default="runs/trainer")
    parser.add_argument("--lora", action="store_true", help="train adapters of the attention only")
    parser.add_argument("--local_rank", type=int)  # the launcher passes it
    args = parser.parse_args(argv)
    config = AutoConfig.for_model(
        "llama", vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    torch.manual_seed(0)  # the same weights on all ranks; from_pretrained needs no seed
    model = AutoModelForCausalLM.from_config(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(3, 128, (64, 16), generator=torch.Generator().manual_seed(0))
    trainer = PacelineTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_dir,
            deepspeed=args.config,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            learning_rate=1e-3,
            max_steps=4,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())
