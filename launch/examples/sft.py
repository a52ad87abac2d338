"""TRL's SFTTrainer with a pipeline: another class and a JSON.

deepspeed --num_gpus 2 launch/examples/sft.py launch/examples/pipeline.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig

from paceline import PacelineSFTTrainer
from paceline.data.tokenizer import train_tokenizer


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--output_dir", default="runs/sft")
    parser.add_argument("--local_rank", type=int)  # the launcher passes it
    args = parser.parse_args(argv)
    rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(8) for b in range(8)]
    tokenizer = train_tokenizer([row["prompt"] + row["completion"] for row in rows])
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    torch.manual_seed(0)  # the same weights on all ranks; from_pretrained needs no seed
    trainer = PacelineSFTTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=SFTConfig(
            output_dir=args.output_dir,
            deepspeed=args.config,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            learning_rate=1e-3,
            max_steps=4,
            logging_steps=1,
            report_to=[],
            bf16=False,  # TRL's default is True
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())
