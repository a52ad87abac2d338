"""How long a prediction takes: seconds, microseconds an action, and whether they grow with the actions alone.

    python tests/benchmarks/simulate_speed.py [--repeats 5]

Times are of this process's work, so that what else runs on the machine counts little; ``wall_s`` is the best by the
clock. Building the schedule is not part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.schedules.costs import Costs
from paceline.schedules.families import kfkb
from paceline.schedules.simulate import simulate


def measured(num_stages: int, num_micro_batches: int, repeats: int, *, shared: bool = False) -> dict[str, Any]:
    """One shape; ``shared``: every rank is a host whose activations and gradients share what it can send."""
    begin = time.process_time()
    schedule = kfkb(num_stages, num_micro_batches, 2)
    built_s = time.process_time() - begin
    costs = Costs.uniform(num_stages, 1.0, 2.0, 0.5)
    if shared:
        costs = replace(costs, hosts=tuple(range(num_stages)), egress_bytes_per_s=(2.0,) * num_stages)
    works, walls = [], []
    for _ in range(repeats):
        work, wall = time.process_time(), time.perf_counter()
        simulate(schedule, costs)
        works.append(time.process_time() - work)
        walls.append(time.perf_counter() - wall)
    actions = 2 * num_stages * num_micro_batches
    return {
        "stages": num_stages,
        "micro_batches": num_micro_batches,
        "hosts_share": shared,
        "actions": actions,
        "build_s": round(built_s, 4),
        "simulate_s": round(statistics.median(works), 4),
        "wall_s": round(min(walls), 4),
        "us_an_action": round(statistics.median(works) / actions * 1e6, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    usual = measured(64, 1024, args.repeats)
    shared = measured(64, 1024, args.repeats, shared=True)
    more_micro_batches = [measured(64, count, args.repeats) for count in (256, 512, 2048, 4096)]
    more_stages = [measured(count, 1024, args.repeats) for count in (16, 32, 128, 256)]
    # Last, because the peak of memory is the process's.
    large = measured(1024, 4096, 1)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    per_action = [row["us_an_action"] for row in (usual, *more_micro_batches, *more_stages)]
    result = {
        "64x1024": usual,
        "64x1024_hosts_share": shared,
        "1024x4096": {**large, "peak_memory_gib": round(peak_gib, 2)},
        "growth": [*more_micro_batches, *more_stages],
        "us_an_action_most_over_least": round(max(per_action) / min(per_action), 2),
    }
    from facts import facts  # imports torch, which would count as memory

    result = {**result, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
