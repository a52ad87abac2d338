"""Experts that follow the load, against stock AutoEP: emulated expert compute, routing of a recorded run, lab hosts.

    python tests/benchmarks/expert_placement.py [--cases trace balanced slow] [--samples 5] [--output FILE]

Needs root (tests/lab), about eight minutes, and a machine that does nothing else: what Python takes on few cores counts
in every step. A quick look: ``--samples 3 --every 5 --rounds 2``.

A tiny Qwen3-MoE trains under AutoEP, an expert-parallel rank a host. Its tokens go to experts as those of the trace
did (tests/lab/expert_trace.json), its experts take the time of their rows (tests/lab/experts.py). A sample of the trace
holds for ``--every`` steps, and as often our engine looks for better placements: at a look it knows only the sample
that is over. All contestants live in the same processes and take turns, a sample each.

* ``trace``: stock; ``placement``: experts change their rank; ``even``, ``fresh``: besides, a copy of an expert a rank.
* ``balanced``: every expert gets as many tokens: nothing is to be gained.
* ``slow``: large experts and slow links, where moving them takes as long as many steps.

The bound is on these very steps. Without copies no placement gives the most loaded rank fewer rows than
``planning.placement.lower_bound``; with copies none gives it fewer than the mean. ``of_bound`` is what was gained of
what the bound allows: (stock - ours) / (stock - bound), with bound = stock * (1 - f + f / b) for the share f of a step
that the most loaded rank's experts take in stock, as measured, and the factor b by which the bound shortens them. Steps
count from the first look on, before which ours is stock; looks and moves are in them. ``of_bound_typical`` takes the
median step of each sample instead, where looks and moves do not show; ``of_bound_all_steps`` counts all steps but the
first one, which makes connections. ``expert_time_of_bound`` is the same of the experts' time alone: what is lost there
is lost to loads that have changed since the look, what is lost beyond to what our steps take besides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.experts import ExpertEmulation, read_trace, train_experts
from lab.hosts import Hosts, available
from paceline.planning.placement import Placement, device_loads, lower_bound

Record = dict[str, Any]

SECTIONS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "placement": {},
    "even": {"replicas": 1},
    "fresh": {"replicas": 1, "splitting": "fresh"},
}
"""Contestants, with what they have in ``paceline.moe`` beside ``rebalance_every``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=5, help="trace: of the recorded routing, in a row")
    parser.add_argument("--every", type=int, default=10, help="steps of a sample, and between looks")
    parser.add_argument("--row-s", type=float, default=2.6e-4, help="seconds of a row in an expert's forward")
    parser.add_argument("--tokens", type=int, default=128, help="of a rank in a step")
    parser.add_argument("--intermediate", type=int, default=128, help="width of an expert")
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2))
    parser.add_argument("--mbit", type=float, default=1000.0, help="Mbit/s of every host")
    parser.add_argument("--rounds", type=int, default=4, help="balanced: turns of each contestant")
    parser.add_argument("--slow-samples", type=int, default=4, help="slow: as --samples")
    parser.add_argument("--slow-mbit", type=float, default=25.0, help="slow: Mbit/s of every host")
    parser.add_argument("--slow-intermediate", type=int, default=512, help="slow: width of an expert")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    result: dict[str, Any] = {"emulated_compute": True}
    for name in args.cases:
        result[name] = CASES[name](args)
        print(name, json.dumps(result[name], indent=2), flush=True)
    result |= facts(args)
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def trace(args: argparse.Namespace, *, slow: bool = False) -> dict[str, Any]:
    """Routing that is skewed and drifts."""
    labels = ["stock", "placement"] if slow else list(SECTIONS)
    samples = read_trace()[: args.slow_samples if slow else args.samples]
    emulation = _emulation(args, samples, args.slow_intermediate if slow else args.intermediate)
    records = _run(args, labels, emulation, args.slow_mbit if slow else args.mbit)
    found = {label: _compared(records, label, emulation, args) for label in labels[1:]}
    stock = [r for r in records if r["contestant"] == "stock"]
    return {
        "stock_step_s": round(statistics.median(r["seconds"] for r in stock if r["step"] >= args.every), 4),
        **found,
        "largest_loss_difference": _loss_difference(records),
    }


def balanced(args: argparse.Namespace) -> dict[str, Any]:
    """Nothing to gain, and nothing to pay."""
    shape = read_trace()[0]
    even = [[[1] * len(layer) for layer in shape]] * args.rounds
    emulation = _emulation(args, even, args.intermediate)
    labels = ["stock", "placement", "fresh"]
    records = _run(args, labels, emulation, args.mbit)
    found: dict[str, Any] = {}
    for label in labels[1:]:
        # In the first round connections are made.
        turns = [[_seconds(records, who, number) for number in range(1, args.rounds)] for who in (label, "stock")]
        ratios = [statistics.median(own) / statistics.median(stock) for own, stock in zip(*turns, strict=True)]
        means = [statistics.mean(s for turn in whose for s in turn) for whose in turns]
        found[label] = {
            "step_s": round(statistics.median(s for turn in turns[0] for s in turn), 4),
            "times_stock": round(statistics.median(ratios), 4),
            "times_stock_of_rounds": [round(ratio, 4) for ratio in ratios],
            "times_stock_with_looks": round(means[0] / means[1], 4),
            "moves": _moves(records, label),
        }
    return {**found, "largest_loss_difference": _loss_difference(records)}


CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "trace": trace,
    "balanced": balanced,
    "slow": partial(trace, slow=True),
}


def _emulation(args: argparse.Namespace, samples: Sequence[Any], intermediate: int) -> ExpertEmulation:
    return ExpertEmulation(
        tuple(tuple(map(tuple, sample)) for sample in samples),
        row_s=args.row_s,
        num_tokens=args.tokens,
        steps_a_sample=args.every,
        intermediate=intermediate,
        zero=args.zero,
    )


