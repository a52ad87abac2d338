"""Devices that change their speed: how soon our engine is at the new optimum, what that costs, and when it stays put.

    python tests/benchmarks/slowdown.py [--runs slowdown noise unsteady] [--repartition-every 8]

Needs root (tests/lab). Three runs, all of layers that sleep for their work by the speed of their device now:

* ``slowdown``: one device falls to a part of its speed and recovers. Beside our engine, ``online``, run DeepSpeed's
  and, for every phase, the best partition of all by simulation, which says what a step could take.
* ``noise``: every computation takes up to a share more or less; nothing is to be gained by moving layers.
* ``unsteady``: every device has another speed in every step, within the same share.

``waited_share`` of a migration is the time that training waited for its bytes, by what the busiest host's take at the
link's rate. Parameters of these layers are not changed by training; ``migration_pause.py`` has real ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts
from partition import online

from lab.contestants import label_of
from lab.emulation import OPTIMIZERS, Emulation, SpeedChange
from lab.hosts import BURST_BYTES, Hosts, available
from lab.partitions import best
from lab.training import mbit, train
from lab.transfer import PAYLOAD_SHARE, goodput_bytes_per_s

WITHIN = 1.05
"""Times the optimum: there a step counts as being at it."""

PAUSE_FACTOR = 1.2
"""Of the bytes that the busiest host sends at the link's rate: what a migration may take besides its rebuilding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 1.0, 1.0, 1.0], help="one a host")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--forward-s", type=float, nargs="+", default=[0.002], help="at speed 1; one, or one a layer")
    parser.add_argument("--backward-s", type=float, nargs="+", default=[0.004], help="at speed 1; one, or one a layer")
    parser.add_argument("--message-kib", type=int, default=16)
    parser.add_argument("--layer-kib", type=int, default=256, help="of parameters that a layer has")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="Adam")
    parser.add_argument("--mbit", type=mbit, default=1000.0, help="Mbit/s of every host, or off")
    parser.add_argument("--repartition-every", type=int, default=8, help="steps, for online")
    parser.add_argument("--periods", type=int, default=3, help="of a phase, in each run")
    parser.add_argument("--rank", type=int, default=1, help="whose device changes")
    parser.add_argument("--slow", type=float, default=0.5, help="slowdown: times its speed")
    parser.add_argument("--noise", type=float, default=0.1, help="noise, unsteady: share")
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
        layer_bytes=args.layer_kib * 1024,
        optimizer=args.optimizer,
    )
    result: dict[str, Any] = {"emulated_compute": True}
    for name in args.runs:
        result[name] = RUNS[name](args, emulation)
        print(name, json.dumps(result[name], indent=2), flush=True)
    result |= facts(args)
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def slowdown(args: argparse.Namespace, emulation: Emulation) -> dict[str, Any]:
    """One device slows down and recovers."""
    period, speed = args.repartition_every, args.speeds[args.rank]
    # In the middle of a period, where what was measured is partly old.
    slow_at = args.periods * period + period // 2 + 1
    recover_at = slow_at + args.periods * period + 1
    end = recover_at + args.periods * period
    changes = (SpeedChange(slow_at, args.rank, args.slow * speed), SpeedChange(recover_at, args.rank, speed))
    emulation = replace(emulation, speed_changes=changes)
    phases = list(pairwise((1, slow_at, recover_at, end)))
    optima = [best(emulation, emulation.speeds_at(begin), args.mbit)[0] for begin, _ in phases]
    fixed = {boundaries: f"fixed{n}" for n, boundaries in enumerate(dict.fromkeys(found for _, found in optima))}
    names = ["stock", f"online={online(period)}"]
    names += [f"{label}={json.dumps({'partition': list(boundaries)})}" for boundaries, label in fixed.items()]
    with Hosts(emulation.num_ranks, mbit=args.mbit) as hosts:
        records = _run(hosts, names, emulation, end)
        bytes_per_s = _bytes_per_s(hosts, args.mbit)
    return {
        "phases": [
            _phase(records, begin, end, boundaries, simulated_s, fixed[boundaries])
            for (begin, end), (simulated_s, boundaries) in zip(phases, optima, strict=True)
        ],
        "migrations": _migrations(records, bytes_per_s),
        "mean_step_s": {label: round(statistics.mean(_seconds(records, label)), 4) for label in map(label_of, names)},
    }


