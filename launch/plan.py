"""``paceline plan``: every way to use a cluster for a model, how long a step of each takes, the JSON of the best.

Speeds are given (flags, ``--cluster``), measured before (``--profile``), or measured now (``--measure``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.json_values import as_list, as_number, read_json, within
from paceline.launch.plan_report import devices_here, facts, text, write
from paceline.launch.profile import DTYPES
from paceline.measure.tokens import MOST_TOKENS, tokens_of_sample

if TYPE_CHECKING:
    from paceline.hf.model_workload import Shape
    from paceline.measure.profile_file import Profile
    from paceline.planning.cluster import Cluster
    from paceline.planning.workload import Workload

FITS, FITS_NOT = 0, 3

MEASURE_S = 1800.0
"""Longest that measuring may take."""

MOST_DEVICES = 2**20
"""Most devices that are planned for: more would take minutes."""

_MOST = {"train_batch_size": 2**40, "micro_batch_size": 2**20, "seq_length": 2**24}
"""Largest sizes; beyond, the sizes of tensors overflow."""

_CLUSTER_FLAGS = ("devices", "devices_per_node", "memory_gib", "flops_per_s", "state_bytes_per_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("model", metavar="MODEL", help="name on the hub, directory with a config.json, or that file")
    cluster = parser.add_argument_group("cluster", "a flag overrides the file")
    cluster.add_argument(
        "--cluster",
        metavar="FILE",
        help='JSON: {"devices": 16, "devices_per_node": 8, "memory_gib": 80, "flops_per_s": 4e14, "intra_node": '
        '{"bytes_per_s": 3e11, "latency_s": 5e-6}, "inter_node": {…}, "state_bytes_per_s": 2e12}; what is left out is '
        "unlimited, and there is one node",
    )
    cluster.add_argument("--devices", type=int, metavar="N")
    cluster.add_argument("--devices-per-node", type=int, metavar="N")
    cluster.add_argument("--memory-gib", type=float, metavar="G", help="of a device")
    cluster.add_argument(
        "--flops-per-s", type=float, metavar="F", help="that a device reaches in training, not its data sheet's"
    )
    for side in ("intra", "inter"):
        cluster.add_argument(f"--{side}-node-bytes-per-s", type=float, metavar="B", help="from one device to another")
        cluster.add_argument(f"--{side}-node-latency-s", type=float, metavar="S")
    cluster.add_argument("--state-bytes-per-s", type=float, metavar="B", help="at which an optimizer steps its states")
    cluster.add_argument("--profile", metavar="FILE", help="of `paceline profile`: seconds of layers, not FLOP/s")
    cluster.add_argument(
        "--measure", action="store_true", help="measure layers and links on --devices ranks of this machine first"
    )
    step = parser.add_argument_group("training step")
    step.add_argument("--train-batch-size", type=int, required=True, metavar="N", help="samples of a step")
    step.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="samples (default 1)")
    step.add_argument(
        "--seq-length", type=int, metavar="N", help=f"tokens of a sample (default: what fits, {MOST_TOKENS} at most)"
    )
    step.add_argument("--dtype", choices=DTYPES, help="default: the profile's, else bfloat16")
    step.add_argument("--zero", type=int, choices=(0, 1), default=1, help="ZeRO stage (default 1)")
    step.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute all layers in the backward, in every strategy, or none (default: as few as it takes to fit)",
    )
    step.add_argument(
        "--half-layers",
        action="store_true",
        help="cut decoder layers between attention and MLP too (default: as the profile was measured)",
    )
    step.add_argument(
        "--head-slices",
        action="store_true",
        help="pipelines whose last stages share the head in slices, where that is faster",
    )
    step.add_argument(
        "--adaptive",
        action="store_true",
        help='pipelines with the fastest of the schedules of "adaptive", not 1F1B, with one stage a rank or two',
    )
    step.add_argument(
        "--late-gradients",
        action="store_true",
        help="pipelines also without a flush (one_direction, multidirection), whose gradients are some updates late",
    )
    routing = parser.add_argument_group("routing of an MoE model; default: balanced")
    routing.add_argument(
        "--loads",
        metavar="FILE",
        help="JSON: [[tokens of each expert] of each MoE layer], or a run's expert_loads.jsonl",
    )
    routing.add_argument("--rebalanced", action="store_true", help="experts are placed by --loads, not in order")
    routing.add_argument("--capacity-factor", type=float, metavar="C", help="an expert gets C times its share at most")
    routing.add_argument("--worst-routing", action="store_true", help="experts get what the gate permits at most")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="strategies to show (default 10)")
    parser.add_argument("--write", metavar="DIR", help="write the DeepSpeed JSON of the best K that can run")


def run(args: argparse.Namespace) -> int:
    """The command; its exit status: 0 if anything fits, 3 if not.

    Raises:
        ValueError: no such model or file, values that do not go together, or larger ones than can be planned for.
    """
    from paceline.hf.activations import check_shape
    from paceline.hf.check import require_halves
    from paceline.hf.sources import model_config_at
    from paceline.planning.best_schedule import with_best_schedules
    from paceline.planning.strategy import search

    for flag in ("top", "train_batch_size", "micro_batch_size"):
        if getattr(args, flag) < 1:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} is {getattr(args, flag)}: give a whole number from 1 upwards.")
    if args.write == "":
        raise ValueError("--write: the name of a directory is empty; give one, or leave --write out.")
    for flag, most in _MOST.items():
        if (getattr(args, flag) or 0) > most:
            raise ValueError(f"--{flag.replace('_', '-')} is too large to plan for: give at most {most}.")
    cluster = _cluster(args)
    config = model_config_at(args.model)
    check_shape(config, args.micro_batch_size, tokens_of_sample(args.seq_length, config))
    with tempfile.TemporaryDirectory() as directory:
        if args.measure:
            cluster = _measured(args, cluster, Path(directory))
        profile = _profile(args)
    shape = _shape(args, config, profile)
    if shape.half_layers:
        require_halves(config)
    workload = _workload(args, config, shape, cluster, profile)
    recomputed = None
    if args.gradient_checkpointing is None and not shape.gradient_checkpointing:
        again = replace(shape, gradient_checkpointing=True)
        recomputed = cache(lambda: _workload(args, config, again, cluster, profile))
    sliced = _sliced(config, workload) if args.head_slices else None
    ranking = search(workload, cluster, _late(args, shape), recomputed, sliced)
    if args.adaptive:
        ranking = with_best_schedules(ranking, workload, cluster, recomputed, sliced)
    shown = facts(args, config, shape, cluster, ranking)
    if args.write is not None:
        write(Path(args.write), shown, args, shape)
        if args.capacity_factor is not None:
            print(
                "paceline: --capacity-factor is predicted only: experts of the job take all that their router sends.",
                file=sys.stderr,
            )
    print(json.dumps(shown, indent=2) if args.json else text(shown))
    if not ranking.plans:
        print(
            f"paceline: none of {len(ranking.dropped)} strategies can be, such as {ranking.dropped[-1].name}: "
            f"{ranking.dropped[-1].text}.",
            file=sys.stderr,
        )
        return FITS_NOT
    return FITS


def _cluster(args: argparse.Namespace) -> Cluster:
    from paceline.planning.cluster import Cluster

    values: dict[str, Any] = {} if args.cluster is None else _read_json("--cluster", args.cluster)
    if not isinstance(values, dict):
        raise ValueError(f"--cluster {args.cluster}: it must hold an object {{...}}.")
    for flag in _CLUSTER_FLAGS:
        if getattr(args, flag) is not None:
            values[flag] = getattr(args, flag)
    for side in ("intra_node", "inter_node"):
        given = {key: getattr(args, f"{side}_{key}") for key in ("bytes_per_s", "latency_s")}
        given = {key: value for key, value in given.items() if value is not None}
        if given:
            known = values.get(side)
            values[side] = {**(known if isinstance(known, dict) else {}), **given}
    if "devices" not in values:
        raise ValueError("there is no number of devices: give --devices N, or --cluster FILE with it.")
    with within("cluster" if args.cluster is None else f"--cluster {args.cluster}"):
        cluster = Cluster.from_dict(values)
    if cluster.num_devices > MOST_DEVICES:
        raise ValueError(f"there are too many devices to plan for: give {MOST_DEVICES} at most.")
    return cluster


def _measured(args: argparse.Namespace, cluster: Cluster, directory: Path) -> Cluster:
    """Measure this machine with the launcher; ``args.profile`` becomes that of the same run. Flags keep priority."""
    from paceline.comm.single_process import free_port
    from paceline.launch.measure import CLUSTER, PROFILE

    if args.profile is not None or args.cluster is not None:
        raise ValueError("--measure makes a profile and a cluster file of its own: drop --profile and --cluster.")
    here = devices_here()
    if cluster.num_devices < 2 or cluster.num_devices > here:
        raise ValueError(
            f"--measure with {cluster.num_devices} devices: this machine has {here}, and it takes 2; for more, start "
            "paceline.launch.measure with the launcher on all nodes, and give its files (--cluster, --profile)."
        )
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(cluster.num_devices)]
    command += ["--master_port", str(free_port()), "--module", "paceline.launch.measure", args.model]
    command += ["--output_dir", str(directory), "--micro_batch_size", str(args.micro_batch_size)]
    command += ["--seq_length", str(args.seq_length)] if args.seq_length is not None else []
    command += ["--dtype", args.dtype] if args.dtype is not None else []
    command += ["--gradient_checkpointing"] if args.gradient_checkpointing else []
    command += ["--half_layers"] if args.half_layers else []
    output = _output(command)
    if not (directory / CLUSTER).exists():
        errors = [line for line in output.splitlines() if "rror: " in line]
        raise ValueError(f"--measure: {errors[0] if errors else 'the ranks ended without a result'}")
    args.profile = str(directory / PROFILE)
    args.cluster = str(directory / CLUSTER)
    return _cluster(args)


def _output(command: list[str]) -> str:
    """The output of a job that ends with all its ranks within :data:`MEASURE_S`, or is killed; SIGTERM kills it too."""
    stopped: list[int] = []  # a signal that comes while the job starts waits until there is one to kill
    former = signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        if stopped:
            sys.exit(128 + signal.SIGTERM)
        return job.communicate(timeout=MEASURE_S)[0]
    except subprocess.TimeoutExpired:
        raise ValueError(f"--measure: the ranks have not ended in {MEASURE_S:.0f} s; is the machine busy?") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        signal.signal(signal.SIGTERM, former)


def _profile(args: argparse.Namespace) -> Profile | None:
    from paceline.measure.profile_file import Profile

    if args.profile is None:
        return None
    return Profile.load(args.profile)


def _shape(args: argparse.Namespace, config: Any, profile: Profile | None) -> Shape:
    import torch

    from paceline.hf.layer_profile import fingerprint
    from paceline.hf.model_workload import Shape

    asked, half_layers = args.gradient_checkpointing, args.half_layers
    shape: dict[str, Any] = {
        "micro_batch_size": args.micro_batch_size,
        "sequence_length": tokens_of_sample(args.seq_length, config),
        # Times that were measured so tell nothing of layers that are not recomputed.
        "gradient_checkpointing": profile is not None and profile.gradient_checkpointing if asked is None else asked,
    }
    dtype = args.dtype or (profile.dtype if profile is not None else "bfloat16")
    if profile is not None:
        # A recomputed layer takes a forward longer than one that was measured without.
        recomputes = shape["gradient_checkpointing"] and profile.gradient_checkpointing
        as_measured = {**shape, "gradient_checkpointing": recomputes}
        layers = getattr(config.get_text_config(), "num_hidden_layers", None)
        half_layers = half_layers or (layers is not None and len(profile.items) == 2 * layers + 2)
        num_items = None if layers is None else (2 if half_layers else 1) * layers + 2
        fits = profile.check_fits(fingerprint(config), dtype, path=args.profile, num_items=num_items, **as_measured)
        for line in fits:
            print(f"paceline: {line}", file=sys.stderr)
    shape["half_layers"] = half_layers
    return Shape(dtype=getattr(torch, dtype), train_batch_size=args.train_batch_size, **shape)


def _workload(
    args: argparse.Namespace, config: Any, shape: Shape, cluster: Cluster, profile: Profile | None
) -> Workload:
    from paceline.hf.model_workload import workload_of
    from paceline.report.expert_loads import latest

    if profile is None and not isfinite(cluster.flops_per_s):
        raise ValueError(
            "there is no speed of the devices: give --flops-per-s, flops_per_s in --cluster, --profile FILE of "
            "`paceline profile`, or --measure."
        )
    if args.rebalanced and args.loads is None:
        raise ValueError("--rebalanced places experts by what they have to do: give --loads FILE too.")
    if args.worst_routing and args.loads is not None:
        raise ValueError("--worst-routing does not look at --loads: drop one of them.")
    workload = workload_of(
        config,
        shape,
        flops_per_s=cluster.flops_per_s,
        profile=profile,
        zero=args.zero,
        capacity_factor=args.capacity_factor,
        worst=args.worst_routing,
    )
    if not workload.num_experts:
        for flag in ("loads", "capacity_factor", "worst_routing"):
            if (value := getattr(args, flag)) not in (None, False):
                shown = f"--{flag.replace('_', '-')}{'' if value is True else f' {value}'}"
                raise ValueError(f"{shown}: {args.model} has no experts; drop it.")
    if args.loads is None:
        return workload
    values = latest(args.loads) if args.loads.endswith(".jsonl") else _read_json("--loads", args.loads)
    with within(f"--loads {args.loads}"):
        loads = []
        for index, row in enumerate(values if isinstance(values, list) else [values]):
            label = f"row {index} of [[tokens of each expert] of each MoE layer]"
            loads.append(tuple(as_number(f"expert {n} in {label}", load) for n, load in enumerate(as_list(label, row))))
        if not loads:
            raise ValueError(f"there are no loads, and {len(workload.moe_layers)} MoE layers: give one row each.")
        return replace(workload, loads=tuple(loads), rebalanced=args.rebalanced)


def _sliced(config: Any, workload: Workload) -> Workload:
    """The workload with the head in slices.

    Raises:
        ValueError: the model cannot have it so.
    """
    from paceline.planning.finer_cuts import HEAD_SLICES
    from paceline.runtime.module import check_slices

    check_slices(config, HEAD_SLICES)
    return workload.in_head_slices(HEAD_SLICES)


def _late(args: argparse.Namespace, shape: Shape) -> list[str]:
    """Types of schedule without a flush that may be planned, those that this precision has."""
    from paceline.config import Features, PacelineConfig, PipelineConfig, check_exclusions
    from paceline.launch.plan_report import precision
    from paceline.schedules.asynchronous import STREAMS

    found = []
    for kind in STREAMS if args.late_gradients else ():
        with suppress(ValueError):
            pipeline = PipelineConfig.model_validate({"schedule": kind})
            check_exclusions(Features(precision(shape), PacelineConfig(pipeline=pipeline)))
            found.append(kind)
    return found


def _read_json(flag: str, path: str) -> Any:
    return read_json(path, "give a JSON file", label=f"{flag} {path}")
