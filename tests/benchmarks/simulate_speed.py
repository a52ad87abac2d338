"""How long a prediction takes: seconds, microseconds an action, and whether they grow with the actions alone.

    python tests/benchmarks/simulate_speed.py [--repeats 5]

Times are of this process's work, so that what else runs on the machine counts little; ``wall_s`` is the best by the
clock. Building the schedule is not part of it, but of what a generated one takes, which is many built and simulated.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.schedules.costs import Costs
from paceline.schedules.families import chunked_route, kfkb, v_route
from paceline.schedules.generator import generated
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import dualpipev_split


def measured(num_stages: int, num_micro_batches: int, repeats: int, *, shared: bool = False) -> dict[str, Any]:
    """One shape; ``shared``: every rank is a host whose activations and gradients share what it can send."""
    costs = Costs.uniform(num_stages, 1.0, 2.0, 0.5)
    if shared:
        costs = replace(costs, hosts=tuple(range(num_stages)), egress_bytes_per_s=(2.0,) * num_stages)
    return _measured(partial(kfkb, k=2), num_stages, num_micro_batches, costs, repeats)


def measured_split(num_ranks: int, num_micro_batches: int, repeats: int) -> dict[str, Any]:
    """One shape with two stages a rank, and every backward split."""
    costs = Costs.uniform(num_ranks, 1.0, 2.0, 0.5).of_chunks(v_route(num_ranks))
    return _measured(dualpipev_split, num_ranks, num_micro_batches, costs, repeats)


def measured_generator(num_ranks: int, num_micro_batches: int) -> dict[str, Any]:
    """The search among schedules of one and of two stages a rank, whose heads are heavy."""
    plain = tuple(range(num_ranks))
    costs = Costs.uniform(num_ranks, 1.0, 2.0, 0.1, weight_s=0.8)
    costs = replace(costs, backward_s=(*costs.backward_s[1:], 2.5))
    ways = (v_route(num_ranks), chunked_route("interleaved", num_ranks, 2))
    work, wall = time.process_time(), time.perf_counter()
    schedule = generated({plain: costs, **{way: costs.of_chunks(way) for way in ways}}, num_micro_batches)
    return {
        "stages": num_ranks,
        "micro_batches": num_micro_batches,
        "found": schedule.name,
        "search_s": round(time.process_time() - work, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
    }


def _measured(
    make: Callable[[int, int], Schedule], num_ranks: int, num_micro_batches: int, costs: Costs, repeats: int
) -> dict[str, Any]:
    begin = time.process_time()
    schedule = make(num_ranks, num_micro_batches)
    built_s = time.process_time() - begin
    works, walls = [], []
    for _ in range(repeats):
        work, wall = time.process_time(), time.perf_counter()
        simulate(schedule, costs)
        works.append(time.process_time() - work)
        walls.append(time.perf_counter() - wall)
    actions = sum(map(len, schedule.orders))
    return {
        "stages": schedule.num_stages,
        "micro_batches": num_micro_batches,
        "hosts_share": bool(costs.hosts),
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
    split = measured_split(64, 1024, args.repeats)
    search = measured_generator(64, 256)
    more_micro_batches = [measured(64, count, args.repeats) for count in (256, 512, 2048, 4096)]
    more_stages = [measured(count, 1024, args.repeats) for count in (16, 32, 128, 256)]
    # Last, because the peak of memory is the process's.
    large = measured(1024, 4096, 1)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    per_action = [row["us_an_action"] for row in (usual, *more_micro_batches, *more_stages)]
    result = {
        "64x1024": usual,
        "64x1024_hosts_share": shared,
        "64x1024_two_stages_a_rank_split": split,
        "generated_64x256": search,
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