def _run(args: argparse.Namespace, labels: Sequence[str], emulation: ExpertEmulation, mbit: float) -> list[Record]:
    contestants = {
        label: None if (section := SECTIONS[label]) is None else {"rebalance_every": args.every, **section}
        for label in labels
    }
    with Hosts(args.hosts, mbit=mbit) as hosts:
        return train_experts(hosts, contestants, emulation)


def _compared(
    records: Sequence[Record], label: str, emulation: ExpertEmulation, args: argparse.Namespace
) -> dict[str, Any]:
    """One contestant against stock and against the bound."""
    stock, own = ([r for r in records if r["contestant"] == who] for who in ("stock", label))
    has_copies = bool((SECTIONS[label] or {}).get("replicas"))
    bounds = [
        [
            _times_bound(emulation.rows(sample, layer, args.hosts), args.hosts, has_copies)
            for layer in range(emulation.num_layers)
        ]
        for sample in range(len(emulation.tokens))
    ]

    def bound_s(record: Record) -> float:
        """Of the step's expert time at the bound."""
        factors = bounds[emulation.sample(record["step"])]
        return sum(seconds / factor for seconds, factor in zip(_layer_s(record), factors, strict=True))

    def part(first: int, mean: Callable[[Sequence[Record], Callable[[Record], float]], float]) -> dict[str, float]:
        stocks, owns = ([r for r in whose if r["step"] >= first] for whose in (stock, own))
        stock_s, own_s = (mean(whose, lambda r: float(r["seconds"])) for whose in (stocks, owns))
        experts_s, at_bound_s = mean(stocks, _expert_s), mean(stocks, bound_s)
        return {
            "share": experts_s / stock_s,
            "bound": experts_s / at_bound_s,
            "of_bound": (stock_s - own_s) / (experts_s - at_bound_s),
            "times_stock": stock_s / own_s,
            "experts_of_bound": (experts_s - mean(owns, _expert_s)) / (experts_s - at_bound_s),
        }

    def mean_of_samples(whose: Sequence[Record], value: Callable[[Record], float]) -> float:
        by_sample: dict[int, list[float]] = {}
        for record in whose:
            by_sample.setdefault(emulation.sample(record["step"]), []).append(value(record))
        return statistics.mean(map(statistics.median, by_sample.values()))

    def mean_of_steps(whose: Sequence[Record], value: Callable[[Record], float]) -> float:
        return statistics.mean(map(value, whose))

    whole, typical = part(args.every, mean_of_steps), part(args.every, mean_of_samples)
    moves = _moves(records, label)
    # Where only copies change nothing is moved: their values are fetched in every step.
    ratios = [move["predicted_times_measured"] for move in moves if move["num_bytes"]]
    return {
        "step_s": round(statistics.median(r["seconds"] for r in own if r["step"] >= args.every), 4),
        "expert_share_of_stock": round(whole["share"], 4),
        "bound_times_experts": round(whole["bound"], 4),
        "times_stock": round(whole["times_stock"], 4),
        "of_bound": round(whole["of_bound"], 4),
        "of_bound_typical": round(typical["of_bound"], 4),
        "of_bound_all_steps": round(part(1, mean_of_steps)["of_bound"], 4),
        "expert_time_of_bound": round(whole["experts_of_bound"], 4),
        "stays": _stays(records, label),
        "moves": moves,
        "predicted_times_measured_range": [min(ratios), max(ratios)] if ratios else None,
    }


def _times_bound(rows: Sequence[int], num_ranks: int, has_copies: bool) -> float:
    """The most loaded rank's rows in order, over the fewest that it could have."""
    fixed = max(device_loads(Placement.contiguous(len(rows), num_ranks), rows))
    fewest = sum(rows) / num_ranks if has_copies else lower_bound(rows, num_ranks, len(rows) // num_ranks)
    return fixed / fewest


def _layer_s(record: Record) -> list[float]:
    """What each layer's experts took on the rank where they took the longest."""
    return [max(ranks) for ranks in record["expert_s"]]


def _expert_s(record: Record) -> float:
    return sum(_layer_s(record))


def _moves(records: Sequence[Record], label: str) -> list[dict[str, Any]]:
    """Of one contestant: when, what, how long it took and was expected to take."""
    return [
        {
            "step": decision["step"],
            "experts": decision["moved"],
            "num_bytes": decision["num_bytes"],
            "predicted_s": round(decision["switch_s"], 4),
            "measured_s": round(decision["seconds"], 4),
            "predicted_times_measured": round(decision["switch_s"] / decision["seconds"], 3),
            "suffered_before_s": round(decision["suffered_s"], 3),
        }
        for record in records
        if record["contestant"] == label
        for decision in record["decisions"]
        if decision["switched"]
    ]


def _stays(records: Sequence[Record], label: str) -> list[dict[str, Any]]:
    """Of one contestant, when experts were left where they were, and why."""
    return [
        {"step": decision["step"], "why": decision["why"]}
        for record in records
        if record["contestant"] == label
        for decision in record["decisions"]
        if not decision["switched"]
    ]


def _seconds(records: Sequence[Record], label: str, number: int) -> list[float]:
    """Of the steps of one turn."""
    return [r["seconds"] for r in records if r["contestant"] == label and r["round"] == number]


def _loss_difference(records: Sequence[Record]) -> float:
    """Between any contestant and stock in the same step: sums over copies are taken in another order."""
    losses = {r["step"]: r["loss"] for r in records if r["contestant"] == "stock"}
    return max(abs(r["loss"] - losses[r["step"]]) for r in records)


if __name__ == "__main__":
    main()
