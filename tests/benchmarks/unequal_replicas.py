"""Replicas of different speed: a step with equal shares of the micro-batches, and with shares that follow the speeds.

    python tests/benchmarks/unequal_replicas.py [--speeds 1 0.5] [--stages 2] [--micro-batches 16]

Needs root: each rank is a host of tests/lab. Layers sleep for as long as a device of the replica's speed computes; the
engine, its messages and its reductions are real. After half of the steps the replicas exchange their speeds. The bound
is what a step would take if its micro-batches could be cut at will, and messages took no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.hosts import Hosts, available
from lab.training import mbit

SETTLED = 8
"""Last steps of a phase, whose median counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.5], help="one a replica")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=16, help="of a step and replica, where all have as many")
    parser.add_argument("--forward-s", type=float, default=0.02, help="of a stage, at speed 1")
    parser.add_argument("--backward-s", type=float, default=0.04)
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--mbit", type=mbit, default=1000.0, help="Mbit/s of every host, or off")
    parser.add_argument("--reshare-every", type=int, default=4, help="steps")
    parser.add_argument("--steps", type=int, default=20, help="of each phase")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if args.child:
        train(args)
        return
    if reason := available():
        sys.exit(reason)
    own = [part for part in sys.argv[1:] if part != "--child"]
    contestants: dict[str, Any] = {}
    with Hosts(args.stages * len(args.speeds), mbit=args.mbit) as hosts:
        for unequal in ("equal", "follows"):
            command = [sys.executable, __file__, *own, "--child", unequal]
            told = json.loads(hosts.run(command, timeout=600)[0].splitlines()[-1])
            contestants[unequal] = [summary(told[: args.steps]), summary(told[args.steps :])]
    result = {
        "emulated_compute": True,
        "bound_s": round(bound_s(args), 4),
        "phases": contestants,
        "times_equal": [
            round(a["step_s"] / b["step_s"], 3)
            for a, b in zip(contestants["equal"], contestants["follows"], strict=True)
        ],
        **facts(args, "child"),
    }
    print(json.dumps(result, indent=2))
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def bound_s(args: argparse.Namespace) -> float:
    """All replicas end at once: n_r (F + B) / speed_r plus the fill of each, whose n_r add up to a step's."""
    each = args.forward_s + args.backward_s
    fill = (args.stages - 1) * each
    total = args.micro_batches * len(args.speeds)
    return (total * each + fill * len(args.speeds)) / sum(args.speeds)


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of a phase's last steps, their shares, and after how many steps these ran."""
    shares = [step["shares"] for step in steps]
    changed = [number for number in range(1, len(shares)) if shares[number] != shares[number - 1]]
    seconds = [step["seconds"] for step in steps[-SETTLED:]]
    return {"step_s": round(statistics.median(seconds), 4), "shares": shares[-1], "changed_after": changed}


def train(args: argparse.Namespace) -> None:
    """On every rank: rank 0 prints what each step took, as JSON."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import paceline
    from lab.asynchronous import _batches, _model, emulate
    from lab.device import DEVICE
    from lab.emulation import Emulation
    from paceline.runtime.module import CausalLMPipeline

    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for half a minute
    deepspeed.init_distributed("gloo")
    emulation = Emulation.of(
        args.stages, [args.forward_s], [args.backward_s], args.message_kib * 1024, args.micro_batches
    )
    section: dict[str, Any] = {"stages": args.stages}
    if args.child == "follows":
        section["unequal_replicas"] = {"reshare_every": args.reshare_every}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "paceline": {"pipeline": section},
    }
    pipeline = CausalLMPipeline(_model("1f1b", emulation), num_stages=args.stages, partition="uniform")
    engine, *_ = paceline.initialize(model=pipeline, config=config)
    for held in engine.held:
        emulate(held.runner, emulation)
    replica, num_replicas, told = engine.grid.data_parallel_id, len(args.speeds), []
    (batch,) = _batches(1)
    for step in range(2 * args.steps):
        # In the second phase the next replica has the speed.
        DEVICE.begin_step(args.speeds[(replica + step // args.steps) % num_replicas])
        dist.barrier()
        begun = time.perf_counter()
        engine.train_batch(iter(lambda: batch, None)).item()
        told.append({"seconds": time.perf_counter() - begun, "shares": list(engine.replica_micro_batches)})
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    engine.destroy()


if __name__ == "__main__":
    main()
