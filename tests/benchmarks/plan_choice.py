"""Is the strategy that ``paceline plan`` puts first the fastest one? Planned, then trained, on ranks of this machine.

    deepspeed --num_gpus 2 tests/benchmarks/plan_choice.py [--model mixtral] [--rounds 20] [--hidden 256] [--layers 8]

The ranks measure layers and links (``paceline.launch.measure``), rank 0 plans with that (``paceline plan --write``),
and an engine is made from each JSON: pipelines, replicas and experts by ``paceline.initialize``, tensor parallelism,
which no pipeline runs, by ``deepspeed.initialize``. All live in the same processes, and every round each trains a step,
in another order: other work on the machine meets all alike. Then it is measured and planned once more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from facts import facts
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import paceline
from paceline.launch.cli import main as command
from paceline.launch.measure import CLUSTER, PROFILE, measure
from paceline.runtime.initialize import start_distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("llama", "mixtral"), default="llama")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--zero", type=int, choices=(0, 1), default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--without", nargs="*", default=[], help="names of strategies that are not trained")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    start_distributed()
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    directory = Path(shared[0])
    config = config_of(args)
    load = os.getloadavg()[0]
    before = planned(args, config, directory / "before")
    runnable = [found for found in before["plans"] if found["runs_here"] and found["name"] not in args.without]
    steps = {found["name"]: contestant(args, config, found) for found in runnable}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(args.warmup + args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken, cpu = timed(steps[name])
            if number >= args.warmup:
                seconds[name].append(taken)
                cpu_seconds[name].append(cpu)
    after = planned(args, config, directory / "after")
    if dist.get_rank() == 0:
        loads = {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)}
        found = summary(seconds, before, after)
        for name, values in cpu_seconds.items():
            found["strategies"][name]["processor_s"] = round(statistics.median(values), 4)
        result = {**found, "load": loads, **facts(args, "warmup")}
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def config_of(args: argparse.Namespace) -> Any:
    """Of the model."""
    heads = max(args.hidden // 64, 1)
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2} if args.model == "mixtral" else {}
    return (MixtralConfig if experts else LlamaConfig)(
        hidden_size=args.hidden,
        intermediate_size=(2 if experts else 4) * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=args.length,
        vocab_size=args.vocabulary,
        tie_word_embeddings=False,
        **experts,
    )


def planned(args: argparse.Namespace, config: Any, directory: Path) -> dict[str, Any]:
    """What ``paceline plan`` says of what the ranks measure now; its JSON files are in ``directory``. Collective."""
    measure(
        config,
        directory,
        micro_batch_size=args.micro_batch_size,
        sequence_length=args.length,
        gradient_checkpointing=False,
    )
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        config.save_pretrained(directory)
        argv = ["plan", str(directory), "--cluster", str(directory / CLUSTER), "--profile", str(directory / PROFILE)]
        argv += ["--train-batch-size", str(args.batch_size), "--micro-batch-size", str(args.micro_batch_size)]
        argv += ["--seq-length", str(args.length), "--zero", str(args.zero), "--write", str(directory), "--json"]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert command(argv) == 0
        found = [json.loads(out.getvalue())]
    dist.broadcast_object_list(found)
    return found[0]


def contestant(args: argparse.Namespace, config: Any, plan: dict[str, Any]) -> Callable[[], Any]:
    """A function that trains a step of one strategy, on random tokens."""
    ds_config = json.loads(Path(plan["file"]).read_text())
    ds_config["optimizer"]["params"] = {"lr": 1e-4, "torch_adam": True}
    ds_config |= {"gradient_clipping": 1.0, "steps_per_print": None}
    shape = (plan["micro_batches"], args.micro_batch_size, args.length)

    def samples(replica: int) -> torch.Tensor:
        return torch.randint(3, args.vocabulary, shape, generator=torch.Generator().manual_seed(replica))

    if plan["tensor"] == 1:
        engine, *_ = paceline.initialize(model=config, config=ds_config)
        ids = samples(engine.grid.data_parallel_id)
        return lambda: engine.train_batch(iter([{"input_ids": m, "labels": m} for m in ids]))
    ids = samples(dist.get_rank() // plan["tensor"])
    model = AutoModelForCausalLM.from_config(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)

    def step() -> None:
        for m in ids:
            engine.backward(engine(input_ids=m, labels=m, use_cache=False).loss)
            engine.step()

    return step


def timed(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a step, and of processor time in it: each on the rank where that is most."""
    dist.barrier()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    step()
    taken = torch.tensor([time.perf_counter() - begun, time.process_time() - begun_cpu])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken[0]), float(taken[1])


def summary(seconds: dict[str, list[float]], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Predicted and measured seconds of each strategy, and what the choice costs against the fastest."""
    predicted = [{found["name"]: found["step_s"] for found in plans["plans"]} for plans in (before, after)]
    measured = {name: statistics.median(values) for name, values in seconds.items()}
    choice = min(seconds, key=lambda name: predicted[0][name])
    fastest = min(seconds, key=lambda name: measured[name])
    # Of steps of the same round: what else the machine did is alike in both.
    behind = [own / other for own, other in zip(seconds[choice], seconds[fastest], strict=True)]
    strategies = {}
    for name, values in seconds.items():
        ordered = sorted(values)
        strategies[name] = {
            "measured_s": round(measured[name], 4),
            "measured_quartiles_s": [round(ordered[len(values) // 4], 4), round(ordered[3 * len(values) // 4], 4)],
            "predicted_s": round(predicted[0][name], 4),
            "predicted_afterwards_s": round(predicted[1][name], 4),
            "error": round(predicted[0][name] / measured[name] - 1, 4),
            "error_afterwards": round(predicted[1][name] / measured[name] - 1, 4),
            "terms_s": {
                term: round(value, 4)
                for found in before["plans"]
                if found["name"] == name
                for term, value in found["terms"].items()
                if value
            },
        }
    return {
        "choice": choice,
        "choice_afterwards": min(seconds, key=lambda name: predicted[1][name]),
        "fastest": fastest,
        "choice_behind_fastest": round(measured[choice] / measured[fastest] - 1, 4),
        "choice_behind_fastest_by_round": round(statistics.median(behind) - 1, 4),
        "strategies": strategies,
    }


if __name__ == "__main__":
    main()
