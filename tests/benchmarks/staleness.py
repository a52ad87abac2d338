"""What late gradients cost: the held-out loss of asynchronous fine-tuning beside that of synchronous fine-tuning.

    python tests/benchmarks/staleness.py [--arms 1f1b multidirection+nesterov 1f1b@3 one_direction@3] [--seeds 1 2]

The main job, on four CPU ranks: a small Llama learns the code of the standard library's modules from scratch, and is
then fine-tuned on the docstrings of the standard library, once for every arm and seed. An arm is a schedule, with
``+warm_in``, ``+nesterov`` or ``+error_feedback`` what makes up for late gradients, with ``@3`` three times the
learning rate. ``1f1b`` arms run on one stage, which computes what any number of stages does; with a correction they are
the controls: the same correction where no gradient is late. A seed is an order of the samples, the same for all arms.
Runs that are in ``--work`` are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facts import facts

from paceline.data import standard_library

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES, MICRO_BATCHES, EVAL_BATCH = 4, 8, 8
SYNCHRONOUS, ONE_DIRECTION = "1f1b", "one_direction"
COLOURS = {
    SYNCHRONOUS: "black",
    SYNCHRONOUS + "+error_feedback": "#f0c000",
    "multidirection": "#0072b2",
    "multidirection+warm_in": "#56b4e9",
    "multidirection+nesterov": "#009e73",
    "multidirection+error_feedback": "#cc79a7",
    "one_direction": "#d55e00",
    "one_direction+warm_in": "#e69f00",
    "one_direction+error_feedback": "#777777",
}
"""Of all arms that there are."""
RATES = ("", "@3", "@10")
"""The first is the learning rate of ``--learning-rate``; the base model's own was tuned to six times that."""
ARMS = [arm + rate for rate in RATES for arm in COLOURS if not arm.endswith(("+warm_in", "+nesterov"))]
DONE = "command"
"""In the folder of each run that has ended well."""
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", default=ARMS, help="for each rate 1f1b too, for comparison")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-in-steps", type=int, default=50, help="of arms with +warm_in")
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--base-learning-rate", type=float, default=6e-3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=50, help="steps; each evaluation flushes the pipeline")
    parser.add_argument("--eval-samples", type=int, default=256)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "staleness", help="where the runs are kept")
    parser.add_argument("--report-only", action="store_true", help="on the runs in --work, whatever is missing")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="and a picture, .svg")
    args = parser.parse_args()
    for arm in args.arms:
        if arm.partition("@")[0] not in COLOURS:
            parser.error(f"--arms {arm}: choose from {', '.join(COLOURS)}, each with @FACTOR for another rate")
        if _reference(arm) not in args.arms:
            parser.error(f"--arms {arm}: it is compared to {_reference(arm)}, which has to be there too")
    args.work.mkdir(parents=True, exist_ok=True)
    write_texts(args.work)
    command = base_command(args)
    commands = {"base": shlex.join(command)}
    if not is_done(args.work / "base", command):
        for mark in args.work.glob(f"*/{DONE}"):  # of what was made of another base
            mark.unlink()
    run(args.work, "base", command)
    arms: dict[str, dict[str, Any]] = {arm: {} for arm in args.arms}
    for seed in args.seeds:
        for arm in args.arms:
            command = arm_command(args, arm, seed)
            if args.report_only and not is_done(args.work / f"{arm}-{seed}", command):
                continue
            commands.setdefault(arm, shlex.join(command))
            arms[arm][str(seed)] = found = curves(run(args.work, f"{arm}-{seed}", command))
            print(f"{arm} seed {seed}: {found['held_out_loss'][-1]:.4f}", flush=True)
    arms = {arm: runs for arm, runs in arms.items() if runs}
    result = {
        "base_held_out_loss": curves(args.work / "base")["held_out_loss"][-1],
        "final": {arm: final(arms, arm) for arm in arms},
        "arms": arms,
        "schedules": {arm: schedule(args, arm) for arm in arms},
        "commands": commands,
        **facts(args, "work", "report_only"),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["final"], indent=2))
    draw(result, args.output.with_suffix(".svg"))


# -- data ---------------------------------------------------------------------------------------------------------


