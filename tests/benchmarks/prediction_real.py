"""How well a step is predicted where layers really compute: simulated against measured seconds, ranks sharing cores.

    OMP_NUM_THREADS=1 python tests/benchmarks/prediction_real.py [--ranks 2 4] [--rounds 6]

Nothing sleeps: a Llama of random weights trains as a pipeline of as many CPU processes as there are stages, more of
them than cores too. Schedules take turns, a few steps each. From what the tuner would know after such a turn it
predicts a step of the schedule that ran ("itself": compared with the mean of the steps that were looked at) and of the
others ("others": compared with the mean of their steps in the same round). An error is the median over the rounds. The
emulated counterpart, with limited links, is `prediction.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from support.ranks import run_ranks

SETTLING = 1
"""Steps after a change that do not count."""


@dataclass(frozen=True)
class Model:
    """A Llama by its shape, and the samples of a step."""

    layers: int
    hidden: int
    length: int
    micro_batches: int
    micro_batch_size: int
    compiles: bool
    """Layers, through torch.compile."""
    recomputes: bool
    """All layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="stages, one a process")
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "kfkb2", "gpipe"], help="also zbh1, zbh2, whose backwards are split"
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each schedule, after one that does not count")
    parser.add_argument("--steps", type=int, default=6, help="of a turn; a recorder keeps 8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="the layers")
    parser.add_argument("--recompute", action="store_true", help="the layers, in the backward")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    shape = args.layers, args.hidden, args.length, args.micro_batches, args.micro_batch_size
    model = Model(*shape, compiles=args.compile, recomputes=args.recompute)
    rows = []
    for num_ranks in args.ranks:
        looks = run_ranks(train, num_ranks, model, args.schedules, args.rounds, args.steps, timeout=3600)[0]
        rows += [{"ranks": num_ranks, **row} for row in compared(looks, args.schedules)]
    errors = {
        whom: [abs(row["error"]) for row in rows if (row["from"] == row["schedule"]) == (whom == "itself")]
        for whom in ("itself", "others")
    }
    result = {
        "emulated_compute": False,
        "median_error": {whom: round(statistics.median(found), 4) for whom, found in errors.items() if found},
        "worst_error": {whom: round(max(found), 4) for whom, found in errors.items() if found},
        "predictions": rows,
        "load_average_at_end": [round(value, 1) for value in os.getloadavg()],
        **facts(args),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(json.dumps(row))
    print(f"median error {result['median_error']}, worst {result['worst_error']}")


def compared(looks: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The median over the rounds of what each schedule's steps tell of each."""
    rows = []
    for source in names:
        for target in names:
            ratios, measured = [], []
            for look in looks:
                if look["schedule"] == source:
                    others = [other for other in looks if other["round"] == look["round"]]
                    seconds = next(other["measured_s"] for other in others if other["schedule"] == target)
                    ratios.append(look["predicted_s"][target] / seconds)
                    measured.append(seconds)
            rows.append(
                {
                    "from": source,
                    "schedule": target,
                    "measured_s": round(statistics.median(measured), 4),
                    "error": round(statistics.median(ratios) - 1, 4),
                    "errors": [round(ratio - 1, 3) for ratio in ratios],
                }
            )
    return rows


def train(model: Model, names: list[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Every turn of a schedule: its mean step, and what its steps predict of all. The first rank's counts."""
    import torch
    from transformers import LlamaConfig

    import paceline
    from paceline.runtime.measured_costs import MeasuredCosts
    from paceline.schedules.simulate import simulate

    stages = int(os.environ["WORLD_SIZE"])
    heads = model.hidden // 64
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=4 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=1024,
        max_position_embeddings=model.length,
        tie_word_embeddings=False,
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": model.micro_batch_size,
        "gradient_accumulation_steps": model.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**6,
        "pipeline": {"activation_checkpoint_interval": int(model.recomputes)},
        "paceline": {"pipeline": {"stages": stages, "compile": model.compiles}},
    }
    engine, *_ = paceline.initialize(model=config, config=ds_config)
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(1024, (model.micro_batches, model.micro_batch_size, model.length), generator=drawn)
    schedules = {name: schedule_of(name, stages, model.micro_batches) for name in names}
    measured_costs, after = MeasuredCosts((tuple(range(stages)),)), dict[Any, int]()
    looks: list[dict[str, Any]] = []

    def turn(number: int) -> None:
        for _ in range(number):
            engine.train_batch(iter([{"input_ids": each, "labels": each} for each in ids]))

    for index in range(rounds + 1):
        for name, schedule in schedules.items():
            engine.set_schedule(schedule)
            turn(SETTLING)
            engine.meter.recorder.forget()
            turn(steps)
            reports = engine.reports.gather(after)
            engine.meter.recorder.forget()
            if engine.global_rank == 0:
                measured_costs.update(reports)
                costs = measured_costs.costs(engine.cut)
                walls = [
                    step.ended_s - step.begun_s for report in reports for step in report.steps if not report.device
                ]
                predicted = {other: simulate(schedules[other], costs).makespan_s for other in names}
                look = {"schedule": name, "measured_s": statistics.mean(walls), "predicted_s": predicted}
                looks += [{"round": index, **look}] if index else []
    engine.destroy()
    return looks


def schedule_of(name: str, stages: int, micro_batches: int) -> Any:
    from paceline.schedules.families import gpipe, kfkb
    from paceline.schedules.split_families import SPLIT_FAMILIES

    if name in SPLIT_FAMILIES:
        return SPLIT_FAMILIES[name](stages, micro_batches)
    if name == "gpipe":
        return gpipe(stages, micro_batches)
    return kfkb(stages, micro_batches, 1 if name == "1f1b" else int(name.removeprefix("kfkb")))


if __name__ == "__main__":
    main()
