"""Stages of equal work with gradient checkpointing, where activations have room: kept layers, or recomputed ones.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 tests/benchmarks/kept_boundaries.py [--pairs 15]

A recomputed layer takes a third more than one whose activations are kept; a head takes the same either way. Two parts.
What is measured: two engines in the same processes, with the same weights and data, both with gradient checkpointing,
train turn by turn. Memory has room for all activations, so both keep them. Stages of the one are equal if layers are
recomputed ("recomputed"), those of the other as ``"work"`` cuts them ("kept"); losses must be equal, and the median of
the ratios of adjacent steps counts. Each stage has a core. What is counted: floating-point operations of the largest
stage by those of a mean stage, both ways, for the shapes of some models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import deepspeed
import torch
import torch.distributed as dist
from facts import facts
from half_layers import LENGTH, MODELS, largest_by_mean, measure, model_of
from transformers import PretrainedConfig

from paceline.hf.anatomy import anatomy_of
from paceline.hf.weights import skeleton
from paceline.runtime.initialize import start_distributed
from paceline.runtime.module import items_of, partition_items

STAGES = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=40000)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    args.gradient_checkpointing = True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    start_distributed()
    config, stages = model_of(args), dist.get_world_size()
    recomputed = boundaries(config, stages, args.length, recomputes=True)
    measured = measure(args, {"recomputed": {"partition": recomputed}, "kept": {}}, "work")
    if dist.get_rank() == 0:
        largest = largest_stage(config, stages, args.length)
        result = {
            **measured,
            "by_operations": round(largest["recomputed"] / largest["kept"], 3),
            "emulated_compute": False,
            "largest_stage_by_mean": {
                name: {stages: largest_stage(of, stages, LENGTH) for stages in STAGES} for name, of in MODELS.items()
            },
            **facts(args, "warmup"),
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def boundaries(config: PretrainedConfig, stages: int, length: int, *, recomputes: bool) -> list[int]:
    """Boundaries over items that "work" cuts, where all layers are recomputed or none."""
    model = skeleton(config)
    return partition_items(items_of(model, anatomy_of(model), length, recomputes=recomputes), stages, "work")


def largest_stage(config: PretrainedConfig, stages: int, length: int) -> dict[str, float]:
    """Operations of the largest stage by those of a mean one, all activations kept, by what the boundaries count."""
    model = skeleton(config)
    work = [item.work for item in items_of(model, anatomy_of(model), length)]
    return {
        name: largest_by_mean(work, boundaries(config, stages, length, recomputes=name == "recomputed"))
        for name in ("recomputed", "kept")
    }


if __name__ == "__main__":
    main()
