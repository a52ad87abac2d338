"""Output of ``paceline plan``: the ranking with its reasons, and DeepSpeed JSON files to start."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.messages import aligned
from paceline.report.metrics import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.hf.model_workload import Shape
    from paceline.planning.cluster import Cluster
    from paceline.planning.strategy import Plan, Ranking

GIB = 2**30
JOB = "paceline.launch.finetune"
REBALANCE_EVERY = 50
"""Rebalancing interval in steps: the job's own default, written for people to see."""
PATCHED = "paceline.launch.patched YOUR_TRAINER_SCRIPT.py"


def facts(args: argparse.Namespace, config: Any, shape: Shape, cluster: Cluster, ranking: Ranking) -> dict[str, Any]:
    """The ranking, for a JSON: the best K, and the best that can run (as many, if they are to be written).

    Args:
        config: of the model, as transformers has it.
    """
    here = devices_here()
    obstacles = _obstacles(config, ranking.plans, half_layers=shape.half_layers)
    can_run = [rank for rank, obstacle in enumerate(obstacles) if obstacle is None]
    can_run = can_run[: args.top if args.write is not None else 1]
    shown = sorted({*range(min(args.top, len(obstacles))), *can_run})
    return {
        "model_type": config.get_text_config().model_type,
        "cluster": cluster.to_dict(),
        "devices_here": here,
        **{name: getattr(shape, name) for name in ("train_batch_size", "micro_batch_size", "sequence_length")},
        "dtype": str(shape.dtype).removeprefix("torch."),
        "zero": args.zero,
        "gradient_checkpointing": args.gradient_checkpointing,
        "half_layers": shape.half_layers,
        "measured": args.profile is not None,
        "loads_are_assumed": args.loads is None and not args.worst_routing,
        "strategies": len(ranking.plans) + len(ranking.dropped),
        "dropped": ranking.num_dropped,
        "why_dropped": [
            {"name": dropped.name, "reason": dropped.reason, "why": dropped.text} for dropped in ranking.dropped
        ],
        "plans": [{"rank": 1 + rank, **_plan_facts(ranking.plans[rank], obstacles[rank], here)} for rank in shown],
    }


def _plan_facts(plan: Plan, obstacle: str | None, here: int) -> dict[str, Any]:
    from paceline.planning.strategy_shape import ONE_F_ONE_B

    strategy = plan.strategy
    needs = f"needs {strategy.num_devices} devices, there are {here}" if strategy.num_devices > here else None
    return {
        "name": plan.name,
        **strategy._asdict(),
        **({} if plan.schedule == ONE_F_ONE_B else {"schedule": plan.schedule.to_dict()}),
        "expert_data": strategy.expert_data,
        "micro_batches": plan.micro_batches,
        "boundaries": list(plan.boundaries),
        "head_slices": plan.head_slices,
        "step_s": plan.step_s,
        "terms": dict(plan.terms),
        "simulated": plan.simulated,
        "gradient_checkpointing": plan.recomputes,
        "recomputed": list(plan.recomputed_of_stages),
        "memory_gib": max(stage.total for stage in plan.memory) / GIB,
        "runs": obstacle is None,
        "runs_here": obstacle is None and needs is None,
        "why_not": obstacle or needs,
        "file": None,
        "command": None,
    }


def _obstacles(config: Any, plans: Sequence[Plan], *, half_layers: bool) -> list[str | None]:
    """The reason why nothing here runs each plan; None if it runs."""
    from paceline.hf.weights import skeleton
    from paceline.moe.hf_experts import check_experts
    from paceline.runtime.module import has_experts

    model = skeleton(config)
    is_moe = has_experts(model)
    refused: dict[int, str | None] = {1: None}
    for size in {plan.strategy.expert for plan in plans} - {1}:
        try:
            check_experts(model, size)
            refused[size] = None
        except ValueError as error:
            refused[size] = f"not runnable here: {error}"
    found: list[str | None] = []
    for plan in plans:
        strategy = plan.strategy
        if strategy.tensor > 1 and is_moe:
            found.append("not runnable here: DeepSpeed's tensor parallelism does not cut experts")
        elif strategy.tensor > 1 and strategy.pipeline > 1:
            found.append(_not_sliced(model, plan, half_layers=half_layers))
        else:
            found.append(refused[strategy.expert])
    return found


