"""Unequal devices: DeepSpeed's partitions, the one that follows the devices, and the best there are, on emulated hosts.

    python tests/benchmarks/partition.py [--speeds 4 2 1 1] [--rounds 5] [--mbit off]

Needs root (tests/lab). Layers sleep for their work by the speed of the device they run on. Every possible partition is
simulated; the best ones are run, as are DeepSpeed's ``uniform`` and ``parameters``, our engine with ``uniform`` and our
engine that starts there and moves layers by what it measures: ``online``. All live in the same
processes; every round each has its turn. A ratio is of the same round: stock's seconds by the contestant's, or the
contestant's by the shortest of the best ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.contestants import label_of
from lab.emulation import OPTIMIZERS, Emulation
from lab.hosts import Hosts, available
from lab.partitions import best, step_s
from lab.training import mbit, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--speeds", type=float, nargs="+", default=[4.0, 2.0, 1.0, 1.0], help="one a host")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--forward-s", type=float, nargs="+", default=[0.008], help="at speed 1; one, or one a layer")
    parser.add_argument("--backward-s", type=float, nargs="+", default=[0.016], help="at speed 1; one, or one a layer")
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--layer-kib", type=int, default=64, help="of parameters that a layer has")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="Adam")
    parser.add_argument("--mbit", type=mbit, default=None, help="Mbit/s of every host, or off")
    parser.add_argument("--noise", type=float, default=0.0, help="share of each computation's time")
    parser.add_argument("--best", type=int, default=5, help="how many of the best partitions to run")
    parser.add_argument("--repartition-every", type=int, default=4, help="steps, for online")
    parser.add_argument(
        "--warmup", type=int, help="steps before the first round; default: two periods of online and one"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a contestant in a round")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    emulation = Emulation.of(
        len(args.speeds),
        args.forward_s,
        args.backward_s,
        args.message_kib * 1024,
        args.micro_batches,
        num_layers=args.layers,
        speeds=args.speeds,
        noise=args.noise,
        layer_bytes=args.layer_kib * 1024,
        optimizer=args.optimizer,
    )
    ranking = best(emulation, mbit=args.mbit, count=args.best)
    names = [
        "stock",
        "stock-parameters",
        'uniform={"partition": "uniform"}',
        f"online={online(args.repartition_every)}",
    ]
    names += [f"best{n + 1}={json.dumps({'partition': list(found)})}" for n, (_, found) in enumerate(ranking)]
    with Hosts(len(args.speeds), mbit=args.mbit) as hosts:
        records = train(
            hosts,
            names,
            emulation,
            rounds=args.rounds,
            steps=args.steps,
            warmup=2 * args.repartition_every + 1 if args.warmup is None else args.warmup,
        )
    result = {"emulated_compute": True, **compared(args, emulation, names, records), **facts(args, "warmup")}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def online(repartition_every: int) -> str:
    """The JSON of the contestant that starts with a uniform partition and moves layers."""
    return json.dumps({"partition": {"method": "uniform", "repartition_every": repartition_every}})


def compared(
    args: argparse.Namespace, emulation: Emulation, names: list[str], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Measured against stock, against the best partitions, and against the simulation."""
    turns = {label: _of_rounds(records, label, args.rounds) for label in map(label_of, names)}
    leaders = [label for label in turns if label.startswith("best")]
    leader = min(leaders, key=lambda label: statistics.median(turns[label]))
    contestants: dict[str, dict[str, Any]] = {}
    for label, seconds in turns.items():
        own = [r for r in records if r["contestant"] == label]
        times_stock = sorted(a / b for a, b in zip(turns["stock"], seconds, strict=True))
        times_best = [a / b for a, b in zip(seconds, turns[leader], strict=True)]
        boundaries = own[-1]["boundaries"]
        contestants[label] = {
            "boundaries": boundaries,
            "step_s": round(statistics.median(seconds), 4),
            "predicted_s": round(step_s(emulation, boundaries, mbit=args.mbit), 4),
            "times_stock": round(statistics.median(times_stock), 3),
            "times_stock_range": [round(times_stock[0], 3), round(times_stock[-1], 3)],
            "times_best": round(statistics.median(times_best), 4),
        }
        if moves := [r["migration"] for r in own if "migration" in r]:
            contestants[label]["migrations"] = moves
            contestants[label]["migrations_in_rounds"] = sum("migration" in r for r in own if r["round"] >= 0)
    uniform_s, best_s = contestants["stock"]["predicted_s"], contestants["best1"]["predicted_s"]
    return {
        "contestants": contestants,
        "bound_times_stock": round(uniform_s / best_s, 3),
        "online_times_stock": contestants["online"]["times_stock"],
        "online_times_parameters": round(_ratio(turns["stock-parameters"], turns["online"]), 3),
        "fastest_of_the_best": leader,
        "online_times_fastest_of_the_best": contestants["online"]["times_best"],
    }


def _of_rounds(records: list[dict[str, Any]], label: str, rounds: int) -> list[float]:
    turns = [[r["seconds"] for r in records if r["contestant"] == label and r["round"] == n] for n in range(rounds)]
    return [statistics.mean(turn) for turn in turns]


def _ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ones, others, strict=True))


if __name__ == "__main__":
    main()
