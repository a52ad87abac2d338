"""What natural gradients add to a training step of a Hugging Face model, turn by turn with the step without.

    OMP_NUM_THREADS=2 torchrun --nproc_per_node 1 tests/benchmarks/natural_gradient_overhead.py [--hidden-size 1024 512]

Both engines live in one process, with the same model and tokens; steps of each alternate. A turn is four steps, one of
which updates the estimates, as ``update_period`` 4 has it after the first eleven. A ratio is a turn's seconds with by
those without; by processor time too, which other jobs on the machine do not add to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from facts import facts
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

START = 12
PERIOD = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden-size", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    found = {}
    for hidden_size in args.hidden_size:
        found[str(hidden_size)] = measure(args, hidden_size)
        print(hidden_size, json.dumps(found[str(hidden_size)]), flush=True)
    result = {"hidden_size": found, "threads": torch.get_num_threads(), **facts(args, "hidden_size")}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(args: argparse.Namespace, hidden_size: int) -> dict[str, Any]:
    engines = [_engine(args, hidden_size, section) for section in ({}, {"natural_gradient": {"update_period": PERIOD}})]
    for engine in engines:
        for _ in range(START if engine is engines[1] else 2):
            _step(args, engine)
    wall, cpu = [], []
    for _ in range(args.turns):
        turn = [(0.0, 0.0), (0.0, 0.0)]
        for _ in range(PERIOD):
            for place, engine in enumerate(engines):
                seconds = _step(args, engine)
                turn[place] = turn[place][0] + seconds[0], turn[place][1] + seconds[1]
        (plain_s, plain_cpu_s), (natural_s, natural_cpu_s) = turn
        wall.append((natural_s / plain_s, plain_s / PERIOD))
        cpu.append(natural_cpu_s / plain_cpu_s)
    for engine in engines:
        engine.destroy()
    return {
        "tokens": args.batch_size * args.block_size,
        "step_s": round(statistics.median(step for _, step in wall), 3),
        "ratio": round(statistics.median(ratio for ratio, _ in wall), 4),
        "ratios": [round(ratio, 4) for ratio, _ in wall],
        "processor_ratio": round(statistics.median(cpu), 4),
        "processor_ratios": [round(ratio, 4) for ratio in cpu],
    }


def _engine(args: argparse.Namespace, hidden_size: int, section: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=11 * hidden_size // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=hidden_size // 64,
            vocab_size=args.vocab_size,
            max_position_embeddings=args.block_size,
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "steps_per_print": None,
        "paceline": section,
    }
    return paceline.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def _step(args: argparse.Namespace, engine: Any) -> tuple[float, float]:
    """Seconds, and those of this process's processors."""
    ids = torch.randint(0, args.vocab_size, (args.batch_size, args.block_size))
    begun, cpu_begun = time.perf_counter(), time.process_time()
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - begun, time.process_time() - cpu_begun


if __name__ == "__main__":
    main()
