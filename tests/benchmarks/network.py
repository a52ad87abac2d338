"""A step of pipelines that share a network, on emulated hosts: DeepSpeed's, torch's and ours, turn by turn in one run.

    python tests/benchmarks/network.py [--micro-batches 16] [--mbit 200] [--contestants stock kfkb2] [--rounds 5]

Needs root: every host is a network namespace with a limited sending side (tests/lab). Compute is emulated by sleeping,
so the cores are free and the network is real. In each setting all contestants live in the same processes; every round
each has its turn. A ratio is stock's seconds by the contestant's, of the same round: how many times as fast it is.

``kept`` is the most that a rank keeps at a time, counted by what is alive in its process, in whole stages of a
micro-batch: activations (``live``), what deferred gradients of weights still need (``deferred``), and both together
(``held``). Of a schedule of ours ``verified`` says what its proof promises. Backwards can be split: half of each, or
``--weight-s`` of it, computes the gradient of the weight.

Every engine that waits for its turn has threads of gloo that look for messages a hundred times a second: together they
take a good part of two cores where there are many. With ``--together 4`` no more than so many share processes with
stock, whose seconds in the same processes their ratios are of.

On a machine with other work, `chrt --rr 5` before the command keeps that from the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.contestants import label_of, num_chunks_of
from lab.emulation import Emulation
from lab.hosts import Hosts, available
from lab.kept import Peaks
from lab.training import mbit, train

CONTESTANTS = ["stock", "dualpipev", "torch-1f1b", "1f1b", "kfkb2", "kfkb4", "eager1", "adaptive"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, help="stock is always among them")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--mbit", type=mbit, nargs="+", default=[200.0, None], help="Mbit/s of every host, or off")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--forward-s", type=float, nargs="+", default=[0.02], help="one value, or one a host")
    parser.add_argument("--backward-s", type=float, nargs="+", default=[0.04], help="one value, or one a host")
    parser.add_argument("--weight-s", type=float, nargs="+", default=[], help="part of each backward; default: half")
    parser.add_argument("--message-kib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a contestant in a round")
    parser.add_argument("--together", type=int, help="contestants beside stock in the same processes; default: all")
    parser.add_argument("--retune-every", type=int, default=4, help="steps, for adaptive")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    names = list(dict.fromkeys(["stock", *args.contestants]))
    adaptive = json.dumps({"type": "adaptive", "retune_every": args.retune_every})
    names = [f"adaptive={adaptive}" if name == "adaptive" else name for name in names]
    settings = []
    for num_micro_batches in args.micro_batches:
        for rate in args.mbit:
            settings.append(measure(args, names, num_micro_batches, rate))
            print(json.dumps(settings[-1], indent=2), flush=True)
    load = [round(value, 1) for value in os.getloadavg()]
    result = {"emulated_compute": True, "network": settings, "load_average_at_end": load, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(args: argparse.Namespace, names: list[str], num_micro_batches: int, rate: float | None) -> dict[str, Any]:
    """All contestants in one setting."""
    emulation = Emulation.of(
        *(args.hosts, args.forward_s, args.backward_s, args.message_kib * 1024, num_micro_batches),
        weight_s=args.weight_s,
    )
    others = names[1:]
    together = args.together or max(1, len(others))
    contestants = {}
    with Hosts(args.hosts, mbit=rate) as hosts:
        for first in range(0, max(1, len(others)), together):
            own = [names[0], *others[first : first + together]]
            records = train(
                hosts, own, emulation, rounds=args.rounds, steps=args.steps, warmup=max(2, args.retune_every + 1)
            )
            contestants |= compared(args, own if first == 0 else own[1:], records)
    return {
        "micro_batches": num_micro_batches,
        "mbit": rate,
        "bound_with_a_flush_s": round(emulation.bound_s, 4),
        "contestants": contestants,
    }


def compared(args: argparse.Namespace, names: list[str], records: list[dict[str, Any]]) -> dict[str, Any]:
    """By contestant: its steps, against those of stock in the same processes."""

    def of_rounds(label: str) -> list[float]:
        turns = [
            [r["seconds"] for r in records if r["contestant"] == label and r["round"] == n] for n in range(args.rounds)
        ]
        return [statistics.mean(turn) for turn in turns]

    stock = of_rounds("stock")
    contestants = {}
    for name in names:
        label, num_chunks = label_of(name), num_chunks_of(name)
        turns = of_rounds(label)
        ratios = sorted(a / b for a, b in zip(stock, turns, strict=True))
        contestants[label] = {
            "step_s": round(statistics.median(turns), 4),
            "times_stock": round(statistics.median(ratios), 3),
            "times_stock_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        }
        if schedules := [r["schedule"] for r in records if r["contestant"] == label and r["schedule"]]:
            contestants[label]["schedules"] = list(dict.fromkeys(schedules))
            contestants[label]["last_schedule_since_step"] = len(schedules) - _run_at_end(schedules)
        for what in ("kept", "verified"):
            if found := [r[what] for r in records if r["contestant"] == label and what in r]:
                most = map(max, zip(*found[-1], strict=True))
                contestants[label][what] = {
                    key: peak / num_chunks for key, peak in zip(Peaks._fields, most, strict=True)
                }
    return contestants


def _run_at_end(names: list[str]) -> int:
    """How many names at the end are the last one."""
    return next((n for n, name in enumerate(reversed(names)) if name != names[-1]), len(names))


if __name__ == "__main__":
    main()
