"""Is the number of stages that a run chooses at its start the fastest one? Planned, then trained with each of them.

    python tests/benchmarks/plan_at_start.py [--hosts 4 2] [--mbit 100 1000 off] [--models llama lora mixtral]
        [--rounds 2] [--steps 4] [--samples 32] [--stages 2]

Needs root (tests/lab). In each world (hosts, their links, the model, samples of a step) one run plans; then runs with
each number of stages, whole and in two chunks a rank, train on the same samples, in turns. With ``--stages`` the run
plans only the chunks. Computing and sockets are real; ranks share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.hosts import Hosts, available
from lab.training import mbit

LENGTH, MICRO_BATCH, PATIENCE_S = 64, 2, 600.0
PREDICTED = re.compile(r"^(\d+) stages?(?: of (\d+) chunks)?\b.*: (\S+) s a step")
MODELS = ("llama", "lora", "mixtral")
"""A Llama with all weights trained or with LoRA, and a Mixtral of eight experts on each rank."""
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--mbit", type=mbit, nargs="+", default=[100.0, 1000.0, None], help="of every host, or off")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a run, behind eight that do not count")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, nargs="+", default=[32], help="of a step, in micro-batches of 2")
    parser.add_argument("--stages", type=int, help="of all runs, which plan chunks alone (default: planned too)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(json.loads(args.child))
        return
    if reason := available():
        sys.exit(reason)
    worlds = []
    for num_hosts, rate, model, samples in product(args.hosts, args.mbit, args.models, args.samples):
        world = {"layers": args.layers, "model": model, "steps": args.steps, "samples": samples}
        found = look_at(num_hosts, rate, world, args.rounds, args.stages)
        worlds.append({"hosts": num_hosts, "mbit": rate, "model": model, "samples": samples, **found})
        print(json.dumps(worlds[-1]), flush=True)
    behind = [world["behind_fastest"] for world in worlds]
    errors = [error for world in worlds for error in world["errors"].values()]
    result = {
        "emulated_compute": False,
        "within_5_percent": sum(share <= 0.05 for share in behind),
        "num_worlds": len(worlds),
        "median_error": round(statistics.median(map(abs, errors)), 4),
        "worlds": worlds,
        **facts(args, "child"),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def look_at(
    num_hosts: int, rate: float | None, world: dict[str, Any], rounds: int, given: int | None
) -> dict[str, Any]:
    """One world: what is planned, and seconds of a step with each number of stages and of chunks.

    Args:
        given: stages of all runs; None: they are planned too.
    """
    counts = [stages for stages in (1, 2, 4) if stages <= num_hosts and given in (None, stages)]
    shapes = [(stages, chunks) for stages in counts for chunks in ((1, 2) if stages > 1 else (1,))]
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    with Hosts(num_hosts, mbit=rate) as hosts:

        def run(**more: Any) -> dict[str, Any]:
            command = [sys.executable, __file__, "--child", json.dumps({**world, **more})]
            lines = hosts.run(command, timeout=PATIENCE_S)[0].splitlines()
            (line,) = [line for line in lines if line.startswith("found ")]
            found: dict[str, Any] = json.loads(line.removeprefix("found "))
            return found

        planned = run(steps=1, stages=given or "plan", chunks="plan")
        for _ in range(rounds):
            for (stages, chunks), known in seconds.items():
                known.extend(run(stages=stages, chunks=chunks)["seconds"])
    measured = {shape: statistics.median(known) for shape, known in seconds.items()}
    fastest = min(measured, key=measured.__getitem__)
    chosen = (planned["stages"], planned["chunks"])
    predicted = {
        (int(stages), int(chunks or 1)): float(value)
        for line in planned["lines"]
        for stages, chunks, value in PREDICTED.findall(line)
    }
    errors = {name(shape): round(predicted[shape] / value - 1, 4) for shape, value in measured.items()}
    return {
        "planned": name(chosen),
        "fastest": name(fastest),
        "behind_fastest": round(measured[chosen] / measured[fastest] - 1, 4),
        "measured_s": {name(shape): round(value, 4) for shape, value in measured.items()},
        "errors": errors,
        "predicted": planned["lines"],
    }


def name(shape: tuple[int, int]) -> str:
    """``"2"`` stages, or ``"2x2"``: each in two chunks."""
    stages, chunks = shape
    return f"{stages}x{chunks}" if chunks > 1 else f"{stages}"


def train(world: dict[str, Any]) -> None:
    """Runs on every host: plan, or take the stages that are told, and train."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    import paceline

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    logging.getLogger("paceline").setLevel(logging.INFO)
    sizes = {**SIZES, "num_hidden_layers": world["layers"], "vocab_size": 1024, "max_position_embeddings": LENGTH}
    if world["model"] == "mixtral":
        sizes["intermediate_size"] //= 2  # two experts of eight compute as much as the Llama's layer
        model: Any = MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
    else:
        model = LlamaConfig(**sizes)
    if world["model"] == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_config(model), LoraConfig(target_modules="all-linear"))
    pipeline = {"schedule": {"type": "adaptive", "chunks": world["chunks"]}, "stages": world["stages"]}
    config = {
        "train_batch_size": world["samples"],
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "paceline": {"pipeline": pipeline},
    }
    engine, *_ = paceline.initialize(model=model, config=config)
    ids = torch.randint(1024, (MICRO_BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(8 + world["steps"]):
        begun = time.perf_counter()
        engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * engine.plan.micro_batches))
        seconds.append(time.perf_counter() - begun)
    found = {
        "stages": engine.plan.stages,
        "chunks": engine.plan.schedule.chunks or 1,
        "schedule": engine.schedule.name,
        "seconds": seconds[8:],
        "lines": [line.removeprefix("plan: ") for line in lines if line.startswith("plan: ")],
    }
    engine.destroy()
    if os.environ["RANK"] == "0":
        print("found " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
