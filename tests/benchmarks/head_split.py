"""Gradients of the head's weight with those of the inputs, or left for later: steps of a real Llama, turn by turn.

    OMP_NUM_THREADS=1 python tests/benchmarks/head_split.py [--vocabulary 32000] [--partition 0 6 8] [--rounds 12]

Nothing sleeps: as many CPU processes as there are stages train a Llama of random weights with split backwards; with
two cores, two. ``gain`` is by how much longer a step takes whose last stage computes the head's weight gradient at
once: the median over the rounds, each of which is the median of its steps. ``seconds`` are medians of the last stage's
forwards (F), backwards of inputs (I) and of weights (W), and ``left_mib`` is what a micro-batch leaves there for later.

On a machine with other work, `chrt --rr 5` before the command keeps that from the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from support.ranks import run_ranks

ARMS = {"later": True, "at once": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", nargs="+", default=["zbh1", "zbh2"])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--partition", type=int, nargs="+", default=[0, 6, 8], help="embedding, layers, head")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12, help="after one that does not count")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    ranks = len(args.partition) - 1
    rows = []
    for schedule in args.schedules:
        rows.append(run_ranks(train, ranks, vars(args) | {"schedule": schedule}, timeout=1200)[-1])
        print(json.dumps(rows[-1]), flush=True)
    load = [round(value, 1) for value in os.getloadavg()]
    result = {"emulated_compute": False, "head": rows, "load_average_at_end": load, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Both ways in turn; the last rank's counts."""
    import torch
    from transformers import LlamaConfig

    import paceline
    from paceline.runtime.natural_gradient_part import heads_of

    hidden, length, vocabulary = settings["hidden"], settings["length"], settings["vocabulary"]
    size, number = settings["micro_batch_size"], settings["micro_batches"]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=settings["partition"][-1] - 2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": number,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**6,
        "paceline": {"pipeline": {"schedule": settings["schedule"], "partition": settings["partition"]}},
    }
    ds_config["paceline"]["pipeline"]["stages"] = len(settings["partition"]) - 1
    engine, *_ = paceline.initialize(model=config, config=ds_config)
    drawn = torch.Generator().manual_seed(0)
    batches = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(vocabulary, (number, size, length), generator=drawn)
    ]
    seconds, left = {arm: list[float]() for arm in ARMS}, dict[str, float]()
    parts = {arm: defaultdict[str, list[float]](list) for arm in ARMS}
    heads = [head for head in heads_of(engine.module) if isinstance(head, torch.nn.Linear)]
    assert all(head.deferral is not None for head in heads)
    for turn in range(-1, settings["rounds"]):
        for arm, is_later in ARMS.items():
            for head in heads:
                head.deferral = engine._deferral if is_later else None
            engine.meter.deferred = lambda num_bytes, chunk, arm=arm: left.update({arm: num_bytes() / 2**20})
            taken = []
            engine.meter.recorder.forget()
            for _ in range(settings["steps"]):
                begun_s = time.perf_counter()
                engine.train_batch(iter(batches))
                taken.append(time.perf_counter() - begun_s)
            if turn >= 0:
                seconds[arm].append(statistics.median(taken))
                for span in (span for step in engine.meter.recorder.steps() for span in step.spans):
                    parts[arm][span.kind].append(span.end - span.start)
    engine.destroy()
    gains = sorted(second / first - 1 for first, second in zip(*seconds.values(), strict=True))
    return {
        "schedule": settings["schedule"],
        **{f"{arm}_s": round(statistics.median(found), 4) for arm, found in seconds.items()},
        "gain": round(statistics.median(gains), 4),
        "gain_quartiles": [round(gains[len(gains) // 4], 4), round(gains[-1 - len(gains) // 4], 4)],
        "seconds": {
            arm: {kind: round(statistics.median(found[kind]), 4) for kind in ("F", "I", "W")}
            for arm, found in parts.items()
        },
        "left_mib": {arm: round(found, 2) for arm, found in left.items()},
    }


if __name__ == "__main__":
    main()
