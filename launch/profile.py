"""``paceline profile``: what each kind of layer of a model costs on this machine's device."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.measure.tokens import MOST_TOKENS, tokens_of_sample
from paceline.messages import aligned

if TYPE_CHECKING:
    from paceline.measure.profile_file import DeviceProfile, Profile

DTYPES = ("float32", "bfloat16", "float16")
_SHAPE = ("dtype", "micro_batch_size", "sequence_length", "gradient_checkpointing")
_COSTS = ("forward_s", "backward_s", "saved_bytes", "output_bytes", "num_parameters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("model", metavar="MODEL", help="name on the hub, directory with a config.json, or that file")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="samples (default 1)")
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help=f"tokens of a sample (default: what fits, {MOST_TOKENS} at most)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute layers in the backward")
    parser.add_argument("--half-layers", action="store_true", help="measure attention and MLP of a layer apart")
    parser.add_argument("--output", metavar="FILE", default="profile.json", help="default: profile.json")


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: no such model, or one that cannot be cut; sizes that cannot be; a file that cannot be written.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    from paceline.hf.check import require_halves
    from paceline.hf.layer_profile import Bench, fingerprint, profile_items
    from paceline.hf.sources import model_config_at
    from paceline.measure.profile_file import Profile, device_profile, versions
    from paceline.runtime.split_times import measure_stage

    if not Path(args.output).parent.is_dir():  # told before there is anything to lose
        raise ValueError(f"--output {args.output}: its directory does not exist; make it, or give another path.")
    if Path(args.output).exists() and not Path(args.output).is_file():  # an empty name is the directory here
        nature = "a directory" if Path(args.output).is_dir() else "a device or a pipe, which a file would replace"
        raise ValueError(f"--output {args.output}: it is no name of a file but {nature}; give another path.")
    config = model_config_at(args.model)
    if args.half_layers:
        require_halves(config)
    device = torch.device(get_accelerator().device_name(0))
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    shape: dict[str, Any] = {
        "micro_batch_size": args.micro_batch_size,
        "sequence_length": tokens_of_sample(args.seq_length, config),
        "gradient_checkpointing": args.gradient_checkpointing,
    }
    halves = {"half_layers": args.half_layers}
    here = device_profile(device)
    _check_room(config, here, dtype=getattr(torch, dtype), **shape, **halves)
    try:
        items = profile_items(config, dtype=getattr(torch, dtype), device=device, **shape, **halves)
        stage = measure_stage(Bench(config, dtype=getattr(torch, dtype), device=device, **shape, **halves))
    except RuntimeError as error:  # torch's, of shapes that do not fit together or memory that is not there
        raise ValueError(
            f"the model of {args.model!r} cannot compute on {here.name} ({(str(error).splitlines() or [''])[0]}): give "
            "a config that fits together, or smaller sizes."
        ) from error
    profile = Profile(fingerprint(config), dtype, **shape, items=tuple(items), devices=(here,), versions=versions())
    profile = replace(profile, stage=stage)
    profile.save(args.output)
    print(json.dumps(facts(profile, args.output), indent=2) if args.json else text(profile, args.output))
    return 0


def _check_room(config: Any, device: DeviceProfile, **shape: Any) -> None:
    """Raise ValueError if an item, which is measured alone, has no room on the device, or cannot be counted."""
    from paceline.hf.activations import count_items

    element = shape["dtype"].itemsize
    for item in count_items(config, **shape):
        kept = 2 * item.saved_bytes + item.output_bytes + item.working_bytes
        need = 2 * element * item.num_parameters + kept
        if need > device.free_bytes:
            raise ValueError(
                f"{item.name} needs about {need / 2**30:.3g} GiB and {device.name} has {device.free_bytes / 2**30:.3g} "
                "GiB free: give a smaller --micro-batch-size or --seq-length, or measure on a larger device."
            )


def facts(profile: Profile, path: str) -> dict[str, Any]:
    """The profile by kind, for a JSON."""
    from paceline.measure.profile_file import kinds_of

    return {
        "file": path,
        "model": dict(profile.model),
        "device": profile.devices[0].name,
        **{name: getattr(profile, name) for name in _SHAPE},
        "kinds": [
            {"kind": kind, "count": len(items), **{name: getattr(items[0], name) for name in _COSTS}}
            for kind, items in kinds_of(profile.items).items()
        ],
    }


def text(profile: Profile, path: str) -> str:
    """The same for people: a line a kind."""
    shown = facts(profile, path)
    device = profile.devices[0]
    checkpointing = ", gradient checkpointing" if profile.gradient_checkpointing else ""
    lines = [
        f"{shown['model']['model_type']}, {profile.dtype}, micro-batches of {profile.micro_batch_size} x "
        f"{profile.sequence_length} tokens{checkpointing}",
        f"on {device.name}: {device.memory_bytes / 2**30:.1f} GiB, {device.free_bytes / 2**30:.1f} GiB free",
    ]
    rows = [["kind", "count", "forward_ms", "backward_ms", "saved_MiB", "output_MiB", "parameters"]]
    for row in shown["kinds"]:
        costs = [f"{row[name] * 1e3:.3f}" for name in ("forward_s", "backward_s")]
        costs += [f"{row[name] / 2**20:.2f}" for name in ("saved_bytes", "output_bytes")]
        rows.append([row["kind"], str(row["count"]), *costs, str(row["num_parameters"])])
    return "\n".join([*lines, *aligned(rows, left=[0]), f"written to {path}"])
