"""How even the load of devices is when experts are placed by loads that are some iterations old: a replay.

    python tests/benchmarks/placement_replay.py [--devices 8 16] [--every 10 100] [--replicas 1]

The loads are those of a real run (tests/golden/README.md): 300 samples, 10 iterations apart, of 8 layers with 32
experts. Every so many iterations experts are placed anew by the sample before; each sample is measured with the
placement that it finds. Results are max/mean load of the devices, averaged over samples and layers:

- ``static``: blocks of neighbouring experts, ``greedy``: without copies, ``swaps``: likewise, by exchanges from where
  experts are, ``bound``: what no such placement gets below,
- ``copies``: with replicas and even splitting, ``copies_keep_owners``: where only copies move,
- ``copies_split``: tokens split over the copies by the loads of the sample itself; ``copies_old_split``: by those that
  the placement was made from.

``moved`` counts experts that come to a device, of all, at one placement; seconds are of this process's work.

``sent`` is what placements cost the network: bytes an iteration for each parameter of one expert, in bf16 with Adam.
Without copies an expert moves with its states. With ``copies_keep_owners`` values go to copies, whose gradients and new
values are sent in every step. ``owners_stay`` is placement in every step with states that never move, as in Symi
(arXiv 2504.19925): every expert's gradient goes to the devices that have a part of its states each, and its new value
to wherever it is next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.planning.placement import Placement, greedy, imbalance, lower_bound, moved, replicated, split
from paceline.planning.swaps import swapped

TRACE = Path(__file__).parents[1] / "golden" / "moe_trace.npz"
ITERATIONS = 10
"""From sample to sample."""

VALUE, GRADIENT, STATES = 2, 4, 12
"""Bytes of a parameter: its value, its gradient as it is added up, its master with two moments."""


def replay(layers: Sequence[Sequence[Sequence[float]]], devices: int, every: int, replicas: int) -> dict[str, Any]:
    """One row of the result; ``layers`` are loads by layer, sample and expert."""
    found: dict[str, list[float]] = defaultdict(list)
    gone: dict[str, list[int]] = defaultdict(list)
    plan_s, split_s, swap_s = [], [], []
    for samples in layers:
        static = Placement.contiguous(len(samples[0]), devices)
        placed = exchanged = copies = kept = static
        old_shares = split(copies, samples[0])
        for index, loads in enumerate(samples):
            if index and index * ITERATIONS % every == 0:
                known = samples[index - 1]
                new = greedy(known, devices, current=placed)
                new = new if imbalance(new, known) < imbalance(placed, known) else placed
                gone["greedy"].append(moved(placed, new))
                placed = new
                begin = time.process_time()
                new = swapped(known, exchanged)
                swap_s.append(time.process_time() - begin)
                gone["swaps"].append(moved(exchanged, new))
                exchanged = new
                begin = time.process_time()
                new = replicated(known, devices, None, replicas, copies)
                plan_s.append(time.process_time() - begin)
                gone["copies"].append(moved(copies, new))
                copies, old_shares = new, split(new, known)
                new = replicated(known, devices, None, replicas, kept, keep_owners=True)
                gone["copies_keep_owners"].append(moved(kept, new))
                kept = new
            begin = time.process_time()
            shares = split(copies, loads)
            split_s.append(time.process_time() - begin)
            found["static"].append(imbalance(static, loads))
            found["greedy"].append(imbalance(placed, loads))
            found["swaps"].append(imbalance(exchanged, loads))
            found["bound"].append(lower_bound(loads, devices) * devices / sum(loads))
            found["copies"].append(imbalance(copies, loads))
            found["copies_keep_owners"].append(imbalance(kept, loads))
            found["copies_split"].append(imbalance(copies, loads, shares))
            found["copies_old_split"].append(imbalance(copies, loads, old_shares))
    times = {name: statistics.fmean(values) for name, values in gone.items()}
    return {
        "devices": devices,
        "every": every,
        "replicas": replicas,
        **{name: round(statistics.fmean(values), 4) for name, values in found.items()},
        "moved": {name: round(number, 2) for name, number in times.items()},
        "sent": _sent(times, len(layers[0][0]), devices, every, replicas),
        "plan_s": _seconds(plan_s),
        "split_s": _seconds(split_s),
        "swap_s": _seconds(swap_s),
    }


def _sent(moved: Mapping[str, float], experts: int, devices: int, every: int, replicas: int) -> dict[str, float]:
    copies, in_a_step = devices * replicas, VALUE + GRADIENT
    found = {name: moved[name] * (VALUE + STATES) / every for name in ("greedy", "swaps")}
    found["copies_keep_owners"] = moved["copies_keep_owners"] * VALUE / every + copies * in_a_step
    found["owners_stay"] = (experts + copies) * (1 - 1 / devices) * in_a_step
    return {name: round(num_bytes, 1) for name, num_bytes in found.items()}


def planning_time(num_experts: int, devices: int, replicas: int, repeats: int) -> dict[str, Any]:
    """Seconds of one layer whose loads are drawn from a log-normal distribution (sigma 1), placed anew."""
    plan_s, ratios = [], []
    for seed in range(repeats):
        loads = np.random.default_rng(seed).lognormal(0, 1, num_experts).tolist()
        begin = time.process_time()
        found = replicated(loads, devices, None, replicas)
        plan_s.append(time.process_time() - begin)
        ratios.append(imbalance(found, loads))
    name = {"experts": num_experts, "devices": devices, "replicas": replicas}
    return {**name, "plan_s": _seconds(plan_s), "max_over_mean": round(statistics.fmean(ratios), 4)}


def _seconds(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 6), "most": round(max(values), 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--every", type=int, nargs="+", default=[10, 100], help="iterations between placements")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10, help="of each planning time")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    with np.load(TRACE) as trace:
        layers = trace["loads"].transpose(1, 0, 2).tolist()
    rows = [replay(layers, devices, every, args.replicas) for every in args.every for devices in args.devices]
    shapes = [(32, 8), (64, 16), (128, 16), (256, 32), (256, 64)]
    times = [planning_time(experts, devices, args.replicas, args.repeats) for experts, devices in shapes]
    from facts import facts  # imports torch

    result = {"replay": rows, "planning": times, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
