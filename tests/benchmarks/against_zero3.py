"""Step time, bytes sent and loss of ZeRO-1, ZeRO-3, FSDP2, pipelines and islands over slow links.

    python tests/benchmarks/against_zero3.py [--links 100 1000 10000] [--contestants zero3 paceline] [--lora] [--check]

Needs root: four hosts of tests/lab, one rank each. The same Llama, data, batches of 16 rows and AdamW for all:
DeepSpeed ZeRO-3 and ZeRO-1, FSDP2, DeepSpeed's pipeline, ours ("paceline", and with a format: "paceline+int8"), and
islands that average every ``--every-steps`` steps, beside training. Data parallel contestants compute their four rows
at once and reduce once a step; pipelines take a row a micro-batch.

The lab stands for Llama-3.2-3B (its decoder layers: 2.82e9 parameters, hidden size 3072) on one A100 a host that
reaches 150 TFLOP/s, with rows of 2048 tokens. The lab's model has fewer parameters, and as many times fewer elements in
the hidden states of a row, both in bf16; links are slower by that factor, so that every message takes as long as there.
Layers sleep for what they would compute (tests/lab/against.py). With ``--pace`` time runs faster or slower, for links
and layers alike: steps of half an hour would not be waited for. Seconds in the result are those that the lab stands
for: measured ones times the pace. What Python takes is not scaled, and weighs more at a fast pace.

``--check`` is the same in float32, with no limits and without sleeping: losses of all contestants must be equal.
``--curve`` trains for ``--steps`` without limits for held-out losses: ours, with each format, and islands. Loss after
equal time is read off these, since what a step computes does not depend on its links.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from facts import facts
from natural_gradient import texts

from lab.hosts import Hosts, available

JOB = Path(__file__).resolve().parent.parent / "lab" / "against.py"
PORT = 29510
PARAMETERS, HIDDEN, LENGTH, FLOPS = 2.82e9, 3072, 2048, 150e12
"""What the lab stands for."""
STEPS = {"zero3": (1, 2), "zero1": (1, 2), "fsdp2": (1, 2), "stock-pipeline": (1, 4), "islands": (99, 201)}
"""Warm-up and timed steps; of ours 14 and 6: it plans after the sixth and the twelfth. Of islands two periods of the
default 100 steps count, each with a round that goes on beside training; the last step, which waits for a third, does
not."""
PACES = {100: 10.0, 1000: 1.0, 10000: 0.5}
BURST_BYTES = 6 * 1024
"""Token-bucket size of a link, below the size of a message."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=["zero3", "zero1", "fsdp2", "stock-pipeline", "paceline", "paceline+int8", "islands+int8"],
    )
    parser.add_argument("--links", type=float, nargs="+", default=list(PACES), help="Mbit/s that the lab stands for")
    parser.add_argument("--pace", type=float, help="instead of 10, 1 and 0.5 for links of 0.1, 1 and 10 Gbit/s")
    parser.add_argument("--lora", action="store_true", help="train adapters that stand for rank 14")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--steps", type=int, help="instead of each contestant's own number")
    parser.add_argument("--every-steps", type=int, default=100, help="islands: from round to round")
    parser.add_argument("--overlap-steps", type=int, default=90, help="islands: that training goes on beside a round")
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--parallel", type=int, default=1, help="contestants at a time, each in a lab of its own")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--eval-rows", type=int, default=64)
    parser.add_argument("--evaluate-every", type=int, default=20, help="with --curve")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="is added to")
    args = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    model, scale = scaled(args)
    args.block_size = model["max_position_embeddings"]
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    kind = "check" if args.check else "curve" if args.curve else "lora" if args.lora else "full"
    links = [None] if args.check or args.curve else args.links
    with tempfile.TemporaryDirectory(prefix="against-") as folder, ThreadPoolExecutor(args.parallel) as pool:
        train, held_out = texts(args)
        torch.save({"train": train, "held_out": held_out}, Path(folder, "data.pt"))
        futures = {}
        for link in links:
            for contestant in args.contestants:
                job = job_of(args, model, scale, contestant, link)
                work = Path(folder, f"{contestant}-{link}")
                futures[contestant, link] = pool.submit(train_with, job, work, link)
        for (contestant, link), future in futures.items():
            row = summary(future.result(), contestant, args, link)
            found = result.setdefault(kind, {}).setdefault("no limit" if link is None else f"{link:g} Mbit/s", {})
            found[contestant] = row | {"commit": facts(args)["commit"]}
            result |= facts(args, "contestants", "links", "pace", "check", "curve", "lora", "steps", "parallel")
            result["lab"] = {"model": model, "parameters_share": scale, "paces": PACES}
            args.output.write_text(json.dumps(result, indent=2) + "\n")
            print(link, contestant, {key: value for key, value in row.items() if key != "losses"}, flush=True)


