"""``paceline fit``: does a model with a DeepSpeed JSON fit the devices, and what takes the memory, per stage."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.launch.profile import DTYPES
from paceline.measure.tokens import MOST_TOKENS, tokens_of_sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from paceline.config import RunPlan
    from paceline.planning.memory import ItemMemory, States
    from paceline.schedules import Schedule
    from paceline.schedules.stream import Stream

FITS, FITS_NOT = 0, 3
GIB = 2**30
MOST_RANKS, MOST_GIB = 2**20, 2.0**40
MICRO_BATCH_SIZE = "train_micro_batch_size_per_gpu"
PARTS = ("weights", "gradients", "masters", "moments", "activations", "working", "transport")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("model", metavar="MODEL", help="name on the hub, directory with a config.json, or that file")
    parser.add_argument("--deepspeed", required=True, metavar="FILE", help="DeepSpeed JSON")
    parser.add_argument("--world-size", required=True, type=int, metavar="N", help="number of ranks, one a device")
    parser.add_argument(
        "--device-memory-gib",
        type=float,
        nargs="+",
        metavar="G",
        help="of each device: one number, or one a stage (default: this machine's)",
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help=f"tokens of a sample (default: what fits, {MOST_TOKENS} at most)"
    )
    parser.add_argument(
        "--micro-batch-size", type=int, metavar="N", help="samples, where the JSON leaves it out (default 1)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="where the JSON has neither bf16 nor fp16 (default float32)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute layers in the backward")


def run(args: argparse.Namespace) -> int:
    """The command; its exit status: 0 if all stages fit, 3 if not.

    Raises:
        ValueError: no such model or file, or values that do not go together.
    """
    from paceline.config import read_ds_config
    from paceline.config.recompute_keys import PATH
    from paceline.config.stage_counts import blocks_per_layer, may_be_planned
    from paceline.hf.activations import count_items
    from paceline.hf.anatomy import anatomy_of
    from paceline.hf.check import require_halves
    from paceline.hf.sources import model_config_at
    from paceline.hf.weights import skeleton
    from paceline.moe.hf_experts import check_experts
    from paceline.planning.memory import States, with_head_slices
    from paceline.planning.recomputation import counts_of_layers, recomputed
    from paceline.planning.shared_devices import whole_schedule
    from paceline.runtime.hetero import shared_memory
    from paceline.runtime.initialize import check_experts_without_flush
    from paceline.runtime.module import check_slices, check_slices_of_ranks, has_experts
    from paceline.schedules.stream import Stream

    if args.world_size < 1:
        raise ValueError(f"--world-size is {args.world_size}: give the number of ranks, from 1 upwards.")
    if args.world_size > MOST_RANKS:
        raise ValueError(f"--world-size is {args.world_size}: give at most {MOST_RANKS}.")
    for value in args.device_memory_gib or ():
        if not 0 < value <= MOST_GIB:
            raise ValueError(f"--device-memory-gib {value:g} is no size: give GiB, above 0.")
    config = model_config_at(args.model)
    resolved = _resolve(args, config)
    if resolved.half_layers:
        require_halves(config)
    if resolved.head_slices > 1:
        check_slices(config, resolved.head_slices)
    if resolved.expert_parallel > 1:
        check_experts(skeleton(config), resolved.expert_parallel)
    checkpointing = args.gradient_checkpointing or _checkpoints(resolved.ds_config)
    states = States.from_config(resolved.ds_config, resolved.data_parallel)
    length = tokens_of_sample(args.seq_length, config)
    items = count_items(
        config,
        dtype=_dtype(states),
        micro_batch_size=resolved.micro_batch_size,
        sequence_length=length,
        gradient_checkpointing=checkpointing,
        half_layers=resolved.half_layers,
    )
    items = shared_memory(
        config, items, resolved.expert_parallel, resolved.num_copies, half_layers=resolved.half_layers
    )
    if resolved.tensor_parallel > 1:
        items = _in_slices(config, items, resolved.tensor_parallel)
    if resolved.head_slices > 1:
        items = with_head_slices(items, resolved.head_slices)
    choice = resolved.schedule
    schedule = choice.planned(resolved.stages, resolved.micro_batches)
    if isinstance(schedule, Stream) and not choice.has_directions:
        # With several directions no backward comes between the end of a step and its update.
        states = replace(states, gradient_sets=schedule.most_lag + 1)
    limits = _limits(args, resolved)
    if resolved.recompute is not None and checkpointing:
        raise ValueError(f"{PATH} is there, and all layers are recomputed: leave one of them out.")
    boundaries, again = _boundaries(config, items, resolved, states, limits, schedule, length, checkpointing)
    model = skeleton(config)
    if resolved.head_slices > 1:
        anatomy = anatomy_of(model, half_layers=resolved.half_layers, head_slices=resolved.head_slices)
        check_slices_of_ranks(boundaries, choice.routes(resolved.stages)[0], anatomy)
    if has_experts(model):
        check_experts_without_flush(resolved, is_recomputed=checkpointing or bool(again))
    items = recomputed(items, again)
    stages = _stages(items, boundaries, states, whole_schedule(schedule), limits, choice.optimizer_owners)
    short = [row for row in stages if not row["fits"]]
    shown = {
        "stages": resolved.stages,
        "data_parallel": resolved.data_parallel,
        **({} if resolved.tensor_parallel == 1 else {"tensor_parallel": resolved.tensor_parallel}),
        "zero": int(states.shard),
        "weight_bytes": states.weight_bytes,
        "micro_batch_size": resolved.micro_batch_size,
        "micro_batches": resolved.micro_batches,
        "sequence_length": length,
        "gradient_checkpointing": checkpointing,
        "recomputed": list(
            counts_of_layers(
                boundaries,
                range(1, len(items) - resolved.head_slices) if checkpointing else again,
                blocks_per_layer(resolved.section),
            )
        ),
        "schedule": schedule.name,
        "partition": list(boundaries),
        "fits": not short,
        "memory": stages,
        "remedies": _remedies(args, resolved, states, checkpointing, num_blocks=len(items) - 2) if short else [],
    }
    print(json.dumps(shown, indent=2) if args.json else _text(shown))
    if line := may_be_planned(resolved.section, read_ds_config(args.deepspeed), args.world_size):
        print(f"paceline: {line}", file=sys.stderr)
    for row in short:
        print(
            f"paceline: stage {row['stage']} needs {row['total'] / GIB:.4g} GiB and its limit is "
            f"{row['limit'] / GIB:.4g} GiB.",
            file=sys.stderr,
        )
    return FITS_NOT if short else FITS


def _in_slices(config: Any, items: Sequence[ItemMemory], size: int) -> list[ItemMemory]:
    """Memory of the items where so many ranks have slices of each layer.

    Raises:
        ValueError: they cannot have them.
    """
    from paceline.hf.anatomy import anatomy_of
    from paceline.hf.sliced_layers import plan_of_slices, shares_head
    from paceline.hf.weights import skeleton
    from paceline.planning.strategy_memory import in_slices

    model = skeleton(config)
    anatomy = anatomy_of(model)
    plan_of_slices(model, anatomy, size)
    embedding, *layers, head = items
    layers = [in_slices(layer, size, is_head=False) for layer in layers]
    return [embedding, *layers, in_slices(head, size, is_head=True) if shares_head(model, anatomy, size) else head]


def _dtype(states: States) -> torch.dtype:
    import torch

    return torch.float32 if states.weight_bytes == 4 else torch.bfloat16


def _resolve(args: argparse.Namespace, config: Any) -> RunPlan:
    """The JSON for so many ranks."""
    from paceline.config import PacelineConfig, read_ds_config, resolve
    from paceline.config.stage_counts import fewest_that_go, states_fit
    from paceline.hf.anatomy import anatomy_of
    from paceline.hf.weights import skeleton
    from paceline.planning.divisors import divisors
    from paceline.runtime.startup import STATE_BYTES, parameters_of_rank

    ds_config = _filled(read_ds_config(args.deepspeed), args)
    model = skeleton(config)
    num_layers = anatomy_of(model).num_layers
    memory = args.device_memory_gib
    section = PacelineConfig.of(ds_config)
    state_bytes = STATE_BYTES * parameters_of_rank(model, ds_config)
    device_bytes = _here(args.world_size) if memory is None else int(min(memory) * GIB)

    def resolved(section: PacelineConfig) -> RunPlan:
        return resolve(
            ds_config,
            world_size=args.world_size,
            num_layers=num_layers,
            num_items=num_layers + 2,
            state_bytes=state_bytes,
            device_bytes=device_bytes,
            cpu=False,
            section=section,
        )

    fitting = (s for s in divisors(args.world_size) if states_fit(s, state_bytes, device_bytes))
    return fewest_that_go(section, ds_config, resolved, fitting)


def _filled(ds_config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Fill in this command line's flags; other values that a run's would fill are skipped, and a line says so.

    Raises:
        ValueError: the JSON says it too, and otherwise.
    """
    from paceline.config import open_autos

    bf16 = "bfloat16" if "bfloat16" in ds_config else "bf16"
    asked = {}
    if args.micro_batch_size is not None:
        if args.micro_batch_size < 1:
            raise ValueError(f"--micro-batch-size is {args.micro_batch_size}: give a whole number from 1 upwards.")
        asked[MICRO_BATCH_SIZE] = (args.micro_batch_size, f"--micro-batch-size {args.micro_batch_size}")
    if args.dtype is not None:
        for key, dtype in ((f"{bf16}.enabled", "bfloat16"), ("fp16.enabled", "float16")):
            asked[key] = (args.dtype == dtype, f"--dtype {args.dtype}")
    paths = {MICRO_BATCH_SIZE, f"{bf16}.enabled", "fp16.enabled"}
    autos = [path for path in open_autos(ds_config) if path in ds_config or path in paths]
    filled = {key: value for key, value in ds_config.items() if key not in autos}
    for path in autos:
        key, _, inner = path.partition(".")
        if inner:
            filled[key] = {name: value for name, value in filled[key].items() if name != inner}
    for path, (value, flag) in asked.items():
        _fill(filled, path, value, flag)
    left = [path for path in autos if path not in asked]
    if left:
        print(f"paceline: {', '.join(left)}: taken as left out; the command line decides.", file=sys.stderr)
    return filled


