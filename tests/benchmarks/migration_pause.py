"""How long training stands still while a layer or experts move, beside the time that their bytes take on the link.

    python tests/benchmarks/migration_pause.py [--mbit 100] [--hidden 512] [--rate 1e-5] [--rounds 3]

Needs root (tests/lab). Two hosts train a Llama of two stages, of which one decoder layer moves there and back; or a
Mixtral whose experts they share, of which two change places (``plain``: without a pipeline, under ZeRO 1). Weights are
sent when they move, or beside the steps before (``engine.prepare_repartition``, ``prepare_experts``), and what these
changed follows. Masters and moments come beside the next step. With all weights trained in fp32 or bf16, and with LoRA.
Computing and sockets are real.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.hosts import Hosts, available
from lab.transfer import PAYLOAD_SHARE

LENGTH, MICRO_BATCH, LAYERS = 64, 1, 4
KINDS = ("fp32", "bf16", "lora", "experts", "experts-bf16", "plain-experts", "plain-experts-bf16")
WAYS = ("at once", "ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of every host")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-5, help="of learning")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="in each, they move there and back")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        told = json.loads(args.child)
        (train_experts if "experts" in told["kind"] else train)(told)
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
    """Runs on every host: a layer moves."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    model: Any = LlamaConfig(**sizes(told), num_hidden_layers=LAYERS)
    if told["kind"] == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_config(model), LoraConfig(target_modules="all-linear"))
    engine = engine_of(model, told, {"stages": 2, "partition": [0, 3, LAYERS + 2]})
    moves = [
        Way(
            lambda parts=parts: engine.prepare_repartition(parts),
            engine.repartition_is_prepared,
            lambda parts=parts: engine.repartition(parts),
        )
        for parts in ([0, 2, LAYERS + 2], [0, 3, LAYERS + 2])
    ]
    move_while_training(engine, moves, told)


def train_experts(told: dict[str, Any]) -> None:
    """Runs on every host: an expert of each changes places with one of the other's."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    from paceline.planning.experts import Placement

    model = MixtralConfig(**sizes(told), num_hidden_layers=2, num_local_experts=4, num_key_value_heads=8)
    more = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
    if told["kind"].startswith("plain"):
        torch.manual_seed(0)
        more |= {"zero_optimization": {"stage": 1}}
        whole = AutoModelForCausalLM.from_config(model)
        engine = engine_of(whole, told, None, moe={"rebalance_every": 0}, **more)
    else:
        engine = engine_of(model, told, {"stages": 1}, moe={"rebalance_every": 0}, **more)
    name = next(iter(engine.expert_layers))
    moves = [
        Way(
            lambda to=to: engine.prepare_experts({name: to}),
            engine.experts_are_prepared,
            lambda to=to: engine.place_experts({name: to}),
        )
        for to in (Placement(((0, 2), (1, 3))), Placement(((0, 1), (2, 3))))
    ]
    move_while_training(engine, moves, told)


class Way(NamedTuple):
    """A move."""

    prepare: Callable[[], bool]
    is_prepared: Callable[[], bool]
    carry_out: Callable[[], Any]


def sizes(told: dict[str, Any]) -> dict[str, Any]:
    hidden = told["hidden"]
    shape = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": 8}
    return {**shape, "vocab_size": 1024, "max_position_embeddings": LENGTH}


def engine_of(model: Any, told: dict[str, Any], pipeline: dict[str, Any] | None, **more: Any) -> Any:
    """None: without a pipeline."""
    import paceline

    section = {} if pipeline is None else {"pipeline": pipeline}
    moe = {"moe": more.pop("moe")} if "moe" in more else {}
    config = {
        "train_batch_size": MICRO_BATCH * told["micro_batches"],
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": told["rate"]}},
        "bf16": {"enabled": "bf16" in told["kind"]},
        "steps_per_print": None,
        **more,
        "paceline": {**section, **moe},
    }
    if pipeline is None:
        paceline.repair_deepspeed("autoep-start")
    trained = {"model_parameters": list(model.parameters())} if pipeline is None else {}
    return paceline.initialize(model=model, config=config, **trained)[0]


def move_while_training(engine: Any, moves: list[Way], told: dict[str, Any]) -> None:
    import torch

    generator = torch.Generator().manual_seed(int(os.environ["RANK"]) if "experts" in told["kind"] else 0)
    seconds, found = [], []

    def step() -> None:
        ids = torch.randint(1024, (MICRO_BATCH, LENGTH), generator=generator)
        begun = time.perf_counter()
        batches = [{"input_ids": ids, "labels": ids}] * engine.gradient_accumulation_steps()
        if told["kind"].startswith("plain"):
            for batch in batches:
                engine.backward(engine(**batch)["loss"])
                engine.step()
        else:
            engine.train_batch(iter(batches))
        seconds.append(time.perf_counter() - begun)

    for _ in range(4):
        step()
    undisturbed_s = statistics.median(seconds[1:])
    for move in moves * told["rounds"]:
        steps_ahead = 0
        if told["way"] == "ahead":
            assert move.prepare(), "too little to be sent ahead"
            while steps_ahead == 0 or not move.is_prepared():
                step()
                steps_ahead += 1
        done = dict(move.carry_out())
        done.setdefault("bytes", done.get("num_bytes"))
        done.setdefault("rebuild_s", done["seconds"] - done["transfer_s"])
        kept = ("bytes", "paused_bytes", "seconds", "transfer_s", "rebuild_s")
        step()  # states follow beside it
        found.append({**{key: done[key] for key in kept}, "steps_ahead": steps_ahead, "step_after_s": seconds[-1]})
    engine.destroy()
    if os.environ["RANK"] == "0":
        print("found " + json.dumps({"moves": found[2:] or found, "step_s": undisturbed_s}), flush=True)


if __name__ == "__main__":
    main()