def scaled(args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Keys of the lab's ``LlamaConfig``, and the share of the parameters that its decoder layers have."""
    width = args.hidden_size
    intermediate = width * 8 // 3
    layers = args.layers * (3 * width * width + 3 * width * intermediate)  # half as many heads for keys and values
    share = layers / PARAMETERS
    return {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": round(share * LENGTH * HIDDEN / width),
        "tie_word_embeddings": False,
    }, share


def job_of(
    args: argparse.Namespace, model: dict[str, Any], share: float, contestant: str, link: float | None
) -> dict[str, Any]:
    name = contestant.partition("+")[0]
    warmup, timed = STEPS.get(name, (14, 6))
    pace = pace_of(args, link)
    forward_s = 2 * PARAMETERS * LENGTH / FLOPS / args.layers / pace
    return {
        "contestant": contestant,
        "model": model,
        "scale": share,
        "hosts": args.hosts,
        "rows": args.rows,
        "computed_at_once": args.rows if "pipeline" in name or name == "paceline" else args.hosts,
        "forward_s": 0.0 if link is None else forward_s,
        "bf16": not args.check,
        "lora": 1 if args.lora else 0,
        "learning_rate": args.learning_rate,
        "steps": args.steps or (6 if args.check else warmup + timed),
        "warmup": warmup,
        "mbit": None if link is None else link * share * pace,
        "evaluate_every": args.evaluate_every if args.curve else 0,
        "every_steps": args.every_steps,
        "overlap_steps": args.overlap_steps,
    }


def pace_of(args: argparse.Namespace, link: float | None) -> float:
    return args.pace or PACES.get(link, 1.0)  # type: ignore[arg-type]


def train_with(job: dict[str, Any], work: Path, link: float | None) -> list[list[dict[str, Any]]]:
    """The records of every rank."""
    work.mkdir()
    with Hosts(job["hosts"], mbit=job["mbit"], burst_bytes=BURST_BYTES) as hosts:
        job["lighthouse"] = f"{hosts.addresses[0]}:{PORT}"
        (work / "job.json").write_text(json.dumps(job))
        are_islands = job["contestant"].startswith("islands")
        if are_islands:
            cli = ["-m", "paceline.launch.cli", "lighthouse", "--host", hosts.addresses[0], "--port", str(PORT)]
            hosts.popen(0, [sys.executable, *cli])
            time.sleep(5)
        hosts.run([sys.executable, str(JOB), str(work)], timeout=4 * 3600, are_islands=are_islands)
    return [
        [json.loads(line) for line in (work / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(job["hosts"])
    ]


def summary(
    records: list[list[dict[str, Any]]], contestant: str, args: argparse.Namespace, link: float | None
) -> dict[str, Any]:
    warmup, _ = STEPS.get(contestant.partition("+")[0], (14, 6))
    pace = pace_of(args, link)
    losses = [statistics.mean(record["loss"] for record in step) for step in zip(*records, strict=True)]
    if args.curve:
        curve = [[record["step"], record["held_out_loss"]] for record in records[0] if "held_out_loss" in record]
        return {"held_out_losses": curve}
    row: dict[str, Any] = {"losses": losses, "pace": pace}
    if not args.check:
        seconds = [max(record["seconds"] for record in step) for step in zip(*records, strict=True)][warmup:]
        are_islands = contestant.startswith("islands")  # some of their steps have a round
        last = -1 if are_islands else None
        seconds = seconds[:last]
        sent = [[record["sent_bytes"] for record in rank[warmup:][:last]] for rank in records]
        row["step_s"] = pace * (statistics.mean(seconds) if are_islands else statistics.median(seconds))
        row["slowest_step_s"] = pace * max(seconds)
        row["sent_bytes_a_step"] = [round(statistics.mean(rank)) for rank in sent]
    return row


if __name__ == "__main__":
    main()
