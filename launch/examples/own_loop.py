"""Train a small model in your own loop; the DeepSpeed JSON switches the capabilities on.

deepspeed --num_gpus 2 launch/examples/own_loop.py launch/examples/adaptive.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

import paceline


def small_model(family: str) -> PretrainedConfig:
    """A config gives random weights; a name on the hub or a directory gives a pretrained model."""
    experts = {"num_local_experts": 4} if family == "mixtral" else {}
    return AutoConfig.for_model(
        family,
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **experts,
    )


def micro_batches(replica: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless; ranks of one pipeline read the same ones, other replicas and islands others."""
    generator = torch.Generator().manual_seed(1000 * int(os.environ.get("PACELINE_ISLAND", "0")) + replica)
    while True:
        ids = torch.randint(3, 128, (2, 16), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Losses of the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--local_rank", type=int)  # the launcher passes it
    args = parser.parse_args(argv)
    engine, *_ = paceline.initialize(model=small_model(args.family), config=json.loads(args.config.read_text()))
    batches = micro_batches(engine.grid.data_parallel_id)
    losses = [engine.train_batch(batches).item() for _ in range(args.steps)]
    engine.finish_averaging()  # for islands; elsewhere it does nothing
    return losses


if __name__ == "__main__":
    print(main())
