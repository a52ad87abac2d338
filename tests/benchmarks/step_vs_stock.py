"""A step of Paceline against a step of stock DeepSpeed on the same layers, in one run, turn by turn.

    deepspeed --num_gpus 2 tests/benchmarks/step_vs_stock.py [--pairs 40] [--dtype bf16] [--zero 1 --stages 1]

Both engines live in the same processes with the same weights and data. The stock pipeline is as lean as one can be
written by hand: the model's own decoder layers, rotary tables computed once for all layers, the loss on the last stage,
no masks. Losses are compared first; then the median of the ratios of adjacent steps is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from facts import facts
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

import paceline
from lab import stock_llama
from paceline.hf.stage import Cut
from paceline.hf.weights import load_stage
from paceline.runtime.initialize import start_distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument(
        "--recompute", action="store_true", help="gradient checkpointing of every decoder layer in both"
    )
    parser.add_argument("--stages", type=int, help="of the ranks' number, the rest are replicas; default: all ranks")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    start_distributed()
    stages = args.stages or dist.get_world_size()
    replicas = dist.get_world_size() // stages

    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.micro_batches,
        "train_batch_size": args.micro_batch_size * args.micro_batches * replicas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero},
        "bf16": {"enabled": args.dtype == "bf16"},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "pipeline": {"activation_checkpoint_interval": int(args.recompute)},
    }
    items = args.layers + 2
    cuts = [0, *(1 + args.layers * s // stages for s in range(1, stages)), items]
    ours, *_ = paceline.initialize(
        model=config, config={**ds_config, "paceline": {"pipeline": {"stages": stages, "partition": cuts}}}
    )
    model = load_stage(None, config, Cut.whole(args.layers)).model

    class Stock(PipelineModule):
        def _partition_layers(self, method: str = "") -> None:
            self.parts = cuts
            self._set_bounds(cuts[self.stage_id], cuts[self.stage_id + 1])

    net = Stock(
        layers=stock_llama.layers(model),
        num_stages=stages,
        loss_fn=stock_llama.loss,
        activation_checkpoint_interval=int(args.recompute),
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
        checkpointable_layers=[stock_llama.Layer.__name__],
    )
    stock, *_ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=ds_config
    )

    ids = torch.randint(3, 4096, (args.micro_batches, args.micro_batch_size, args.length), generator=torch.Generator())
    runs = {
        "paceline": lambda: ours.train_batch(iter([{"input_ids": m, "labels": m} for m in ids])),
        "stock": lambda: stock.train_batch(iter([(m, m) for m in ids])),
    }

    def timed(name: str) -> tuple[float, float]:
        dist.barrier()
        get_accelerator().synchronize()
        begin = time.perf_counter()
        value = runs[name]()
        get_accelerator().synchronize()
        taken = torch.tensor([time.perf_counter() - begin], device=ours.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken), float(value)

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    largest_difference = 0.0
    for pair in range(args.warmup + args.pairs):
        order = list(runs) if pair % 2 else list(runs)[::-1]
        got = {name: timed(name) for name in order}
        largest_difference = max(largest_difference, abs(got["paceline"][1] / got["stock"][1] - 1))
        if pair >= args.warmup:
            for name in runs:
                seconds[name].append(got[name][0])
    if dist.get_rank() == 0:
        ratios = sorted(a / b for a, b in zip(seconds["paceline"], seconds["stock"], strict=True))
        result = {
            "median_ratio": statistics.median(ratios),
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            "median_s": {name: statistics.median(values) for name, values in seconds.items()},
            "largest_relative_loss_difference": largest_difference,
            "pairs": args.pairs,
            "stages": stages,
            "replicas": replicas,
            **facts(args, "warmup", "pairs"),
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
