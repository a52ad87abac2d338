"""How long the end of a step takes on emulated hosts: reduction beside the last backwards or after them, and clipping.

    python tests/benchmarks/step_end.py [--stages 2] [--mbit 1000 300] [--compare overlap] [--rounds 7]

Needs root: every host is a network namespace with a limited sending side (tests/lab). Hosts that are more than the
stages are further replicas. Compute is emulated by sleeping; each layer has a weight of ``--layer-kib`` KiB whose
gradient is really computed, added up and reduced. Two engines live in the same processes and take turns:

* ``overlap``: gradients are reduced ``beside`` the computations that complete them, or ``after`` all of them.
* ``clipping``: gradients stay as they are (``plain``), or are ``clipped``.
* ``agreement``: every rank steps by the norm of its own gradients (``alone``), or by that of all (``agreed``), which is
  also how it learns of an overflow elsewhere.

``gain`` is by how much longer the second one's step takes than the first one's: the median over the rounds, each of
which is the mean of its steps.

On a machine with other work, `chrt --rr 5` before the command keeps that from the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lab.emulation import WIDTH, EmulatedLayer, Emulation, _take_weight_s, loss
from lab.hosts import Hosts, available
from lab.training import mbit

ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "overlap": {"beside": {"overlap_comm": True}, "after": {"overlap_comm": False}},
    "clipping": {"plain": {}, "clipped": {"clipping": 1.0}},
    "agreement": {"alone": {"agrees": False}, "agreed": {}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--mbit", type=mbit, nargs="+", default=[1000.0, 300.0], help="Mbit/s of every host, or off")
    parser.add_argument("--schedules", nargs="+", default=["zbh1"])
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--compare", choices=list(ARMS), default="overlap")
    parser.add_argument("--part-s", type=float, default=0.02, help="a stage's forward, and each half of its backward")
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--layer-kib", type=int, default=1024)
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of each engine in a round")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        run(args)
        return
    from facts import facts

    if reason := available():
        sys.exit(reason)
    rows = []
    for rate in args.mbit:
        for schedule in args.schedules:
            for zero in args.zero:
                rows.append(measure(args, rate, schedule, zero))
                print(json.dumps(rows[-1]), flush=True)
    load = [round(value, 1) for value in os.getloadavg()]
    result = {"emulated_compute": True, "step_end": rows, "load_average_at_end": load, **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(args: argparse.Namespace, rate: float | None, schedule: str, zero: int) -> dict[str, Any]:
    """Both engines in one setting."""
    with Hosts(args.hosts, mbit=rate) as hosts, tempfile.TemporaryDirectory(prefix="step-end-") as folder:
        output = Path(folder, "rounds.json")
        command = [sys.executable, __file__, "--schedules", schedule, "--zero", str(zero), "--output", str(output)]
        for name in ("stages", "micro_batches", "compare", "part_s", "layers", "layer_kib", "message_kib"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        hosts.run([*command, "--rounds", str(args.rounds), "--steps", str(args.steps)], timeout=600)
        seconds = json.loads(output.read_text())
    gains = sorted(second / first - 1 for first, second in zip(*seconds.values(), strict=True))
    return {
        "mbit": rate,
        "schedule": schedule,
        "zero": zero,
        **{f"{arm}_s": round(statistics.median(found), 4) for arm, found in seconds.items()},
        "gain": round(statistics.median(gains), 4),
        "gain_range": [round(gains[0], 4), round(gains[-1], 4)],
    }


class Layer(EmulatedLayer):
    """An emulated layer with a weight of some size: more rows, whose outputs nobody looks at."""

    def __init__(self, index: int, *times: float, num_bytes: int) -> None:
        import torch
        from torch import nn

        super().__init__(index, *times)
        self.linear = nn.Linear(WIDTH, num_bytes // (4 * WIDTH), bias=False)
        nn.init.zeros_(self.linear.weight)
        with torch.no_grad():
            nn.init.eye_(self.linear.weight[:WIDTH])
        self.linear.weight.register_hook(partial(_take_weight_s, index, times[-1]))
        self.linear.register_forward_hook(lambda module, inputs, output: output[:, :WIDTH])


def run(args: argparse.Namespace) -> None:
    """The job of one host."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.pipe import LayerSpec

    import paceline
    from lab.device import DEVICE

    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for half a minute
    deepspeed.init_distributed("gloo")
    emulation = Emulation.of(args.stages, [args.part_s], [2 * args.part_s], args.message_kib * 1024, args.micro_batches)
    times = [args.part_s / args.layers] * 3

    def engine_of(clipping: float = 0.0, agrees: bool = True, **zero: Any) -> Any:
        layers = [
            LayerSpec(Layer, index, *times, num_bytes=args.layer_kib * 1024)
            for index in range(args.stages * args.layers)
        ]
        net = paceline.PipelineModule(layers=layers, num_stages=args.stages, loss_fn=loss, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": args.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.001}},
            "gradient_clipping": clipping,
            "steps_per_print": None,
            "zero_optimization": {"stage": args.zero[0], "reduce_bucket_size": args.layer_kib * 256 - 1, **zero},
            "paceline": {"pipeline": {"schedule": args.schedules[0]}},
        }
        engine, *_ = paceline.initialize(model=net, model_parameters=list(net.parameters()), config=config)
        if not agrees:
            engine.optimizer._sums._groups = None, None
        return engine

    engines = {arm: engine_of(**changes) for arm, changes in ARMS[args.compare].items()}
    batches = cycle(emulation.batches)
    seconds: dict[str, list[float]] = {arm: [] for arm in engines}
    for number in range(-1, args.rounds):
        for arm, engine in engines.items():
            dist.barrier()
            begun_s = time.perf_counter()
            for _ in range(args.steps):
                DEVICE.begin_step(1.0)
                engine.train_batch(batches)
            dist.barrier()
            if number >= 0:
                seconds[arm].append((time.perf_counter() - begun_s) / args.steps)
    if dist.get_rank() == 0:
        args.output.write_text(json.dumps(seconds))
    dist.barrier()


if __name__ == "__main__":
    main()