def _not_sliced(model: Any, plan: Plan, *, half_layers: bool) -> str | None:
    """The reason why stages of ``model`` cannot have their layers in slices; None: they can."""
    from paceline.config import exclusion
    from paceline.config.exclusions import HALVES, NO_FLUSH, SLICED
    from paceline.hf.anatomy import anatomy_of
    from paceline.hf.sliced_layers import plan_of_slices

    for feature, is_there in ((HALVES, half_layers), (NO_FLUSH, not plan.schedule.flushes)):
        if is_there:
            return f"not runnable here: {exclusion(SLICED, feature).reason}"
    try:
        plan_of_slices(model, anatomy_of(model), plan.strategy.tensor)
    except ValueError as error:
        return f"not runnable here: {error}"
    return None


def ds_config(plan: Mapping[str, Any], shape: Shape, zero: int, *, rebalanced: bool = False) -> dict[str, Any]:
    """The DeepSpeed JSON of a plan of :func:`facts`: all that its prediction stands on. The rest is the command line's.

    Args:
        rebalanced: experts were predicted as they would be placed, so that the job has to place them.
    """
    import torch

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": shape.micro_batch_size,
        "gradient_accumulation_steps": plan["micro_batches"],
        "train_batch_size": shape.train_batch_size,
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {"stage": zero},
    }
    config |= precision(shape)
    if plan["tensor"] > 1:
        config["tensor_parallel"] = {"autotp_size": plan["tensor"]}
    if _is_for_a_trainer(plan):
        del config["train_batch_size"]  # DeepSpeed and the Trainer take all ranks for replicas when they check it
        if not torch.cuda.is_available():
            config["optimizer"]["params"]["torch_adam"] = True
        return config
    if plan["expert"] > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": plan["expert"]}
    pipeline: dict[str, Any] = {"stages": plan["pipeline"], "schedule": plan.get("schedule", "1f1b")}
    if plan["pipeline"] > 1:
        pipeline["partition"] = plan["boundaries"]
        if shape.half_layers:
            pipeline["half_layers"] = True
        if plan["head_slices"] > 1:
            pipeline["head_slices"] = plan["head_slices"]
    if sum(plan["recomputed"]) == _num_layers(plan, half_layers=shape.half_layers):
        config["pipeline"] = {"activation_checkpoint_interval": 1}
    elif plan["gradient_checkpointing"]:
        pipeline["recompute"] = plan["recomputed"]
    config["paceline"] = {"pipeline": pipeline}
    if rebalanced and plan["expert"] > 1:
        config["paceline"]["moe"] = {"rebalance_every": REBALANCE_EVERY, "replicas": 0}
    return config


def precision(shape: Shape) -> dict[str, Any]:
    """The part of a DeepSpeed JSON for the weights' type."""
    import torch

    sections = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return {sections[shape.dtype]: {"enabled": True}} if shape.dtype in sections else {}


def write(directory: Path, shown: dict[str, Any], args: argparse.Namespace, shape: Shape) -> None:
    """One JSON for each plan that can run, and ``plans.txt`` with all that was shown."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for plan in shown["plans"]:
            if plan["runs"]:
                path = directory / f"{plan['name']}.json"
                config = ds_config(plan, shape, args.zero, rebalanced=args.rebalanced)
                write_whole(path, json.dumps(config, indent=2) + "\n")
                plan["file"], plan["command"] = str(path), _command(plan, str(path), args, shown["cluster"])
        write_whole(directory / "plans.txt", text(shown) + "\n")
    except OSError as error:
        raise ValueError(f"--write {directory}: {error.strerror}; give a directory that can be written.") from None


def _is_for_a_trainer(plan: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's own engine runs a plan: tensor parallelism without a pipeline."""
    return bool(plan["tensor"] > 1 and plan["pipeline"] == 1)


