"""Steps whose activations are computed again before their gradient arrives, and after: a real Llama, turn by turn.

    OMP_NUM_THREADS=1 python tests/benchmarks/early_recomputation.py [--micro-batches 2 4 8] [--rounds 12]

Nothing sleeps: two CPU processes train a Llama of random weights on two stages under 1F1B, with all layers recomputed.
The same engine runs both ways, turn by turn, in the same order of computations. ``seconds`` are medians of steps,
``faster`` is the median over the rounds of the late step by the early one, ``simulated`` the same of steps that are
simulated: of equal stages whose recomputation takes as long as a forward and whose backward twice that, over free
links.

On a machine with other work, `chrt --rr 5` before the command keeps that from the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from support.ranks import run_ranks

STAGES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=12, help="after one that does not count")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    rows = [
        run_ranks(train, STAGES, {**vars(args), "number": number}, timeout=1800)[0] for number in args.micro_batches
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    load = [round(value, 1) for value in os.getloadavg()]
    result = {"emulated_compute": False, "early": rows, "load_average_at_end": load, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Both ways in turn, on every rank; the first rank's counts."""
    import torch
    from transformers import LlamaConfig

    import paceline

    length, number = settings["length"], settings["number"]
    config = LlamaConfig(
        hidden_size=settings["hidden"],
        intermediate_size=4 * settings["hidden"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["hidden"] // 64,
        num_key_value_heads=settings["hidden"] // 64,
        vocab_size=1024,
        max_position_embeddings=length,
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": number,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},  # all steps compute the same
        "steps_per_print": 10**6,
        "pipeline": {"activation_checkpoint_interval": 1},
        "paceline": {"pipeline": {"stages": STAGES, "schedule": "1f1b"}},
    }
    engine = paceline.initialize(model=config, config=ds_config)[0]
    drawn = torch.Generator().manual_seed(0)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1024, (number, 1, length), generator=drawn)]
    rooms = {"late": None, "early": engine.executor.early_room}
    seconds: dict[str, list[float]] = {name: [] for name in rooms}
    losses, norms = set[float](), set[float]()
    for turn in range(-2, settings["rounds"]):
        for name, room in rooms.items():
            engine.executor.early_room = room
            begun_s = time.perf_counter()
            losses.add(engine.train_batch(iter(batches)).item())
            norms.add(float(engine.get_global_grad_norm()))
            if turn >= 0:
                assert engine.executor.recomputes_early == (name == "early")
                seconds[name].append(time.perf_counter() - begun_s)
    assert len(losses) == len(norms) == 1, "the moment of recomputation changes a number"
    ratios = [late / early for late, early in zip(seconds["late"], seconds["early"], strict=True)]
    return {
        "micro_batches": number,
        "seconds": {name: round(statistics.median(each), 4) for name, each in seconds.items()},
        "faster": round(statistics.median(ratios), 3),
        "quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)[::2]],
        "simulated": round(simulated(number), 3),
    }


def simulated(number: int) -> float:
    """How many times as fast a step is that computes activations again early."""
    from dataclasses import replace

    from paceline.schedules.costs import Costs
    from paceline.schedules.families import one_f_one_b
    from paceline.schedules.simulate import simulate

    costs, order = Costs.uniform(STAGES, 1.0, 3.0), one_f_one_b(STAGES, number)
    early = simulate(order, replace(costs, ahead_s=(1.0,) * STAGES))
    return simulate(order, costs).makespan_s / early.makespan_s


if __name__ == "__main__":
    main()
