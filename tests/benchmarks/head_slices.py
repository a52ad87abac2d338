"""A head that stages share, by rows of the vocabulary, against one that the last stage has whole.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 tests/benchmarks/head_slices.py [--pairs 20]

Two parts. What is measured: two engines in the same processes, with the same weights and data, train turn by turn, the
one with a whole head, the other with ``"head_slices"``; losses must be equal up to rounding, and the median of the
ratios of adjacent steps counts. Each stage has a core. Before that an engine with ``"head_slices": "plan"`` says what
it chooses, and which steps it predicts. What is counted: floating-point operations of the largest stage
by those of a mean stage, for the shapes of some models, cut by "work"; a step of many micro-batches takes about as much
longer.
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
from half_layers import LENGTH, MODELS, STAGES, engine_of, largest_by_mean, measure, model_of
from transformers import PretrainedConfig

from paceline.hf.anatomy import anatomy_of
from paceline.hf.weights import skeleton
from paceline.runtime.initialize import start_distributed
from paceline.runtime.module import items_of, partition_items

ROUNDING = 1e-5
"""By which losses of a step may differ, of their size."""
CUTS = {
    "whole": (False, 1),
    "halves": (True, 1),
    "slices": (False, 16),
    "slices and halves": (True, 16),
}
"""Whether layers are cut in halves, and the head's slices."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    start_distributed()
    planned = _planned(args)
    measured = measure(args, {"whole": {}, "slices": {"head_slices": args.slices}}, "work", ROUNDING)
    if dist.get_rank() == 0:
        counted = {name: {stages: largest_stage(of, stages) for stages in STAGES} for name, of in MODELS.items()}
        result = {
            **measured,
            "planned": planned,
            "by_operations": _by_operations(model_of(args), args),
            "emulated_compute": False,
            "largest_stage_by_mean": counted,
            **facts(args, "warmup"),
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def _planned(args: argparse.Namespace) -> dict[str, object]:
    """The slices that a run chooses by itself, and its reason."""
    engine = engine_of(args, "work", {"head_slices": "plan"}, model_of(args))
    choice = engine.plan.chosen["paceline.pipeline.head_slices"]
    engine.destroy()
    return {"head_slices": choice.value, "why": choice.why}


def _by_operations(config: PretrainedConfig, args: argparse.Namespace) -> float:
    """How many times as fast steps would be, if operations alone counted: the largest stage computes all micro-batches
    but one while the others wait, which goes through all stages."""
    stages = dist.get_world_size()
    whole, sliced = (
        (args.micro_batches - 1) * largest(config, stages, False, count, args.length) + stages
        for count in (1, args.slices)
    )
    return round(whole / sliced, 3)


def largest_stage(config: PretrainedConfig, stages: int) -> dict[str, float]:
    """Operations of the largest stage by those of a mean one, by how the model is cut."""
    return {name: largest(config, stages, *cut) for name, cut in CUTS.items()}


def largest(config: PretrainedConfig, stages: int, half_layers: bool, slices: int, length: int = LENGTH) -> float:
    """Operations of the largest stage by those of a mean one, cut by "work"."""
    model = skeleton(config)
    items = items_of(model, anatomy_of(model, half_layers=half_layers, head_slices=slices), length)
    return largest_by_mean([item.work for item in items], partition_items(items, stages, "work"))


if __name__ == "__main__":
    main()
