"""How long the best partition takes to find: seconds, nanoseconds a block and device, and whether that stays the same.

    python tests/benchmarks/partition_speed.py [--repeats 5]

Times are of this process's work, so that what else runs on the machine counts little; ``wall_s`` is the best by the
clock. Every case has links; half of the devices have little memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from paceline.planning import Block, Device, partition, search_order


def instance(num_blocks: int, num_devices: int, num_kinds: int) -> tuple[list[Block], list[Device], list[float]]:
    """Blocks that differ, devices of so many kinds, links that differ."""
    draw = random.Random(f"{num_blocks} {num_devices} {num_kinds}")
    blocks = [Block(draw.random(), draw.random(), 1.0, 1 / num_devices) for _ in range(num_blocks)]
    kinds = [(draw.uniform(0.5, 2.0), inf if kind % 2 else 6.0 * num_blocks / num_devices) for kind in range(num_kinds)]
    devices = [Device(*kinds[index % num_kinds]) for index in range(num_devices)]
    return blocks, devices, [draw.uniform(1.0, 10.0) for _ in range(num_devices - 1)]


def timed(solve: Callable[[], object], repeats: int) -> dict[str, float]:
    works, walls = [], []
    for _ in range(repeats):
        work, wall = time.process_time(), time.perf_counter()
        solve()
        works.append(time.process_time() - work)
        walls.append(time.perf_counter() - wall)
    return {"solve_s": round(statistics.median(works), 4), "wall_s": round(min(walls), 4)}


def measured(num_blocks: int, num_devices: int, repeats: int) -> dict[str, Any]:
    """One shape, the devices in the order given."""
    blocks, devices, links = instance(num_blocks, num_devices, num_devices)
    live = range(num_devices, 0, -1)
    seconds = timed(lambda: partition(blocks, devices, links, live=live), repeats)
    each_ns = seconds["solve_s"] / (num_blocks * num_devices) * 1e9
    return {"blocks": num_blocks, "devices": num_devices, **seconds, "ns_a_block_and_device": round(each_ns)}


def searched(num_blocks: int, num_devices: int, num_kinds: int) -> dict[str, Any]:
    """One shape, over all orders of the devices; links are alike."""
    blocks, devices, _ = instance(num_blocks, num_devices, num_kinds)
    seconds = timed(lambda: search_order(blocks, devices), 1)
    return {"blocks": num_blocks, "devices": num_devices, "kinds": num_kinds, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    usual = measured(1000, 64, args.repeats)
    shapes = [(250, 64), (4000, 64), (1000, 16), (1000, 256)]
    growth = [measured(blocks, devices, args.repeats) for blocks, devices in shapes]
    each = [row["ns_a_block_and_device"] for row in (usual, *growth)]
    orders = [(100, 8, 8), (200, 10, 10), (1000, 64, 2), (100, 16, 16)]
    from facts import facts  # imports torch

    result = {
        "1000x64": usual,
        "growth": growth,
        "ns_most_over_least": round(max(each) / min(each), 2),
        "order_search": [searched(*shape) for shape in orders],
        **facts(args),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
