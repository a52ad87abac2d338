"""Steps that keep activations, or compute them again before their gradient arrives, or after, turn by turn.

    OMP_NUM_THREADS=1 python tests/benchmarks/early_recomputation.py [--hosts 4] [--rounds 8]

Needs root (tests/lab). A Llama trains on as many emulated hosts as there are stages, one layer each, all of them
recomputed. The same engine runs all ways, turn by turn: within backwards ("late"); while a stage waits, where the last
one keeps what it needs next ("early"); and with everything kept, as memory allows ("kept"). Computing is emulated by
sleeping: a forward takes ``--forward-ms``, repeated or not, and what then is left of a backward twice that. Sockets,
schedules, checkpoints and their recomputation are real. In the worlds with a limit a message takes about as long as a
forward.

``seconds`` are medians of steps, ``faster`` medians over the rounds of the late step by another, and ``simulated_s``
steps that are simulated with what was measured in them. ``predicted_s`` is a step that keeps everything, from what was
measured while nothing was kept, and computed again late or early.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from lab.hosts import Hosts, available
from lab.training import mbit

HIDDEN, LENGTH = 128, 256
BURST_BYTES = 16 * 1024
"""Less than a message, which else would go through at once after a pause."""

MUCH = 1e12
"""Bytes."""

PATIENCE_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=mbit, nargs="+", default=[None, 25.0], help="of every host, or off")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "eager"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=8, help="after one that does not count")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(json.loads(args.child))
        return
    if reason := available():
        sys.exit(reason)
    rows = []
    for rate in args.mbit:
        world = {"stages": args.hosts, "forward_s": args.forward_ms / 1e3, "rounds": args.rounds}
        world |= {"schedules": args.schedules, "micro_batches": args.micro_batches}
        with Hosts(args.hosts, mbit=rate, burst_bytes=BURST_BYTES) as hosts:
            command = [sys.executable, __file__, "--child", json.dumps(world)]
            lines = hosts.run(command, timeout=PATIENCE_S)[0].splitlines()
        for line in lines:
            if line.startswith("found "):
                rows.append({"mbit": rate, **json.loads(line.removeprefix("found "))})
                print(json.dumps(rows[-1]), flush=True)
    load = [round(value, 1) for value in os.getloadavg()]
    result = {"emulated_compute": True, "early": rows, "load_average_at_end": load, **facts(args, "child")}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


def train(world: dict[str, Any]) -> None:
    """All schedules and numbers of micro-batches, all ways in turn, on every host."""
    import torch
    from transformers import LlamaConfig

    import paceline

    class Slow(torch.autograd.Function):
        """Nothing, whose backward takes a while."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * world["forward_s"])
            return gradient

    def slow(module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        time.sleep(world["forward_s"])
        slowed: torch.Tensor = Slow.apply(*inputs)
        return slowed

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=world["stages"],
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=LENGTH,
    )
    drawn = torch.Generator().manual_seed(0)
    for schedule in world["schedules"]:
        for number in world["micro_batches"]:
            ds_config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": number,
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},  # all steps compute the same
                "steps_per_print": None,
                "pipeline": {"activation_checkpoint_interval": 1},
                "paceline": {"pipeline": {"stages": world["stages"], "schedule": schedule, "partition": "uniform"}},
            }
            engine, *_ = paceline.initialize(model=config, config=ds_config)
            for layer in engine.module.anatomy.layers_of(engine.module.models[0]):
                if list(layer.parameters()):
                    layer.mlp.register_forward_pre_hook(slow)
            ids = torch.randint(64, (number, 1, LENGTH), generator=drawn)
            row = all_ways(engine, [{"input_ids": each, "labels": each} for each in ids], world["rounds"])
            engine.destroy()
            if os.environ["RANK"] == "0":
                print("found " + json.dumps({"schedule": schedule, "micro_batches": number, **row}), flush=True)


def all_ways(engine: Any, batches: list[Any], rounds: int) -> dict[str, Any]:
    """Seconds of steps, each way in turn."""
    from paceline.planning.kept_activations import as_kept
    from paceline.runtime.early_room import EarlyRoom
    from paceline.runtime.measured_costs import MeasuredCosts
    from paceline.schedules.keeping import Keeping
    from paceline.schedules.simulate import simulate

    class Waiting(EarlyRoom):
        def choose(self, program: Any, most: Any) -> Keeping:
            found = super().choose(program, most)
            if not engine.is_last_stage():
                self._meter.recorder.keeps({0: 0.0})
                found = found._replace(kept={})
            return found

    meter = engine.meter
    rooms = {"late": EarlyRoom(meter, lambda: 0.0), "early": Waiting(meter, lambda: MUCH)}
    rooms["kept"] = EarlyRoom(meter, lambda: MUCH)
    seconds: dict[str, list[float]] = {name: [] for name in rooms}
    costs = {name: (MeasuredCosts((tuple(range(engine.num_stages)),)), dict[Any, int]()) for name in rooms}
    losses, norms, simulated, predicted = set[float](), set[float](), dict[str, float](), dict[str, float]()
    for turn in range(-1, rounds):
        for name, room in rooms.items():
            engine.executor.early_room = room
            engine.train_batch(iter(batches))  # the first one of an engine tells what there is room for
            meter.recorder.forget()
            begun_s = time.perf_counter()
            losses.add(engine.train_batch(iter(batches)).item())
            took_s = time.perf_counter() - begun_s
            norms.add(float(engine.get_global_grad_norm()))
            known, after = costs[name]
            reports = engine.reports.gather(after)
            if turn >= 0:
                assert engine.executor.recomputes_early == (name != "late")
                shares = meter.recorder.steps()[-1].kept_shares
                assert shares == {0: float(name == "kept" or (name == "early" and engine.is_last_stage()))}
                seconds[name].append(took_s)
            if engine.global_rank == 0:
                known.update(reports)
                measured = known.costs(engine.cut)
                simulated[name] = simulate(engine.schedule, measured).makespan_s
                again = replace(measured.again, room_bytes=(MUCH,) * engine.num_stages)
                whole = as_kept(replace(measured, again=again), engine.schedule)
                predicted[name] = simulate(engine.schedule, whole).makespan_s
    assert len(losses) == len(norms) == 1, "what is kept changes a number"
    ratios = {
        name: [late / other for late, other in zip(seconds["late"], seconds[name], strict=True)]
        for name in ("early", "kept")
    }
    return {
        "seconds": {name: round(statistics.median(each), 4) for name, each in seconds.items()},
        "faster": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "quartiles": {
            name: [round(value, 3) for value in statistics.quantiles(each, n=4)[::2]] for name, each in ratios.items()
        },
        "simulated_s": {name: round(each, 4) for name, each in simulated.items()},
        "predicted_s": {name: round(predicted[name], 4) for name in ("late", "early") if predicted},
    }


if __name__ == "__main__":
    main()