def write_texts(work: Path) -> None:
    """Code without a word about it, and words without code; of each, files that are held out."""
    modules = standard_library.source_files()
    root = modules[0].parent
    library = [p for p in sorted(root.rglob("*.py")) if not NOT_THE_LIBRARY & set(p.relative_to(root).parts)]
    for name, paths, text_of in (("code", modules, code), ("docstrings", library, docstrings)):
        for part, chosen in zip(("train", "held_out"), standard_library.split(paths, 10), strict=True):
            texts = [text for path in chosen if (text := text_of(path))]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            file = work / f"{name}_{part}.jsonl"
            if not file.exists() or file.read_text() != lines:
                file.write_text(lines)


def code(path: Path) -> str:
    """A module without comments and docstrings."""
    tree = _tree(path)
    for node in _documented(tree):
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) if tree.body else ""


def docstrings(path: Path) -> str:
    return "\n\n".join(ast.get_docstring(node) or "" for node in _documented(_tree(path)))


def _documented(tree: ast.Module) -> Iterator[Any]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node))


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates, and examples of what cannot be parsed
        return ast.Module([], [])


# -- runs ---------------------------------------------------------------------------------------------------------


def base_command(args: argparse.Namespace) -> list[str]:
    return job(args, "base", "code", {"stages": 1}, base_flags(args))