def noise(args: argparse.Namespace, emulation: Emulation) -> dict[str, Any]:
    """Computations take now more, now less."""
    return _steady(args, replace(emulation, noise=args.noise))


def unsteady(args: argparse.Namespace, emulation: Emulation) -> dict[str, Any]:
    """Devices are faster in one step and slower in the next."""
    chance = random.Random(0)
    changes = [
        SpeedChange(step, rank, round(speed * (1 + args.noise * chance.uniform(-1, 1)), 4))
        for step in range(_num_steady_steps(args))
        for rank, speed in enumerate(emulation.speeds)
    ]
    return _steady(args, replace(emulation, speed_changes=tuple(changes)))


RUNS: dict[str, Callable[[argparse.Namespace, Emulation], dict[str, Any]]] = {
    "slowdown": slowdown,
    "noise": noise,
    "unsteady": unsteady,
}


def _run(hosts: Hosts, names: list[str], emulation: Emulation, end: int) -> list[dict[str, Any]]:
    """Each contestant in turn, all its steps at once; the first one makes connections."""
    return train(hosts, names, emulation, warmup=1, steps=end - 1)


def _num_steady_steps(args: argparse.Namespace) -> int:
    return 3 * args.periods * args.repartition_every + 1


def _steady(args: argparse.Namespace, emulation: Emulation) -> dict[str, Any]:
    names = [f"online={online(args.repartition_every)}"]
    with Hosts(emulation.num_ranks, mbit=args.mbit) as hosts:
        records = _run(hosts, names, emulation, _num_steady_steps(args))
    return {
        "steps": len(records),
        "decisions": (len(records) - 1) // args.repartition_every,
        "migrations": [r["migration"] for r in records if "migration" in r],
        "boundaries": records[-1]["boundaries"],
        "step_s": round(statistics.median(_seconds(records, "online")), 4),
    }


def _phase(
    records: list[dict[str, Any]], begin: int, end: int, boundaries: Sequence[int], simulated_s: float, fixed: str
) -> dict[str, Any]:
    """What happened between two changes of a speed."""
    own = {r["step"]: r for r in records if r["contestant"] == "online" and begin <= r["step"] < end}
    of_stock, of_fixed = (
        statistics.median(r["seconds"] for r in records if r["contestant"] == name and begin <= r["step"] < end)
        for name in ("stock", fixed)
    )
    at_optimum = [step for step, r in own.items() if r["seconds"] <= WITHIN * of_fixed]
    found: dict[str, Any] = {
        "from_step": begin,
        "optimum": list(boundaries),
        "optimum_simulated_s": round(simulated_s, 4),
        "optimum_s": round(of_fixed, 4),
        "stock_s": round(of_stock, 4),
        "first_step_s": round(own[begin]["seconds"], 4),
        "moved_at_steps": [step for step, r in own.items() if "migration" in r],
        "boundaries": own[end - 1]["boundaries"],
        "steps_until_at_optimum": None,
    }
    if at_optimum:
        since = [r["seconds"] for step, r in own.items() if step >= at_optimum[0]]
        found["steps_until_at_optimum"] = at_optimum[0] - begin
        found["step_s_since"] = round(statistics.median(since), 4)
        found["times_optimum_since"] = round(statistics.median(since) / of_fixed, 4)
    return found


def _migrations(records: list[dict[str, Any]], bytes_per_s: float) -> list[dict[str, Any]]:
    """What each migration took, and what it may take."""
    found = []
    for record in records:
        if move := record.get("migration"):
            limit_s = PAUSE_FACTOR * move["most_bytes"] / bytes_per_s + move["rebuild_s"]
            waited = (move["seconds"] - move["rebuild_s"]) / (move["most_bytes"] / bytes_per_s)
            limits = {"limit_s": round(limit_s, 4), "within_limit": move["seconds"] <= limit_s}
            found.append({**move, **limits, "waited_share": round(waited, 4)})
    return found


def _bytes_per_s(hosts: Hosts, rate: float | None) -> float:
    """Payload that a host sends; what has no limit is measured."""
    if rate is not None:
        return rate * 1e6 / 8 * PAYLOAD_SHARE
    return goodput_bytes_per_s(hosts, 0, 1, 512 << 20, BURST_BYTES)


def _seconds(records: list[dict[str, Any]], label: str) -> list[float]:
    return [r["seconds"] for r in records if r["contestant"] == label and r["round"] >= 0]


if __name__ == "__main__":
    main()