def _command(plan: Mapping[str, Any], path: str, args: argparse.Namespace, cluster: Mapping[str, Any]) -> str:
    devices = plan["tensor"] * plan["pipeline"] * plan["data"]
    where = f"--num_gpus {devices}" if devices <= cluster["devices_per_node"] else "--hostfile HOSTFILE"
    module = PATCHED if _is_for_a_trainer(plan) else JOB
    command = f"deepspeed {where} --module {module} --deepspeed {shlex.quote(path)}"
    if not _is_for_a_trainer(plan):
        model = Path(args.model)
        folder = str(model.parent) if model.name == "config.json" and model.is_file() else args.model
        command += f" --model_name_or_path {shlex.quote(folder)}"
        command += f" --block_size {tokens}" if (tokens := args.seq_length) is not None else ""
    elif plan["gradient_checkpointing"]:
        command += " --gradient_checkpointing True"
    return f"{command} …"


def text(shown: Mapping[str, Any]) -> str:
    cluster, terms = shown["cluster"], _terms_shown(shown)
    limit = "unlimited memory" if cluster["memory_gib"] is None else f"{cluster['memory_gib']:.4g} GiB each"
    lines = [
        f"{shown['model_type']} on {cluster['devices']} devices ({cluster['devices_per_node']} a node, {limit}), "
        f"{shown['dtype']}, ZeRO {shown['zero']}, {shown['train_batch_size']} samples a step in micro-batches of "
        f"{shown['micro_batch_size']} x {shown['sequence_length']} tokens",
        f"{shown['strategies']} strategies; left out: {shown['dropped'].get('memory', 0)} for memory, "
        f"{shown['dropped'].get('batch', 0)} that do not divide the batch",
    ]
    if not shown["plans"]:
        return "\n".join(lines)
    if shown["loads_are_assumed"] and any(plan["expert"] > 1 for plan in shown["plans"]):
        lines[-1] += "; loads of experts are not known, and taken to be as uneven as usual (--loads tells them)"
    recomputes = ["recomputes"] if any(plan["gradient_checkpointing"] for plan in shown["plans"]) else []
    head = ["head"] if any(plan["head_slices"] > 1 for plan in shown["plans"]) else []
    titles = ["", "strategy", "step_s", *(f"{name}_s" for name in terms), "GiB", "M", *recomputes, *head, "runs"]
    rows = [titles]
    for plan in shown["plans"]:
        runs = "here" if plan["runs_here"] else plan["why_not"]
        seconds = [f"{plan['terms'][name]:.4g}" for name in terms]
        room = f"{plan['memory_gib']:.3g}"
        share = f"{sum(plan['recomputed'])} of {_num_layers(plan, half_layers=shown['half_layers'])} layers"
        again = [share if plan["gradient_checkpointing"] else "-"][: len(recomputes)]
        cut = [f"{plan['head_slices']} slices" if plan["head_slices"] > 1 else "whole"][: len(head)]
        count = str(plan["micro_batches"])
        rows.append(
            [str(plan["rank"]), plan["name"], f"{plan['step_s']:.4g}", *seconds, room, count, *again, *cut, runs]
        )
    lines += aligned(rows, left=[1, *range(len(titles) - 1 - len(recomputes) - len(head), len(titles))])
    lines += [f"{plan['name']}: {plan['command']}" for plan in shown["plans"] if plan["command"]]
    return "\n".join(lines)


def _num_layers(plan: Mapping[str, Any], *, half_layers: bool) -> int:
    """Decoder layers of all stages. One within which a stage ends counts for the next stage, too."""
    from paceline.planning.recomputation import layers_of_stages, num_layers

    stages = layers_of_stages(plan["boundaries"], plan["head_slices"])
    return sum(num_layers(held, 2 if half_layers else 1) for held in stages)


def _terms_shown(shown: Mapping[str, Any]) -> list[str]:
    """Names of the terms that any of the plans has."""
    plans = shown["plans"]
    return [name for name in (plans[0]["terms"] if plans else ()) if any(plan["terms"][name] for plan in plans)]


def devices_here() -> int:
    """GPUs of this machine; without any, ranks that its cores can run."""
    import torch

    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