def base_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Of a run from scratch."""
    size = args.hidden_size
    overrides = (
        f"hidden_size={size},intermediate_size={3 * size},num_hidden_layers={STAGES},num_attention_heads=4,"
        f"num_key_value_heads=4,max_position_embeddings={args.block_size},initializer_range=0.08"
    )
    flags = {"model_type": "llama", "config_overrides": overrides, "adam_beta2": 0.95, "seed": 0}
    return flags | {"max_steps": args.base_steps, "learning_rate": args.base_learning_rate}


def arm_command(args: argparse.Namespace, arm: str, seed: int) -> list[str]:
    factor = float(arm.partition("@")[2] or 1)
    flags = {"model_name_or_path": "base", "seed": seed}
    flags |= {"max_steps": args.steps, "learning_rate": factor * args.learning_rate}
    pipeline = {"stages": 1 if arm.startswith(SYNCHRONOUS) else STAGES, "schedule": schedule(args, arm)}
    return job(args, f"{arm}-{seed}", "docstrings", pipeline, flags)


def schedule(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """The section of the configuration."""
    kind, _, help_with = arm.partition("@")[0].partition("+")
    if kind == SYNCHRONOUS and help_with:
        kind = ONE_DIRECTION  # of a single stage, where nothing is late
    helps = {"": {}, "warm_in": {"warm_in_steps": args.warm_in_steps}}
    own = {"staleness": 1} if kind == "multidirection" else {}
    return {"type": kind, **own, **helps.get(help_with, {"correction": help_with})}


def job(args: argparse.Namespace, name: str, text: str, pipeline: dict[str, Any], flags: dict[str, Any]) -> list[str]:
    """The main job, to be run in the folder of the runs.

    Args:
        name: of its folder, with ``-SEED`` at the end where there are several.
        pipeline: the section of the configuration.
    """
    config = json.loads((ROOT / "ds_configs" / "pp4.json").read_text())
    config["paceline"]["pipeline"] |= pipeline
    (args.work / f"{name.rpartition('-')[0] or name}.json").write_text(json.dumps(config, indent=2) + "\n")
    flags = {
        "train_file": f"{text}_train.jsonl",
        "validation_file": f"{text}_held_out.jsonl",
        "max_eval_samples": args.eval_samples,
        "block_size": args.block_size,
        "per_device_train_batch_size": args.micro_batch_size,
        "per_device_eval_batch_size": EVAL_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": args.warmup_steps,
        "logging_steps": 10,
        "eval_steps": args.eval_every,
        "save_strategy": "no",
        "disable_tqdm": True,
        "overwrite_output_dir": True,
        "output_dir": name,
        "deepspeed": f"{name.rpartition('-')[0] or name}.json",
        **flags,
    }
    start = ["deepspeed", "--num_gpus", str(pipeline["stages"]), "--module", "paceline.launch.finetune"]
    return [*start, *(part for flag, value in flags.items() for part in (f"--{flag}", str(value)))]


def run(work: Path, name: str, command: Sequence[str]) -> Path:
    """The folder that the job wrote, now or earlier; what it says is in a ``.log`` beside."""
    folder = work / name
    if is_done(folder, command):
        return folder
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The script `deepspeed` may belong to another Python.
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port), *command[1:]]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (work / f"{name}.log").open("a") as log:  # what went wrong earlier is kept
        ended = subprocess.run(launcher, cwd=work, env=environment, stdout=log, stderr=log, check=False)
    if ended.returncode:
        sys.exit(f"{name} ended with {ended.returncode}: see {log.name}")
    (folder / DONE).write_text(shlex.join(command))
    return folder


def is_done(folder: Path, command: Sequence[str]) -> bool:
    mark = folder / DONE
    return mark.exists() and mark.read_text() == shlex.join(command)


def curves(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if "eval_loss" in line]
    trained = [line for line in lines if "loss" in line]
    return {
        "held_out_steps": [line["step"] for line in held_out],
        "held_out_loss": [round(line["eval_loss"], 5) for line in held_out],
        "train_steps": [line["step"] for line in trained],
        "train_loss": [round(line["loss"], 5) for line in trained],
        "skipped_steps": trained[-1]["skipped_steps"],
    }


# -- result -------------------------------------------------------------------------------------------------------


def final(arms: dict[str, dict[str, Any]], arm: str) -> dict[str, Any]:
    """Held-out loss at the end, and by how much it is above that of synchronous training with the same seeds."""
    losses = {seed: found["held_out_loss"][-1] for seed, found in arms[arm].items()}
    found: dict[str, Any] = {"held_out_loss": losses, "mean": round(statistics.mean(losses.values()), 5)}
    reference = arms.get(_reference(arm))
    if reference is not None and arm != _reference(arm):
        of_seeds = {seed: loss / reference[seed]["held_out_loss"][-1] - 1 for seed, loss in losses.items()}
        found["above_synchronous_percent"] = {seed: round(100 * share, 3) for seed, share in of_seeds.items()}
        of_mean = found["mean"] / statistics.mean(reference[seed]["held_out_loss"][-1] for seed in losses) - 1
        found["mean_above_synchronous_percent"] = round(100 * of_mean, 3)
    return found


def _reference(arm: str) -> str:
    return "".join([SYNCHRONOUS, *arm.partition("@")[1:]])


def draw(result: dict[str, Any], path: Path) -> None:
    """Above the held-out loss, mean and range of the seeds; below how far each seed is from its synchronous run."""
    import matplotlib
    from matplotlib.figure import Figure

    factors = list(dict.fromkeys(arm.partition("@")[2] for arm in result["arms"]))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "paceline", "svg.fonttype": "none", "font.size": 8})
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        panels = figure.subplots(2, len(factors), sharex=True, squeeze=False, height_ratios=(3, 2))
        for (top, bottom), factor in zip(panels.T, factors, strict=True):
            arms = {arm: runs for arm, runs in result["arms"].items() if arm.partition("@")[2] == factor}
            rate = result["settings"]["learning_rate"] * float(factor or 1)
            top.set_title(f"learning rate {rate:g}", loc="left", fontsize=9)
            _lines(top, arms, None)
            _lines(bottom, arms, arms[_reference(next(iter(arms)))])
            bottom.axhspan(-1, 1, color="#eeeeee", zorder=0)
            bottom.set_xlabel("step")
            top.legend(frameon=False)
        panels[0][0].set_ylabel("held-out loss")
        panels[1][0].set_ylabel("above synchronous, %")
        for axes in panels.flat:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _lines(axes: Axes, arms: dict[str, Any], reference: dict[str, Any] | None) -> None:
    for arm, runs in arms.items():
        if reference is runs:
            continue
        label = arm.partition("@")[0]
        values = {seed: found["held_out_loss"] for seed, found in runs.items()}
        if reference is not None:
            values = {
                seed: [100 * (a / b - 1) for a, b in zip(losses, reference[seed]["held_out_loss"], strict=True)]
                for seed, losses in values.items()
            }
        steps = next(iter(runs.values()))["held_out_steps"]
        at_steps = list(zip(*values.values(), strict=True))
        low, mean, high = ([of(at) for at in at_steps] for of in (min, statistics.mean, max))
        axes.plot(steps, mean, color=COLOURS[label], linewidth=1.2, label=label)
        axes.fill_between(steps, low, high, color=COLOURS[label], alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
