"""Training on a network whose rates keep moving: stock DeepSpeed, each fixed schedule, and the one that follows.

    python tests/benchmarks/preemption.py [--minutes 10] [--parallel 4] [--contestants stock kfkb2 adaptive] [--seed 0]
    python tests/benchmarks/preemption.py --seed 1 --hold-s 1 4 --mbit 50 1000 off --output fast.json

Needs root (tests/lab). Every contestant trains alone, for the same time, on hosts of its own, to which the same trace
of rates is played: other tenants come and go, and leave each host between 100 Mbit/s and all of its network. Compute is
emulated by sleeping, so that ``--parallel`` contestants may run side by side. What counts is the number of steps.
``clairvoyant`` knows the rates, and takes the best schedule of each moment (tests/lab/clairvoyant.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.contestants import CLAIRVOYANT, label_of
from lab.emulation import Emulation
from lab.hosts import Hosts, available
from lab.rates import LEVELS, preemption_trace, read_trace, write_trace
from lab.training import mbit, train

FIXED = ["1f1b", "kfkb2", "kfkb4", "gpipe", "eager1", "eager2", "zbh2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contestants", nargs="+", default=["stock", *FIXED, "adaptive"])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each contestant")
    parser.add_argument("--parallel", type=int, default=1, help="contestants that run side by side")
    parser.add_argument("--trace", type=Path, help="a file of rates to play; default: one made from --seed")
    parser.add_argument("--write-trace", type=Path, help="where to write the trace that is played")
    parser.add_argument("--records", type=Path, help="a folder for the steps of each contestant, as JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hold-s", type=float, nargs=2, default=[4.0, 16.0], help="range of stays at a rate")
    parser.add_argument("--mbit", nargs="+", type=mbit, default=list(LEVELS), help="its rates: numbers, or off")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--forward-s", type=float, nargs="+", default=[0.02], help="one value, or one a host")
    parser.add_argument("--backward-s", type=float, nargs="+", default=[0.04], help="one value, or one a host")
    parser.add_argument("--message-kib", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--retune-every", type=int, default=2, help="steps, for adaptive")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    seconds = 60 * args.minutes
    trace = (
        read_trace(args.trace)
        if args.trace
        else preemption_trace(args.hosts, seconds, args.seed, tuple(args.hold_s), args.mbit)
    )
    if args.write_trace:
        write_trace(args.write_trace, trace)
    emulation = Emulation.of(args.hosts, args.forward_s, args.backward_s, args.message_kib * 1024, args.micro_batches)
    adaptive = json.dumps({"type": "adaptive", "retune_every": args.retune_every})
    with ThreadPoolExecutor(args.parallel) as pool, ExitStack() as labs:
        known = Path(labs.enter_context(tempfile.TemporaryDirectory(prefix="preemption-")), "trace.csv")
        write_trace(known, trace)
        settings = {"adaptive": f"adaptive={adaptive}", CLAIRVOYANT: f"{CLAIRVOYANT}={known}"}
        names = [settings.get(name, name) for name in dict.fromkeys(args.contestants)]
        hosts = {name: labs.enter_context(Hosts(args.hosts)) for name in names}
        runs = {
            name: pool.submit(train, hosts[name], [name], emulation, seconds=seconds, trace=trace) for name in names
        }
        # When this block is left early: nothing more begins, then the hosts end, and with them what the pool waits for.
        labs.callback(pool.shutdown, wait=False, cancel_futures=True)
        contestants = {}
        for name, run in runs.items():
            records = run.result()
            if args.records:
                args.records.mkdir(parents=True, exist_ok=True)
                lines = "".join(json.dumps(record) + "\n" for record in records)
                (args.records / f"{label_of(name)}.jsonl").write_text(lines)
            contestants[label_of(name)] = summary(records)
            print(label_of(name), json.dumps(contestants[label_of(name)]), flush=True)
    result = {
        "emulated_compute": True,
        "contestants": contestants,
        **comparison(contestants),
        "rate_changes": len(trace),
        **facts(args, "write_trace", "records"),
    }
    args.output.write_text(json.dumps(result, indent=2, default=str) + "\n")
    print(json.dumps(result, indent=2, default=str))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one contestant: its steps count against the seconds they took.

    The last one, which ends after the time is up, when the hosts of others are being taken down, does not count.
    """
    timed = [r for r in records if r["round"] >= 0][:-1]
    seconds = [r["seconds"] for r in timed]
    found: dict[str, Any] = {
        "steps": len(timed),
        "step_s": round(statistics.mean(seconds), 4),
        "median_step_s": round(statistics.median(seconds), 4),
        "longest_step_s": round(max(seconds), 4),
    }
    schedules = [r["schedule"] for r in timed if r["schedule"]]
    if len(set(schedules)) > 1:
        found["steps_by_schedule"] = dict(Counter(schedules).most_common())
        found["switches"] = sum(a != b for a, b in itertools.pairwise(schedules))
    return found


def comparison(contestants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as the best fixed schedule and as stock the one that follows is."""
    found: dict[str, Any] = {}
    step_s = {label: values["step_s"] for label, values in contestants.items()}
    if "stock" in step_s:
        found["times_stock"] = {label: round(step_s["stock"] / value, 3) for label, value in step_s.items()}
    fixed = {label: value for label, value in step_s.items() if label in FIXED}
    if "adaptive" in step_s and fixed:
        best = min(fixed, key=fixed.__getitem__)
        found |= {"best_fixed": best, "adaptive_times_best_fixed": round(fixed[best] / step_s["adaptive"], 4)}
    if "adaptive" in step_s and CLAIRVOYANT in step_s:
        found["adaptive_times_clairvoyant"] = round(step_s[CLAIRVOYANT] / step_s["adaptive"], 4)
    return found


if __name__ == "__main__":
    main()
