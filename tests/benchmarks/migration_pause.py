"""How long training stands still while a layer moves, beside the time that its bytes take on the link.

    python tests/benchmarks/migration_pause.py [--mbit 100] [--hidden 512] [--rate 1e-5] [--rounds 3]

Needs root (tests/lab). Two hosts train a Llama of two stages, of which one decoder layer moves there and back. All that
belongs to it (weights, fp32 masters, Adam's moments) is sent at once, or its weights are sent beside the steps before
(``engine.prepare_repartition``), and what these changed follows. With all weights trained in fp32 or bf16, and with
LoRA. Computing and sockets are real.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.hosts import Hosts, available
from lab.transfer import PAYLOAD_SHARE

LENGTH, MICRO_BATCH, LAYERS = 64, 1, 4
KINDS = ("fp32", "bf16", "lora")
WAYS = ("at once", "ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of every host")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-5, help="of learning")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="in each, a layer moves there and back")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(json.loads(args.child))
        return
    if reason := available():
        sys.exit(reason)
    bytes_per_s = args.mbit * 1e6 / 8 * PAYLOAD_SHARE
    found = []
    for kind, way in product(args.kinds, WAYS):
        told = {
            "kind": kind,
            "way": way,
            **{k: getattr(args, k) for k in ("hidden", "rate", "micro_batches", "rounds")},
        }
        with Hosts(2, mbit=args.mbit) as hosts:
            lines = hosts.run([sys.executable, __file__, "--child", json.dumps(told)], timeout=1200)[0].splitlines()
        (line,) = [line for line in lines if line.startswith("found ")]
        run = json.loads(line.removeprefix("found "))
        middle = {key: statistics.median(move[key] for move in run["moves"]) for key in run["moves"][0]}
        # What belongs to a layer is sent once where nothing is sent ahead.
        whole = middle["bytes"] if way == "at once" else found[-1]["bytes"]
        found.append(
            {
                **{"kind": kind, "way": way, **{key: round(value, 4) for key, value in middle.items()}},
                "bytes_take_s": round(whole / bytes_per_s, 4),
                "waited_share": round(middle["transfer_s"] / (whole / bytes_per_s), 4),
                "step_s": round(run["step_s"], 4),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    result = {"emulated_compute": False, "runs": found, **facts(args, "child")}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def train(told: dict[str, Any]) -> None:
    """Runs on every host."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import paceline

    hidden = told["hidden"]
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": 8}
    model: Any = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=1024, max_position_embeddings=LENGTH)
    if told["kind"] == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_config(model), LoraConfig(target_modules="all-linear"))
    config = {
        "train_batch_size": MICRO_BATCH * told["micro_batches"],
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": told["rate"]}},
        "bf16": {"enabled": told["kind"] == "bf16"},
        "steps_per_print": None,
        "paceline": {"pipeline": {"stages": 2, "partition": [0, 3, LAYERS + 2]}},
    }
    engine, *_ = paceline.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(0)
    seconds, moves = [], []

    def step() -> None:
        ids = torch.randint(1024, (MICRO_BATCH, LENGTH), generator=generator)
        begun = time.perf_counter()
        engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * told["micro_batches"]))
        seconds.append(time.perf_counter() - begun)

    for _ in range(4):
        step()
    undisturbed_s = statistics.median(seconds[1:])
    for parts in [[0, 2, LAYERS + 2], [0, 3, LAYERS + 2]] * told["rounds"]:
        steps_ahead = 0
        if told["way"] == "ahead":
            engine.prepare_repartition(parts)
            while steps_ahead == 0 or not engine.repartition_is_prepared():
                step()
                steps_ahead += 1
        move = engine.repartition(parts)
        kept = ("bytes", "paused_bytes", "seconds", "transfer_s", "rebuild_s")
        step()  # states follow beside it
        moves.append({**{key: move[key] for key in kept}, "steps_ahead": steps_ahead, "step_after_s": seconds[-1]})
    engine.destroy()
    if os.environ["RANK"] == "0":
        print("found " + json.dumps({"moves": moves[2:] or moves, "step_s": undisturbed_s}), flush=True)


if __name__ == "__main__":
    main()
