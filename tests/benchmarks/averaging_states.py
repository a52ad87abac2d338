"""What becomes of the optimizer's states at a round: four islands that keep, average or reset them.

    python tests/benchmarks/averaging_states.py [--seeds 1 2 3] [--steps 240] [--every-steps 20]

Training, data and model are those of ``averaging.py``, over links without a limit: what counts is the loss after so
many steps, not the time. Each optimizer and each choice gets as many learning rates, on the first seed; the one with
the smallest final held-out loss trains the other seeds too. Rounds are frequent, so that the choice matters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from averaging import train_with
from facts import facts
from natural_gradient import texts

from lab.hosts import available

CHOICES = ("keep", "average", "reset")
OPTIMIZERS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "AdamW": ({"betas": [0.9, 0.95], "torch_adam": True}, [3e-3, 1e-2]),
    "SGD": ({"momentum": 0.9}, [0.5, 1.0]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every-steps", type=int, default=20, help="from round to round")
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="of a host")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--eval-rows", type=int, default=192)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    args.mbit, args.island_steps = None, args.steps
    if reason := available():
        sys.exit(reason)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="averaging-") as folder:
        data = Path(folder, "data.pt")
        train, held_out = texts(args)
        torch.save({"train": train, "held_out": held_out, "vocab_size": args.vocab_size}, data)

        def loss_of(optimizer: str, choice: str, rate: float, seed: int) -> float:
            config = config_of(args, optimizer, choice, rate)
            curve = train_with(args, f"{optimizer}-{choice}-{rate}-{seed}", config, Path(folder), data, seed)["curve"]
            loss: float = curve[-1]["held_out_loss"]
            print(optimizer, choice, rate, seed, loss, flush=True)
            return loss

        for optimizer in args.optimizers:
            for choice in CHOICES:
                tried = {rate: loss_of(optimizer, choice, rate, args.seeds[0]) for rate in OPTIMIZERS[optimizer][1]}
                best = min(tried, key=lambda rate: tried[rate])
                losses = [tried[best], *(loss_of(optimizer, choice, best, seed) for seed in args.seeds[1:])]
                found.setdefault(optimizer, {})[choice] = {
                    "tuning": {f"{rate:g}": loss for rate, loss in tried.items()},
                    "learning_rate": best,
                    "held_out_loss": losses,
                    "mean": round(statistics.mean(losses), 4),
                }
                args.output.write_text(json.dumps({"found": found, **facts(args, "optimizers")}, indent=2) + "\n")


def config_of(args: argparse.Namespace, optimizer: str, choice: str, rate: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": optimizer, "params": {**OPTIMIZERS[optimizer][0], "lr": rate}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "paceline": {
            "averaging": {
                "min_islands": args.hosts,
                "every_tokens": args.every_steps * args.batch_size * args.block_size,
                "optimizer_state": choice,
                "scale_learning_rate": False,
            }
        },
    }


if __name__ == "__main__":
    main()
