"""Time in which an island's first rank brings the masters together and back, beside that of the slow link.

    deepspeed --num_gpus 2 tests/benchmarks/averaging_gather.py [--stages 2] [--rounds 20]

A round averages tensors that the first rank has gathered from the others of its island, and scatters what came of them.
Both really happen here, without other islands. Beside them stands what the slow link between islands takes for the same
bytes, as a ring of two islands sends them, by calculation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from facts import facts
from transformers import AutoModelForCausalLM, LlamaConfig

import paceline
from paceline.averaging.masters_by_name import PipelineMasters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--link-mbit", type=float, default=1000.0, help="rate of the link between islands")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    masters = masters_of(args)
    names = sorted(masters.numels())
    num_bytes = 4 * sum(masters.numels().values())
    gathers, scatters = [], []
    for _ in range(args.rounds):
        dist.barrier()
        begun = time.perf_counter()
        gathered = masters.gather(names)
        dist.barrier()
        there = time.perf_counter()
        masters.scatter(names, gathered)
        dist.barrier()
        gathers.append(there - begun)
        scatters.append(time.perf_counter() - there)
    if dist.get_rank() == 0:
        gather_s, scatter_s = statistics.median(gathers), statistics.median(scatters)
        link_s = 8 * num_bytes / (args.link_mbit * 1e6)
        found = {
            "megabytes": round(num_bytes / 1e6, 1),
            "gather_s": round(gather_s, 4),
            "scatter_s": round(scatter_s, 4),
            "link_s": round(link_s, 4),
            "share_of_link": round((gather_s + scatter_s) / link_s, 4),
        }
        print(json.dumps(found, indent=2))
        args.output.write_text(json.dumps(found | facts(args), indent=2) + "\n")


def masters_of(args: argparse.Namespace) -> PipelineMasters:
    """Those of a Llama that trains on this job's ranks."""
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        vocab_size=8192,
    )
    torch.manual_seed(0)
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "paceline": {"pipeline": {"stages": args.stages, "schedule": {"type": "1f1b"}}},
    }
    engine, *_ = paceline.initialize(model=AutoModelForCausalLM.from_config(config), config=ds_config)
    return PipelineMasters(engine.control, engine.module, engine.optimizer)


if __name__ == "__main__":
    main()
