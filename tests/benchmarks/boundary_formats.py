"""What rounding at the boundaries costs: held-out losses of training with each format beside that without one.

    python tests/benchmarks/boundary_formats.py [--formats int8 int4] [--seeds 1 2 3] [--tasks fine-tune scratch]

The main job, on four CPU ranks with a stage each, activations and their gradients in the same format; without one on
one rank, which computes what any number of stages does. A small Llama learns the code of the standard library's modules
from scratch, and is fine-tuned on its docstrings from what one such run has learned. A seed is an order of the samples,
and from scratch the weights it begins with; it is the same for all formats. Runs that are in ``--work`` are not
repeated. Data and model are those of ``staleness.py``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from pathlib import Path
from typing import Any

from facts import facts
from staleness import DONE, ROOT, STAGES, base_command, base_flags, curves, is_done, job, run, write_texts

EXACT = "exact"
TASKS = ("fine-tune", "scratch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of fine-tuning")
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--base-learning-rate", type=float, default=6e-3, help="from scratch")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument("--eval-samples", type=int, default=256)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "boundary_formats", help="where the runs are kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    write_texts(args.work)
    base = base_command(args)
    commands = {"base": shlex.join(base)}
    if not is_done(args.work / "base", base):
        for mark in args.work.glob(f"fine-tune*/{DONE}"):  # of what was made of another base
            mark.unlink()
    run(args.work, "base", base)
    arms = [EXACT, *args.formats]
    found: dict[str, dict[str, dict[str, Any]]] = {task: {arm: {} for arm in arms} for task in args.tasks}
    for seed in args.seeds:
        for task in args.tasks:
            for arm in arms:
                name, command = f"{task}_{arm}-{seed}", command_of(args, task, arm, seed)
                commands.setdefault(f"{task}_{arm}", shlex.join(command))
                folder = run(args.work, name, command)
                found[task][arm][str(seed)] = curves(folder) | errors(folder)
                print(f"{name}: {found[task][arm][str(seed)]['held_out_loss'][-1]:.4f}", flush=True)
    result = {
        "final": {task: {arm: final(of_arms, arm) for arm in arms} for task, of_arms in found.items()},
        "tasks": found,
        "commands": commands,
        **facts(args, "work"),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["final"], indent=2))


def command_of(args: argparse.Namespace, task: str, arm: str, seed: int) -> list[str]:
    pipeline: dict[str, Any] = {"stages": 1}
    if arm != EXACT:
        pipeline = {"stages": STAGES, "boundary": {"forward": arm, "backward": arm}}
    name = f"{task}_{arm}-{seed}"
    if task == "scratch":
        return job(args, name, "code", pipeline, base_flags(args) | {"seed": seed})
    flags = {"model_name_or_path": "base", "seed": seed, "max_steps": args.steps, "learning_rate": args.learning_rate}
    return job(args, name, "docstrings", pipeline, flags)


def errors(folder: Path) -> dict[str, Any]:
    """Relative errors of the boundaries in the last report; none without formats."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [line["boundary_error"] for line in lines if "boundary_error" in line]
    return {"boundary_error": told[-1]} if told else {}


def final(arms: dict[str, dict[str, Any]], arm: str) -> dict[str, Any]:
    """Held-out loss at the end, and by how much it is above that of exact training with the same seeds."""
    losses = {seed: found["held_out_loss"][-1] for seed, found in arms[arm].items()}
    exact = {seed: found["held_out_loss"][-1] for seed, found in arms[EXACT].items()}
    shares = {seed: round(100 * (loss / exact[seed] - 1), 3) for seed, loss in losses.items()}
    mean = 100 * (statistics.mean(losses.values()) / statistics.mean(exact.values()) - 1)
    return {"held_out_loss": losses, "above_exact_percent": shares, "mean_above_exact_percent": round(mean, 3)}


if __name__ == "__main__":
    main()
