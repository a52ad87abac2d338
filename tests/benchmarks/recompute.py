"""Steps whose layers are all recomputed, none, or as few as fit: a real Llama on two stages, turn by turn.

    OMP_NUM_THREADS=1 python tests/benchmarks/recompute.py [--layers 12] [--rooms 0.25 0.5 0.75] [--rounds 8]

Nothing sleeps: two CPU processes train a Llama of random weights under 1F1B, and recompute in backwards, as if there
were no room to keep anything else (`early_recomputation.py`). A ``room`` is how much memory a device has: 0 for what
the fullest stage needs with all layers recomputed, 1 for what it needs with none. ``seconds`` are medians of steps,
``bytes`` what the fullest stage needs, as it is counted, and ``layers`` of each stage are recomputed.
``faster_than_all`` is the median over the rounds.

On a machine with other work, `chrt --rr 5` before the command keeps that from the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import pairwise
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
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rooms", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--rounds", type=int, default=8, help="after one that does not count")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    rows = run_ranks(train, STAGES, vars(args), timeout=1800)[0]
    for row in rows:
        print(json.dumps(row), flush=True)
    load = [round(value, 1) for value in os.getloadavg()]
    result = {"emulated_compute": False, "recompute": rows, "load_average_at_end": load, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def train(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All ways in turn, on every rank; the first rank's counts."""
    import torch
    from transformers import LlamaConfig

    import paceline
    from paceline.hf.activations import count_items
    from paceline.planning.memory import ItemMemory, States, stage_memory
    from paceline.planning.recomputation import counts_of_layers, recomputed

    length, number = settings["length"], settings["micro_batches"]
    config = LlamaConfig(
        hidden_size=settings["hidden"],
        intermediate_size=4 * settings["hidden"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["hidden"] // 64,
        num_key_value_heads=settings["hidden"] // 64,
        vocab_size=1024,
        max_position_embeddings=length,
    )
    items = count_items(config, dtype=torch.float32, micro_batch_size=1, sequence_length=length)

    def fullest(of: list[ItemMemory], boundaries: list[int]) -> float:
        return max(stage_memory(of, boundaries, stage, States(), STAGES - stage).total for stage in range(STAGES))

    def engine(of_pipeline: dict[str, Any], **more: Any) -> Any:
        ds_config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": number,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "steps_per_print": 10**6,
            "paceline": {"pipeline": {"stages": STAGES, "schedule": "1f1b", **of_pipeline}},
            **more,
        }
        return paceline.initialize(model=config, config=ds_config)[0]

    engines = {"none": engine({}), "all": engine({}, pipeline={"activation_checkpoint_interval": 1})}
    parts = list(engines["none"].module.parts)
    least, most = fullest(recomputed(items), parts), fullest(items, parts)
    for room in settings["rooms"]:
        limit = least + room * (most - least)
        engines[f"fit, room {room:g}"] = engine(
            {"recompute": "fit", "partition": {"method": "work", "memory_gib": limit / 2**30}}
        )
    for each in engines.values():
        each.executor.early_room = None
    drawn = torch.Generator().manual_seed(0)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1024, (number, 1, length), generator=drawn)]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, settings["rounds"]):
        for name, each in engines.items():
            begun_s = time.perf_counter()
            losses[name].append(each.train_batch(iter(batches)).item())
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begun_s)
    assert all(found == losses["none"] for found in losses.values()), "recomputation changes a loss"
    rows = []
    for name, each in engines.items():
        boundaries, again = list(each.module.parts), each.module.recomputed
        ratios = [a / b for a, b in zip(seconds["all"], seconds[name], strict=True)]
        rows.append(
            {
                "recomputed": name,
                "layers": [counts_of_layers(boundaries, again)[stage] for stage in range(STAGES)],
                "of_layers": [stop - start for start, stop in pairwise([0, boundaries[1] - 1, settings["layers"]])],
                "seconds": round(statistics.median(seconds[name]), 4),
                "faster_than_all": round(statistics.median(ratios), 3),
                "bytes": round(fullest(recomputed(items, again), boundaries)),
            }
        )
    return rows


if __name__ == "__main__":
    main()
