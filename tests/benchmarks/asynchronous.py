"""Pipelines without a flush on emulated hosts: how fast their steps are, and whether that is what is predicted.

    python tests/benchmarks/asynchronous.py [--quick] [--forward-s 0.04] [--rounds 3] [--output FILE]
    python tests/benchmarks/asynchronous.py --uneven 1.5 --forward-s 0.02 --output tests/benchmarks/uneven.json

Needs root: every host is a network namespace (tests/lab). Compute is emulated by sleeping, so the cores are free; ours
without a flush is the real engine with a small Hugging Face model (tests/lab/asynchronous.py), the others have layers
that only sleep. All contestants of a job live in the same processes, and each has its turn in every round.

Predictions are simulated and nothing in them is fitted: compute takes what the device sleeps, messages nothing where
there is no limit, and else share what a host can send. So the error of a synchronous contestant also has what its
engine adds to a schedule. Limited hosts send larger messages, since a limiter lets a burst of 128 KiB through at once
after each pause, which no prediction knows of. A ratio is another's seconds by the contestant's, of the same round.

With ``--uneven`` the last stage takes so much longer, as a head does that no cut makes shorter; a device of several
directions has that stage and a short one.

Break-even points are where ``multidirection`` stops being faster. Over micro-batches: where a line through what it
gains, in seconds a step, meets zero. Over links: between which rates the winner changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.contestants import label_of
from lab.emulation import Emulation
from lab.hosts import Hosts, available
from lab.training import train
from lab.transfer import PAYLOAD_SHARE
from paceline.schedules import asynchronous, families
from paceline.schedules.costs import Costs
from paceline.schedules.simulate import simulate
from paceline.schedules.steady import period

HOSTS = 4
UNLIMITED = ["stock", "dualpipev", "multidirection", "multidirection-clipped", "one_direction"]
KFKB = "kfkb"
UNEVEN = ["1f1b", "one_direction", "multidirection"]
LIMITED = ["1f1b", KFKB, "multidirection", "one_direction"]
"""``kfkb`` stands for those with a k that is predicted to be the fastest at one of the rates."""

RATES = {"8": [400.0, 200.0, 100.0], "16": [1600.0, 400.0]}
"""Around the rates below which kfkb becomes faster."""

LONG = 16
"""Micro-batches of a step that is not long."""

CLOSE = 0.03
"""Predictions that differ by less are a draw: either may be measured to be the faster one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16, 4, 32], help="without a limit")
    parser.add_argument("--limited", type=json.loads, default=RATES, help="JSON: Mbit/s by number of micro-batches")
    parser.add_argument("--forward-s", type=float, default=0.04, help="of a stage; its backward takes twice as long")
    parser.add_argument("--message-kib", type=int, default=512)
    parser.add_argument("--limited-message-kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="one less where links are limited or steps are long")
    parser.add_argument("--steps", type=int, default=2, help="of a contestant in a round")
    parser.add_argument(
        "--uneven", type=float, metavar="X", help="8 micro-batches only, the last stage X times as long as the others"
    )
    parser.add_argument("--quick", action="store_true", help="8 micro-batches only, one round, one rate")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    if args.uneven is not None:
        rows = measure(args, UNEVEN, 8, [])
        args.output.write_text(json.dumps({"emulated_compute": True, "rows": rows, **facts(args)}, indent=2) + "\n")
        return
    if args.quick:
        args.micro_batches, args.limited, args.rounds = [8], {"8": [200.0]}, 1
    rows = []
    for num_micro_batches in args.micro_batches:
        rows += measure(args, UNLIMITED, num_micro_batches, [])
    for count, rates in args.limited.items():
        rows += measure(args, LIMITED, int(count), rates)
    result = {
        "emulated_compute": True,
        "rows": rows,
        "break_even": [*over_micro_batches(args, rows), *over_links(args, rows)],
        **facts(args),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")


# -- measured and predicted ------------------------------------------------------------------------------------------


def costs_of(args: argparse.Namespace, mbit: float | None) -> Costs:
    """Of hosts that can send ``mbit`` Mbit/s each; None: messages take no time."""
    costs = Costs(*stages_s(args))
    if mbit is None:
        return costs
    return Costs(
        costs.forward_s,
        costs.backward_s,
        message_bytes=(message_bytes(args, mbit) * 1.0,) * (HOSTS - 1),
        hosts=tuple(range(HOSTS)),
        egress_bytes_per_s=(mbit * 1e6 / 8 * PAYLOAD_SHARE,) * HOSTS,
    )


def stages_s(args: argparse.Namespace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forwards and backwards of the stages."""
    longer = (1.0,) * (HOSTS - 1) + (args.uneven or 1.0,)
    return tuple(args.forward_s * x for x in longer), tuple(2 * args.forward_s * x for x in longer)


def message_bytes(args: argparse.Namespace, mbit: float | None) -> int:
    return 1024 * (args.message_kib if mbit is None else args.limited_message_kib)


def predicted_s(label: str, costs: Costs, num_micro_batches: int) -> float:
    """Seconds of a step of a contestant."""
    if label in asynchronous.STREAMS or label.endswith("-clipped"):
        return period(asynchronous.make(label.removesuffix("-clipped"), HOSTS, num_micro_batches), costs)
    if label == "dualpipev":
        schedule = families.dualpipev(HOSTS, num_micro_batches)
        return simulate(schedule, costs.of_chunks(schedule.routes[0])).makespan_s
    k = int(label.removeprefix(KFKB)) if label.startswith(KFKB) else 1
    return simulate(families.kfkb(HOSTS, num_micro_batches, k), costs).makespan_s


def fastest_k(costs: Costs, num_micro_batches: int) -> int:
    """The best group size of K-forward-K-backward."""

    def step_s(k: int) -> float:
        return simulate(families.kfkb(HOSTS, num_micro_batches, k), costs).makespan_s

    return min(families.group_sizes(num_micro_batches), key=step_s)


def measure(
    args: argparse.Namespace, names: Sequence[str], num_micro_batches: int, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """A row for each contestant and rate, all of one job."""
    names = [name for name in names if name != "dualpipev" or num_micro_batches >= 2 * HOSTS]
    if num_micro_batches > LONG:
        names = [name for name in names if not name.endswith("-clipped")]
    sizes = sorted({fastest_k(costs_of(args, rate), num_micro_batches) for rate in rates})
    groups = [f"{KFKB}{k}={json.dumps({'type': 'kfkb', 'k': k})}" for k in sizes]
    contestants = [one for name in names for one in (groups if name == KFKB else [name])]
    size = message_bytes(args, rates[0] if rates else None)
    emulation = Emulation.of(HOSTS, *map(list, stages_s(args)), size, num_micro_batches)
    rounds = max(1, args.rounds - 1) if rates or num_micro_batches > LONG else args.rounds
    with Hosts(HOSTS) as hosts:
        records = train(hosts, contestants, emulation, rounds=rounds, steps=args.steps, warmup=1, rates=rates)
    rows = []
    for rate in [*rates] or [None]:

        def of_rounds(label: str, rate: float | None = rate) -> list[float]:
            turns: dict[int, list[float]] = {}
            for record in records:
                if record["contestant"] == label and record["mbit"] == rate and record["round"] >= 0:
                    turns.setdefault(record["round"], []).append(record["seconds"])
            return [statistics.mean(turns[number]) for number in sorted(turns)]

        for label in map(label_of, contestants):
            turns = of_rounds(label)
            row: dict[str, Any] = {
                "contestant": label,
                "micro_batches": num_micro_batches,
                "mbit": rate,
                "step_s": round(statistics.median(turns), 4),
                "range_s": [round(min(turns), 4), round(max(turns), 4)],
                "predicted_s": round(predicted_s(label, costs_of(args, rate), num_micro_batches), 4),
            }
            row["error"] = round(statistics.median(turns) / row["predicted_s"] - 1, 4)
            for other in ("stock", "dualpipev"):
                if other in names:
                    ratios = [a / b for a, b in zip(of_rounds(other), turns, strict=True)]
                    row[f"times_{other}"] = round(statistics.median(ratios), 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


# -- break-even points -----------------------------------------------------------------------------------------------


def over_micro_batches(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to how many micro-batches ``multidirection`` is faster, where there is no limit."""
    found = []
    for other in ("stock", "dualpipev"):
        gains = gains_on(other, [row for row in rows if row["mbit"] is None], "micro_batches")
        if gains:
            found.append(
                {
                    "against": other,
                    "over": "micro_batches",
                    "predicted_zero": zero_of(gains, "predicted_gain_s"),
                    "measured_zero": zero_of(gains, "measured_gain_s"),
                    "agrees": agrees(gains),
                    "gains": gains,
                }
            )
    return found


def over_links(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Down to which rate ``multidirection`` is faster, for each number of micro-batches that was measured."""
    found = []
    limited = [row for row in rows if row["mbit"] is not None]
    for count, other in product(dict.fromkeys(row["micro_batches"] for row in limited), ("1f1b", KFKB)):
        gains = gains_on(other, [row for row in limited if row["micro_batches"] == count], "mbit")
        if not gains:
            continue
        found.append(
            {
                "against": other,
                "over": "mbit",
                "micro_batches": count,
                "agrees": agrees(gains),
                "gains": gains,
            }
        )
    return found


def gains_on(other: str, rows: Sequence[dict[str, Any]], by: str) -> list[dict[str, float]]:
    """What ``multidirection`` gains on another contestant, by a column. ``kfkb``: on the fastest of them."""
    ours = {row[by]: row for row in rows if row["contestant"] == "multidirection"}
    theirs: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["contestant"] == other or (other == KFKB and row["contestant"].startswith(KFKB)):
            theirs.setdefault(row[by], []).append(row)
    found = []
    for value in sorted(theirs):
        other_s = {key: min(row[key] for row in theirs[value]) for key in ("predicted_s", "step_s")}
        gain_s = {key: round(step_s - ours[value][key], 4) for key, step_s in other_s.items()}
        is_close = abs(gain_s["predicted_s"]) < CLOSE * other_s["predicted_s"]
        gains = {"predicted_gain_s": gain_s["predicted_s"], "measured_gain_s": gain_s["step_s"]}
        found.append({by: value, **gains, "is_close": is_close})
    return found


def agrees(gains: Sequence[dict[str, float]]) -> bool:
    """Whether the one that is predicted to be faster was, wherever one clearly is."""
    return all(
        (gain["predicted_gain_s"] > 0) == (gain["measured_gain_s"] > 0) for gain in gains if not gain["is_close"]
    )


def zero_of(gains: Sequence[dict[str, float]], key: str) -> float | None:
    """Micro-batches of a step with which the gain would be nothing, if it changed by as much with each."""
    if len(gains) < 2:
        return None
    line = statistics.linear_regression([gain["micro_batches"] for gain in gains], [gain[key] for gain in gains])
    return round(-line.intercept / line.slope, 1) if line.slope < 0 else None


if __name__ == "__main__":
    main()