def _fill(config: dict[str, Any], path: str, value: Any, flag: str) -> None:
    from paceline.config.section import show, value_at

    written = value_at(config, path)
    if written not in (None, value):
        raise ValueError(
            f"{path} is {show(written)} in the JSON and {flag} makes it {show(value)}; drop one of them, or write "
            '"auto" in the JSON.'
        )
    key, _, inner = path.partition(".")
    if inner and value and isinstance(config.get(key, {}), dict):
        config[key] = {**config.get(key, {}), inner: value}
    elif not inner:
        config[key] = value


def _here(world_size: int) -> int:
    """Bytes of a device of this machine."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from paceline.measure.device_memory import plannable_bytes

    device = torch.device(get_accelerator().device_name(0))
    return plannable_bytes(device, 1 if device.type == "cuda" else world_size)


def _limits(args: argparse.Namespace, resolved: RunPlan) -> list[float]:
    given = args.device_memory_gib
    if given is None:
        limit = resolved.partition_choice.memory_bytes or _here(args.world_size)
        return [float(limit)] * resolved.stages
    if len(given) not in (1, resolved.stages):
        raise ValueError(
            f"--device-memory-gib has {len(given)} numbers for {resolved.stages} stages: give one, or one a stage."
        )
    return [value * GIB for value in (given * resolved.stages if len(given) == 1 else given)]


def _checkpoints(ds_config: dict[str, Any]) -> bool:
    pipeline = ds_config.get("pipeline")
    return isinstance(pipeline, dict) and bool(pipeline.get("activation_checkpoint_interval"))


def _boundaries(
    config: Any,
    items: Sequence[ItemMemory],
    resolved: RunPlan,
    states: States,
    limits: Sequence[float],
    schedule: Schedule | Stream,
    length: int,
    checkpointing: bool,
) -> tuple[Sequence[int], Sequence[int]]:
    """Boundaries over items, and the items that are recomputed where the JSON says how many, as a run has them."""
    from paceline.config.recompute_keys import FIT
    from paceline.config.section import HETERO, WORK
    from paceline.hf.anatomy import anatomy_of
    from paceline.hf.layer_profile import fingerprint
    from paceline.hf.weights import skeleton
    from paceline.measure.profile_file import Profile
    from paceline.planning.blocks import Device, DoesNotFit
    from paceline.planning.recomputed_stages import fastest_stages
    from paceline.planning.stages import plan_stages
    from paceline.runtime.early_room import keeps_what_has_room
    from paceline.runtime.first_partition import as_it_takes, as_written, by_work, method_of
    from paceline.runtime.hetero import Shape, kept_stages, seconds_of
    from paceline.runtime.module import items_of, partition_items

    fits, partition = resolved.recompute == FIT, method_of(resolved)
    shape = Shape(_dtype(states), resolved.micro_batch_size, length, checkpointing, resolved.half_layers)
    if fits and partition != HETERO:
        found = as_it_takes(config, resolved, shape, limits, partition)
        assert isinstance(found.partition, list), "boundaries"
        return found.partition, found.recomputed
    model = skeleton(config)
    anatomy = anatomy_of(model, half_layers=resolved.half_layers, head_slices=resolved.head_slices)
    if partition == WORK:
        found = by_work(config, resolved, shape, limits)
        assert isinstance(found.partition, list), "boundaries"
        return found.partition, as_written(resolved, found.partition, anatomy.blocks_per_layer)
    may_keep = checkpointing and resolved.expert_parallel == 1 and keeps_what_has_room(resolved.schedule)
    own = items_of(model, anatomy, length, recomputes=checkpointing and not may_keep)
    if partition != HETERO:
        boundaries = partition_items(own, len(resolved.schedule.routes(resolved.stages)[0]), partition)
        return boundaries, as_written(resolved, boundaries, anatomy.blocks_per_layer)
    # Without times, an item takes as long as it has operations.
    seconds = [(item.work / 3, item.work / 1.5) for item in own]
    speeds = [1.0] * resolved.stages
    path = resolved.partition_choice.profile
    if path is None:
        print(
            "paceline: layers count by their operations until they are measured; `paceline profile` measures them, for "
            '"paceline.pipeline.partition.profile".',
            file=sys.stderr,
        )
    if path is not None:
        profile = Profile.load(path)
        profile.check_model(fingerprint(config), path, num_items=len(items))
        runs = checkpointing and not may_keep
        seconds = seconds_of(profile.items, measured=profile.gradient_checkpointing, runs=runs)
        if len(profile.devices) == resolved.stages:
            speeds = [device.speed for device in profile.devices]
    owners = resolved.schedule.optimizer_owners
    devices = [Device(speed, limit) for speed, limit in zip(speeds, limits, strict=True)]
    kept = kept_stages(config, shape, seconds, devices, states, schedule, owners=owners) if may_keep else None
    if kept is not None:
        return kept.boundaries, as_written(resolved, kept.boundaries, anatomy.blocks_per_layer)
    try:
        plan, again = fastest_stages(items, seconds, devices, states, schedule, owners=owners, may_recompute=fits)
    except DoesNotFit:  # shown as it would be without limits
        devices, again = [Device(speed) for speed in speeds], tuple(range(1, len(items) - 1))
        plan = plan_stages(items, seconds, devices, states, schedule, owners=owners)
    return plan.boundaries, again if fits else as_written(resolved, plan.boundaries, anatomy.blocks_per_layer)


def _stages(
    items: Sequence[ItemMemory],
    boundaries: Sequence[int],
    states: States,
    schedule: Schedule,
    limits: Sequence[float],
    owners: str | None,
) -> list[dict[str, Any]]:
    """A row a stage; a row a device where it holds several."""
    from paceline.planning.shared_devices import held_by

    rows = []
    for row, (held, limit) in enumerate(zip(held_by(schedule, owners), limits, strict=True)):
        spans = [[boundaries[stage], boundaries[stage + 1]] for stage in held.stages]
        holds = {"items": spans[0]} if len(spans) == 1 else {"stages": list(held.stages), "items": spans}
        need = held.memory(items, boundaries, states)
        limited = {"limit": round(limit), "fits": need.total <= limit}
        rows.append({"stage": row, **holds, "live_micro_batches": held.peak, **need.to_dict(), **limited})
    return rows


def _remedies(
    args: argparse.Namespace, resolved: RunPlan, states: States, checkpointing: bool, *, num_blocks: int
) -> list[str]:
    found = []
    if args.device_memory_gib is None and resolved.partition_choice.memory_bytes is not None:
        found.append('a higher "paceline.pipeline.partition.memory_gib", which is the limit')
    if len(resolved.schedule.routes(resolved.stages)[0]) < num_blocks:
        found.append('more stages ("paceline.pipeline.stages")')
    if resolved.data_parallel > 1 and not states.shard:
        found.append('ZeRO 1 ("zero_optimization.stage": 1)')
    if not checkpointing and resolved.recompute is None:
        found.append('recomputed layers ("paceline.pipeline.recompute": "fit", or --gradient-checkpointing for all)')
    if resolved.micro_batch_size > 1:
        found.append('a smaller micro-batch ("train_micro_batch_size_per_gpu")')
    if states.weight_bytes == 4:
        found.append('bf16 ("bf16.enabled": true), which halves activations')
    return [*found, "shorter samples (--seq-length)"]


def _spans(row: dict[str, Any]) -> str:
    """First and last item of each stage of a row, from 0: ``0-4``, or ``0-4,14-17`` where a device holds two."""
    return ",".join(f"{first}-{end - 1}" for first, end in (row["items"] if "stages" in row else [row["items"]]))


def _text(shown: dict[str, Any]) -> str:
    width = max(9, *(len(_spans(row)) for row in shown["memory"]))
    slices = f"{shown['tensor_parallel']} tensor parallel x " if "tensor_parallel" in shown else ""
    lines = [
        f"{shown['stages']} stages x {slices}{shown['data_parallel']} data parallel, ZeRO {shown['zero']}, "
        f"{shown['schedule']}, {shown['micro_batches']} micro-batches of {shown['micro_batch_size']} x "
        f"{shown['sequence_length']} tokens; GiB:",
        f"{'stage':>5} {'items':>{width}} {'live':>5}" + "".join(f" {name:>11}" for name in (*PARTS, "total", "limit")),
    ]
    if any(shown["recomputed"]) and not shown["gradient_checkpointing"]:
        lines.insert(1, f"recomputed layers of each stage: {', '.join(map(str, shown['recomputed']))}")
    for row in shown["memory"]:
        sizes = "".join(f" {row[name] / GIB:>11.3f}" for name in (*PARTS, "total", "limit"))
        verdict = "" if row["fits"] else "  does not fit"
        lines.append(f"{row['stage']:>5} {_spans(row):>{width}} {row['live_micro_batches']:>5}{sizes}{verdict}")
    lines.append("it fits" if shown["fits"] else "it does not fit; what helps: " + "; ".join(shown["remedies"]))
    return "\n".join(lines)
