"""Islands at equal total work: the held-out loss of N = 1, 2, 4, 8, with the learning rate times N and without.

    python tests/benchmarks/averaging_islands.py [--work 768] [--every-steps 24] [--seeds 0 1]

Training is real: a small Llama learns the standard library's code, byte by byte, with plain SGD. All N islands together
take ``--work`` steps, each on its own share, and average every ``--every-steps``: N islands are done after 1/N of the
time. Then what the end of training must not depend on: four islands whose training ends at a round, one step before and
one step after, with the outer "mean" and "nesterov". Losses do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from facts import facts

from paceline.data import standard_library
from support.archipelago import Island, lighthouses, run_islands

ISLANDS = 4
"""Of the comparisons at the end of training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=int, default=768, help="steps of all islands together")
    parser.add_argument("--every-steps", type=int, default=24, help="from round to round")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=0.125, help="of one island")
    parser.add_argument("--island-learning-rate", type=float, default=1.0, help='in the comparisons with "nesterov"')
    parser.add_argument("--compare", nargs="+", default=["islands", "ends"], choices=["islands", "ends"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    train, held_out = data(args)
    runs = cases(args)
    found: dict[str, Any] = {}
    for name, (islands, steps, rate, section) in runs.items():
        losses = [trained(args, islands, steps, rate, section, seed, train, held_out) for seed in args.seeds]
        found[name] = {
            "islands": islands,
            "steps": steps,
            "learning_rate": rate,
            "averaging": section,
            "held_out_loss": [round(loss, 4) for loss in losses],
            "mean": round(statistics.mean(losses), 4),
        }
        print(name, json.dumps(found[name]), flush=True)
        args.output.write_text(json.dumps({"found": found, **facts(args)}, indent=2) + "\n")


def cases(args: argparse.Namespace) -> dict[str, tuple[int, int, float, dict[str, Any]]]:
    """By name: islands, steps of each, learning rate, and what the section has beside the usual."""
    rate, mean = args.learning_rate, {"first_round": "mean"}
    found: dict[str, tuple[int, int, float, dict[str, Any]]] = {}
    for number in (1, 2, 4, 8) if "islands" in args.compare else ():
        found[f"{number}, rate x N"] = number, args.work // number, rate, mean
        if number > 1:
            found[f"{number}, same rate"] = number, args.work // number, rate, {**mean, "scale_learning_rate": False}
    if "ends" not in args.compare:
        return found
    whole = args.work // ISLANDS
    found["4, best first"] = ISLANDS, whole, rate, {"first_round": "best"}
    for more in (-1, 1):
        found[f"mean, {more:+d} step"] = ISLANDS, whole + more, rate, mean
    for more in (0, -1, 1):
        found[f"nesterov, {more:+d} step"] = ISLANDS, whole + more, args.island_learning_rate, {"outer": "nesterov"}
    return found


def data(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of bytes to learn from, and of files that are held out."""

    def blocks(paths: Any) -> torch.Tensor:
        text = b"".join(path.read_bytes() for path in paths)
        rows = len(text) // args.block_size
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: rows * args.block_size].view(rows, -1)

    train, held_out = (blocks(paths) for paths in standard_library.split(standard_library.source_files(), 10))
    return train, held_out[:: max(1, len(held_out) // 256)][:256]


def trained(
    args: argparse.Namespace,
    islands: int,
    steps: int,
    rate: float,
    section: dict[str, Any],
    seed: int,
    train: torch.Tensor,
    held_out: torch.Tensor,
) -> float:
    """The held-out loss in the end."""
    with lighthouses(1) as (light,):
        averaging = {
            "lighthouse": light,
            "min_islands": islands,
            "every_tokens": args.every_steps * args.batch_size * args.block_size,
            "grace_s": 600.0,
            "decay_tokens": args.work * args.batch_size * args.block_size,
            **section,
        }
        config = {
            "train_micro_batch_size_per_gpu": args.batch_size,
            "optimizer": {"type": "SGD", "params": {"lr": rate}},
            "gradient_clipping": 1.0,
            "steps_per_print": None,
            "paceline": {"averaging": averaging},
        }
        jobs = []
        for number in range(islands):
            order = torch.Generator().manual_seed(1000 * seed + number)
            share = train[number::islands]
            rows = share[torch.randint(0, len(share), (steps, args.batch_size), generator=order)]
            jobs.append(Island(island, 1, (config, args.hidden_size, seed, rows, held_out)))
        losses = [ranks[0] for ranks in run_islands(jobs)]
    assert len(set(losses)) == 1, losses  # they have the same model
    return float(losses[0])


def island(config: dict[str, Any], hidden_size: int, seed: int, batches: torch.Tensor, held_out: torch.Tensor) -> float:
    """Train on ``batches`` (steps, rows, tokens); the held-out loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import paceline

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            max_position_embeddings=batches.shape[-1],
            initializer_range=0.08,
        )
    )
    engine = paceline.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    for rows in batches:
        ids = rows.long()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.finish_averaging()
    with torch.no_grad():
        losses = [model(input_ids=rows.long(), labels=rows.long()).loss.item() for rows in held_out.split(64)]
    engine.destroy()
    return statistics.mean(losses)


if __name__ == "__main__":
    main()
