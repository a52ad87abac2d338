"""What a checkpoint in the background costs the training path, as a share of a step.

    deepspeed --num_gpus 2 tests/benchmarks/save_cost.py [--saves 20] [--stages 2] [--zero 1]

Steps with a save before them and steps without take turns. The cost is the time in which ``save_checkpoint`` holds up
training, and, apart from it, how much slower the step beside the writing thread is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from facts import facts
from transformers import LlamaConfig

import paceline
from paceline.runtime.initialize import start_distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    start_distributed()
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        vocab_size=4096,
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": args.zero},
        "steps_per_print": None,
        "paceline": {"pipeline": {"stages": args.stages}},
    }
    engine, *_ = paceline.initialize(model=config, config=ds_config)
    ids = torch.randint(3, 4096, (args.micro_batches, args.micro_batch_size, args.length), generator=torch.Generator())
    batches = [{"input_ids": m, "labels": m} for m in ids]
    folder = [str(args.folder or tempfile.mkdtemp(prefix="save-cost-"))]
    dist.broadcast_object_list(folder)

    def step() -> float:
        dist.barrier()
        get_accelerator().synchronize()
        begin = time.perf_counter()
        engine.train_batch(iter(batches))
        get_accelerator().synchronize()
        return slowest(time.perf_counter() - begin)

    def slowest(seconds: float) -> float:
        taken = torch.tensor([seconds], device=engine.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    plain, beside, held_up = [], [], []
    for _ in range(3):
        step()
    for number in range(-2, args.saves):
        plain.append(step())
        dist.barrier()
        begin = time.perf_counter()
        engine.save_checkpoint(folder[0], tag=f"save{number % 2}", wait=False)
        get_accelerator().synchronize()
        held_up.append(slowest(time.perf_counter() - begin))
        beside.append(step())
        engine.finish_checkpoint()
        if number < 0:  # the first one takes the memory for the copy
            plain.clear(), beside.clear(), held_up.clear()
    if dist.get_rank() == 0:
        saved = sum(file.stat().st_size for file in Path(folder[0], "save0").rglob("*") if file.is_file())
        median = {
            "step_s": statistics.median(plain),
            "step_beside_a_save_s": statistics.median(beside),
            "save_s": statistics.median(held_up),
        }
        result = {
            "save_share_of_a_step": median["save_s"] / median["step_s"],
            "step_beside_a_save": median["step_beside_a_save_s"] / median["step_s"],
            "median_s": median,
            "checkpoint_mib": round(saved / 2**20, 1),
            "saves": args.saves,
            "ranks": dist.get_world_size(),
            **facts(args, "saves", "folder"),
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
        shutil.rmtree(folder[0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
