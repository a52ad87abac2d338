"""Time to a loss over slow links: four hosts that reduce gradients every step, against four islands that average.

    python tests/benchmarks/averaging.py [--mbit 50] [--steps 160] [--island-steps 480] [--contestants islands+int4]

Needs root: every host is a network namespace with a limited sending side (tests/lab). Training is real: a small Llama
learns the standard library's code, each host on its own share; four ranks share this machine's cores, so that computing
is slower than on hosts of their own, which is to the disadvantage of the islands. Seconds are those of training: host 0
evaluates in between, while the clock stands, and so do the others where they wait for it. Bytes are what a host's
network device has sent, all protocols included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from facts import facts
from natural_gradient import texts

from lab.hosts import DEVICE, Hosts, available
from paceline.comm.formats import FORMATS

JOB = Path(__file__).resolve().parent.parent / "lab" / "islands.py"
TESTS = JOB.parent.parent
PORT = 29510


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contestants", nargs="+", default=["all-reduce", "all-reduce+ng", "islands", "islands+ng"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=160, help="with gradients reduced every step")
    parser.add_argument("--island-steps", type=int, default=480)
    parser.add_argument("--every-steps", type=int, default=140, help="from round to round")
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="of a host")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--eval-rows", type=int, default=192)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--ng-learning-rate", type=float, default=1.0)
    parser.add_argument("--outer", default="mean", choices=["mean", "nesterov"])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="averaging-") as folder:
        data = Path(folder, "data.pt")
        train, held_out = texts(args)
        torch.save({"train": train, "held_out": held_out, "vocab_size": args.vocab_size}, data)
        for name in args.contestants:
            found[name] = train_with(args, name, config_of(args, name), Path(folder), data)
            print(name, json.dumps(found[name]["curve"][-1]), flush=True)
            result = {"contestants": found, "summary": summary(found), **facts(args, "contestants")}
            args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["summary"], indent=2))


def config_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    natural = "+ng" in name
    rate = args.ng_learning_rate if natural else args.learning_rate
    section: dict[str, Any] = {"natural_gradient": {"alpha": 1.0}} if natural else {}
    if name.startswith("islands"):
        section["averaging"] = {
            "min_islands": args.hosts,
            "every_tokens": args.every_steps * args.batch_size * args.block_size,
            "outer": args.outer,
            "scale_learning_rate": False,
            "format": next((part for part in name.split("+") if part in FORMATS), None),
        }
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "SGD", "params": {"momentum": 0.9, "lr": rate}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "paceline": section,
    }


def train_with(
    args: argparse.Namespace, name: str, config: dict[str, Any], folder: Path, data: Path, seed: int = 0
) -> dict[str, Any]:
    """What the hosts wrote down: host 0's curve, and the bytes that each has sent."""
    averaging = config["paceline"].get("averaging")
    are_islands = averaging is not None
    steps = args.island_steps if are_islands else args.steps
    with Hosts(args.hosts, mbit=args.mbit) as hosts:
        if are_islands:
            averaging["lighthouse"] = f"{hosts.addresses[0]}:{PORT}"
            cli = ["-m", "paceline.launch.cli", "lighthouse", "--host", hosts.addresses[0], "--port", str(PORT)]
            light = hosts.popen(0, [sys.executable, *cli])
            time.sleep(5)
        written = folder / f"{name}.json"
        written.write_text(json.dumps(config))
        jobs, outputs = [], []
        for host, address in enumerate(hosts.addresses):
            rank, world, master = (0, 1, address) if are_islands else (host, args.hosts, hosts.addresses[0])
            env = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": master, "MASTER_PORT": 20001, "LOCAL_RANK": 0}
            env |= {"LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1, "GLOO_SOCKET_IFNAME": DEVICE}
            env |= {"PACELINE_ISLAND": host} if are_islands else {}
            env["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            outputs.append(folder / f"{name}-{host}.jsonl")
            flags = {"config": written, "data": data, "output": outputs[-1], "steps": steps}
            flags |= {"warmup-steps": args.warmup_steps, "eval-every": args.eval_every}
            flags |= {"hidden-size": args.hidden_size, "seed": seed}
            command = [sys.executable, str(JOB), "--share", str(host), str(args.hosts)]
            command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
            log = (folder / f"{name}-{host}.log").open("w")
            jobs.append(hosts.popen(host, command, {key: str(value) for key, value in env.items()}, log))
        for host, job in enumerate(jobs):
            if job.wait():
                sys.exit(f"{name}, host {host}: {(folder / f'{name}-{host}.log').read_text()[-3000:]}")
        if are_islands:
            light.terminate()
    records = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    return {"curve": records[0], "sent_bytes": [record[-1]["sent_bytes"] for record in records], "steps": steps}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the final loss of those that reduce every step, and bytes a step; islands without and with natural
    gradients, until these have reached what those end with."""
    told: dict[str, Any] = {}
    for suffix in ("", "+ng"):
        every, islands = found.get(f"all-reduce{suffix}"), found.get(f"islands{suffix}")
        if every is None or islands is None:
            continue
        target, needed = every["curve"][-1]["held_out_loss"], every["curve"][-1]["seconds"]
        there = [r["seconds"] for r in islands["curve"] if r["held_out_loss"] <= target]
        bytes_a_step = [sum(of["sent_bytes"]) / of["steps"] for of in (every, islands)]
        told["with natural gradients" if suffix else "plain SGD"] = {
            "held_out_loss": target,
            "all_reduce_s": needed,
            "islands_s": there[0] if there else None,
            "times_as_fast": round(needed / there[0], 2) if there else None,
            "bytes_a_step": [round(number) for number in bytes_a_step],
            "bytes_ratio": round(bytes_a_step[0] / bytes_a_step[1], 1),
            "islands_final_loss": islands["curve"][-1]["held_out_loss"],
        }
    for name in (name for name in found if name.rpartition("+")[2] in FORMATS):
        own, every, exact = found[name], found.get("all-reduce"), found.get("islands")
        told[name] = {"final_loss": own["curve"][-1]["held_out_loss"]}
        if every is not None:
            told[name]["bytes_ratio"] = round(
                sum(every["sent_bytes"]) / every["steps"] / (sum(own["sent_bytes"]) / own["steps"]), 1
            )
        if exact is not None:
            losses = [of["curve"][-1]["held_out_loss"] for of in (own, exact)]
            told[name]["above_exact_islands_percent"] = round(100 * (losses[0] / losses[1] - 1), 3)
    if "islands" in found and "islands+ng" in found:
        plain, natural = found["islands"]["curve"][-1], found["islands+ng"]["curve"]
        there = next((record for record in natural if record["held_out_loss"] <= plain["held_out_loss"]), None)
        told["islands, without and with natural gradients"] = {
            "held_out_loss": plain["held_out_loss"],
            "steps": [plain["step"], there and there["step"]],
            "seconds": [plain["seconds"], there and there["seconds"]],
            "seconds_a_step": [round(last["seconds"] / last["step"], 3) for last in (plain, natural[-1])],
            "final_loss": [plain["held_out_loss"], natural[-1]["held_out_loss"]],
        }
    return told


if __name__ == "__main__":
    main()
