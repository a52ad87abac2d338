"""Measure a model's layers, the devices and what connects them, on the ranks that are to train it: for `paceline plan`.

Started by DeepSpeed's launcher on every rank; writes ``profile.json`` and ``cluster.json``::

    deepspeed --num_gpus 2 --module paceline.launch.measure MODEL --output_dir measured
    paceline plan MODEL --cluster measured/cluster.json --profile measured/profile.json --train-batch-size 64

All ranks compute at the same time, as they do in training: what they share (memory, cores, links) is in the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.profile import DTYPES
from paceline.measure.tokens import tokens_of_sample

PROFILE, CLUSTER = "profile.json", "cluster.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; the exit code: 0, or 2 for wrong input."""
    import torch.distributed as dist

    from paceline.hf.sources import config_at
    from paceline.runtime.initialize import start_distributed

    args = _parser().parse_args(argv)
    try:
        config = config_at(args.model)
        start_distributed()
        measure(
            config,
            Path(args.output_dir),
            dtype=args.dtype,
            micro_batch_size=args.micro_batch_size,
            sequence_length=tokens_of_sample(args.seq_length, config),
            gradient_checkpointing=args.gradient_checkpointing,
            half_layers=args.half_layers,
        )
    except ValueError as error:
        # The launcher ends the others when the first one has failed: each says it.
        print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        return 2
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="name on the hub, directory with a config.json, or that file")
    parser.add_argument("--output_dir", metavar="DIR", default="measured")
    parser.add_argument("--micro_batch_size", type=int, default=1, metavar="N")
    parser.add_argument("--seq_length", type=int, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--half_layers", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def measure(config: Any, output: Path, *, dtype: str | None = None, half_layers: bool = False, **shape: Any) -> None:
    """Write the files of this model and these ranks. Collective.

    Args:
        config: of the model.
        dtype: of the weights; None: bfloat16 on a GPU, float32 on a CPU.
        half_layers: attention and MLP of a layer are measured apart.
        shape: ``micro_batch_size``, ``sequence_length`` and ``gradient_checkpointing``.

    Raises:
        ValueError: a model that cannot be cut, sizes that it cannot have, or an ``output`` that cannot be made or
            written to.
    """
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from paceline.comm.control import ControlPlane
    from paceline.comm.staging import ranks_sharing
    from paceline.hf.check import require_halves
    from paceline.hf.layer_profile import Bench, fingerprint, profile_items
    from paceline.measure.collectives import agreed
    from paceline.measure.profile_file import Profile, device_profile, versions
    from paceline.planning.workload import StageTimes
    from paceline.report.metrics import write_whole
    from paceline.runtime.measured_cluster import measure_cluster
    from paceline.runtime.split_times import measure_stage

    if half_layers:
        require_halves(config)
    device = torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    dtype = dtype or ("float32" if device.type == "cpu" else "bfloat16")
    control = ControlPlane.create()
    with control.together(f"preparing {output}"):
        if dist.get_rank() == 0:
            try:
                output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"{error.strerror}; choose a directory that can be written to"
                raise ValueError(f"--output_dir {output}: {why}.") from error
    bench = {"dtype": getattr(torch, dtype), "device": device, "half_layers": half_layers, **shape}
    items = profile_items(config, **bench)
    stage = measure_stage(Bench(config, **bench))
    stage = StageTimes(*agreed(stage, device))
    seconds = agreed([value for item in items for value in (item.forward_s, item.backward_s)], device)
    items = [
        replace(item, forward_s=forward_s, backward_s=backward_s)
        for item, forward_s, backward_s in zip(items, seconds[::2], seconds[1::2], strict=True)
    ]
    here = device_profile(device, ranks_sharing(device))
    cluster = measure_cluster(control, device, min(control.gather(here.free_bytes)))
    with control.together(f"writing {output}"):
        if dist.get_rank() == 0:
            profile = Profile(
                *(fingerprint(config), dtype),
                **shape,
                items=tuple(items),
                devices=(here,),
                versions=versions(),
                stage=stage,
            )
            profile.save(output / PROFILE)
            try:
                write_whole(output / CLUSTER, json.dumps(cluster.to_dict(), indent=2) + "\n")
            except OSError as error:
                why = f"{error.strerror}; give a directory with room and the right to write"
                raise ValueError(f"--output_dir {output}: {why}.") from error


if __name__ == "__main__":
    sys.exit(main())
