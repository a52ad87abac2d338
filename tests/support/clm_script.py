"""A script as people have it for a causal language model: arguments, data, model, Trainer, train, save, evaluate.

It knows nothing of Paceline. ``tests/distributed/test_trainer.py`` changes two lines of it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import chain
from typing import Any

import transformers
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, default_data_collator


@dataclass
class ScriptArguments:
    config_name: str
    tokenizer_name: str
    train_file: str
    block_size: int = 32
    validation_split_percentage: int = 20


def main() -> None:
    args: Any
    training: Any
    args, training = HfArgumentParser((ScriptArguments, transformers.TrainingArguments)).parse_args_into_dataclasses()
    transformers.set_seed(training.seed)
    split = args.validation_split_percentage
    raw = {
        "train": load_dataset("text", data_files=args.train_file, split=f"train[{split}%:]"),
        "validation": load_dataset("text", data_files=args.train_file, split=f"train[:{split}%]"),
    }
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config_name))
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def blocks(rows: dict[str, list[str]]) -> dict[str, Any]:
        tokens = list(chain(*tokenizer(rows["text"])["input_ids"]))
        size = args.block_size
        found = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": found, "labels": [list(block) for block in found]}

    with training.main_process_first(desc="blocks"):
        data = {name: rows.map(blocks, batched=True, remove_columns=["text"]) for name, rows in raw.items()}

    def accuracy(found: Any) -> dict[str, float]:
        predictions, labels = found
        return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}

    trainer = transformers.Trainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-generation")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
