"""What a rank of ``tests/benchmarks/averaging.py`` does: train a small Llama on its share of the data, and write down
how far it is, and how many bytes this host has sent.

Started on a host of a lab, as one rank of a world, or as a world of its own that averages with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from lab.hosts import DEVICE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="of DeepSpeed")
    parser.add_argument("--data", type=Path, required=True, help="train and held_out, blocks of tokens")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--share", type=int, nargs=2, required=True, metavar=("NUMBER", "SHARES"))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--eval-every", type=int, required=True)
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the model at the start, and of the order of the samples"
    )
    parser.add_argument("--die-at", type=int, default=-1, help="step after which this rank kills itself")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.load(args.data)
    number, shares = args.share
    train, held_out = data["train"][number::shares], data["held_out"]
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=data["vocab_size"],
            max_position_embeddings=train.shape[1],
            initializer_range=0.08,
        )
    )
    config = json.loads(args.config.read_text())
    engine, optimizer, *_ = paceline.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    rates = [group["lr"] for group in optimizer.param_groups]
    order = torch.Generator().manual_seed(1000 * args.seed + number)
    batch = config["train_micro_batch_size_per_gpu"]
    tells = int(os.environ.get("PACELINE_ISLAND", os.environ["RANK"])) == 0
    out = args.output.open("w")
    sent = sent_bytes()
    seconds, begun = 0.0, time.monotonic()
    for step in range(1, args.steps + 1):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, step / args.warmup_steps)
        ids = train[torch.randint(0, len(train), (batch,), generator=order)]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if step == 1:  # the clock starts when all are there
            seconds, begun = 0.0, time.monotonic()
        if step == args.steps and getattr(engine, "averager", None) is not None:
            engine.finish_averaging()
        if step == args.die_at:
            os.kill(os.getpid(), 9)
        if step % args.eval_every == 0 or step == args.steps:
            seconds += time.monotonic() - begun
            record = {"step": step, "seconds": round(seconds, 2), "sent_bytes": sent_bytes() - sent}
            record["loss"] = round(loss.item(), 4)
            if tells:
                with torch.no_grad():
                    losses = [model(input_ids=rows, labels=rows).loss.item() for rows in held_out.split(64)]
                record["held_out_loss"] = round(statistics.mean(losses), 4)
            averager = getattr(engine, "averager", None)
            record["rounds"] = None if averager is None else averager.round
            out.write(json.dumps(record) + "\n")
            out.flush()
            begun = time.monotonic()


def sent_bytes() -> int:
    """Of this network namespace, since it was made."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return int(counters[8])


if __name__ == "__main__":
    main()
