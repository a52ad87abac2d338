"""Stages of whole decoder layers against stages that may end between attention and MLP.

    deepspeed --num_gpus 2 tests/benchmarks/half_layers.py [--pairs 30]

Two parts. What is measured: two engines in the same processes, with the same weights and data, train turn by turn, the
one with whole layers, the other with ``"half_layers"``; losses must be equal, and the median of the ratios of adjacent
steps counts. Each stage has a core. What is counted: floating-point operations of the largest stage by those of a mean
stage, for the shapes of some models, cut by "work" both ways; a step of many micro-batches takes about as much longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from facts import facts
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

import paceline
from paceline.hf.anatomy import anatomy_of
from paceline.hf.weights import skeleton
from paceline.planning.partition_methods import by_work
from paceline.runtime.initialize import start_distributed
from paceline.runtime.module import items_of, partition_items

MODELS: dict[str, PretrainedConfig] = {
    "Llama 3.1 8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "Llama 3.2 1B": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Qwen 2.5 7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    "Qwen 3 30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    ),
}
"""Shapes of published models."""
STAGES = (4, 8, 16)
LENGTH = 4096
VOCABULARY_KEPT = 97
"""Tokens that the data has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument(
        "--partition", choices=["work", "hetero"], default="work", help="by operations or measured times"
    )
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    start_distributed()
    partition = {"method": args.partition, "repartition_every": 0}
    measured = measure(args, {"whole": {}, "halves": {"half_layers": True}}, partition)
    if dist.get_rank() == 0:
        counted = {
            name: {stages: largest_stage(config, stages) for stages in STAGES} for name, config in MODELS.items()
        }
        result = {
            **measured,
            "emulated_compute": False,
            "largest_stage_by_mean": counted,
            **facts(args, "warmup"),
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def model_of(args: argparse.Namespace) -> LlamaConfig:
    """The model that is measured."""
    return LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=7 * args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 128,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.length,  # by which a start counts and measures
        tie_word_embeddings=False,
    )


def engine_of(args: argparse.Namespace, partition: Any, keys: dict[str, Any], config: PretrainedConfig) -> Any:
    """An engine of as many stages as there are ranks.

    Args:
        keys: more of ``"pipeline"``, or another partition.
    """
    engine, *_ = paceline.initialize(
        model=config,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": args.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "pipeline": {"activation_checkpoint_interval": int(getattr(args, "gradient_checkpointing", False))},
            "paceline": {"pipeline": {"stages": dist.get_world_size(), "partition": partition, **keys}},
        },
    )
    return engine


def measure(
    args: argparse.Namespace, cuts: dict[str, dict[str, Any]], partition: Any, rounding: float = 0.0
) -> dict[str, Any]:
    """Seconds of steps of two engines, turn by turn.

    Args:
        cuts: of each engine by its name, keys of ``"pipeline"`` that say how it is cut.
        rounding: by which losses of a step may differ, of their size.
    """
    config = model_of(args)
    engines = {name: engine_of(args, partition, keys, config) for name, keys in cuts.items()}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY_KEPT, (args.micro_batches, 1, args.length), generator=generator)

    def timed(name: str) -> tuple[float, float]:
        dist.barrier()
        get_accelerator().synchronize()
        begin = time.perf_counter()
        loss = engines[name].train_batch(iter([{"input_ids": m, "labels": m} for m in ids]))
        get_accelerator().synchronize()
        taken = torch.tensor([time.perf_counter() - begin])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken), float(loss)

    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for pair in range(args.warmup + args.pairs):
        order = list(engines) if pair % 2 else list(engines)[::-1]
        got = {name: timed(name) for name in order}
        losses = [loss for _, loss in got.values()]
        assert math.isclose(*losses, rel_tol=rounding), f"losses differ in step {pair}: {got}"
        if pair >= args.warmup:
            for name, (taken, _) in got.items():
                seconds[name].append(taken)
    ratios = sorted(a / b for a, b in zip(*seconds.values(), strict=True))
    return {
        "times_as_fast": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "stages": {name: engine.module.describe() for name, engine in engines.items()},
    }


def largest_stage(config: PretrainedConfig, stages: int) -> dict[str, float]:
    """Operations of the largest stage by those of a mean one, cut by "work"; and were the head never alone."""
    model = skeleton(config)
    found = {}
    for name, half_layers in (("whole", False), ("halves", True)):
        items = items_of(model, anatomy_of(model, half_layers=half_layers), LENGTH)
        found[name] = largest_by_mean([item.work for item in items], partition_items(items, stages, "work"))
        if not half_layers:
            *others, last, head = (item.work for item in items)
            beside = [*others, last + head]
            found["head beside a layer"] = largest_by_mean(beside, by_work(beside, [1.0] * stages))
    return found


def largest_by_mean(work: Sequence[float], boundaries: Sequence[int]) -> float:
    """Work of the largest stage by that of a mean one."""
    of_stages = [sum(work[first:end]) for first, end in pairwise(boundaries)]
    return round(max(of_stages) * len(of_stages) / sum(of_stages), 3)


if __name__ == "__main__":
    main()
