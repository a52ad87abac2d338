"""Natural gradients against plain SGD and AdamW: a small Llama learns the standard library's code from scratch.

    torchrun --nproc_per_node 1 tests/benchmarks/natural_gradient.py [--seeds 1 2 3] [--steps 200]

Each method gets as many learning rates, on the first seed; the one with the smallest final held-out loss trains the
other seeds too. A seed is another start and another order of the samples, the same for all methods. All have the same
warm-up and cosine. The engine is DeepSpeed's, without a pipeline, on one process. Runs that are in ``--work`` are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from facts import facts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.data import standard_library

ROOT = Path(__file__).resolve().parent.parent.parent
MOMENTUM = {"momentum": 0.9}
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": {"type": "SGD", "params": MOMENTUM}, "rates": [0.3, 1.0, 2.0, 4.0]},
    "SGD, natural gradient": {
        "optimizer": {"type": "SGD", "params": MOMENTUM},
        "natural_gradient": {"alpha": 1.0},
        "rates": [0.3, 1.0, 3.0, 5.0],
    },
    "AdamW": {
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "torch_adam": True}},
        "rates": [3e-3, 1e-2, 2e-2, 3e-2],
    },
}
COLOURS = {"SGD": "black", "SGD, natural gradient": "#0072b2", "AdamW": "#d55e00"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-rows", type=int, default=192)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "natural_gradient")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="and a picture, .svg")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train, held_out = texts(args)
    found: dict[str, dict[str, Any]] = {}
    for method in args.methods:
        tried = {rate: run(args, method, rate, args.seeds[0], train, held_out) for rate in METHODS[method]["rates"]}
        best = min(tried, key=lambda rate: _final(tried[rate]))
        curves = {str(args.seeds[0]): tried[best]}
        curves |= {str(seed): run(args, method, best, seed, train, held_out) for seed in args.seeds[1:]}
        found[method] = {
            "tuning": {f"{rate:g}": _final(curve) for rate, curve in tried.items()},
            "learning_rate": best,
            "held_out_loss": curves,
        }
    result = {"methods": found, "final": final(args, found), **facts(args, "work", "methods")}
    result["recipes"] = {name: {k: v for k, v in METHODS[name].items() if k != "rates"} for name in args.methods}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["final"], indent=2))
    draw(args, found, args.output.with_suffix(".svg"))


def texts(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of tokens to learn from, and of files that are held out."""
    parts = standard_library.split(standard_library.source_files(), 10)
    train, held_out = ([path.read_text(errors="ignore") for path in paths] for paths in parts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(train, trainers.BpeTrainer(vocab_size=args.vocab_size, show_progress=False))

    def blocks(documents: list[str]) -> torch.Tensor:
        ids = [token for encoded in tokenizer.encode_batch(documents) for token in encoded.ids]
        rows = len(ids) // args.block_size
        return torch.tensor(ids[: rows * args.block_size]).view(rows, args.block_size)

    return blocks(train), blocks(held_out)[: args.eval_rows]


def run(
    args: argparse.Namespace, method: str, rate: float, seed: int, train: torch.Tensor, held_out: torch.Tensor
) -> list[float | None]:
    """Held-out loss every ``--eval-every`` steps, None from where it has left all bounds."""
    file = args.work / f"{method.replace(', ', '_').replace(' ', '_')}-{rate:g}-{seed}-{args.steps}.json"
    if file.exists():
        curve: list[float | None] = json.loads(file.read_text())
        return curve
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=args.vocab_size,
            max_position_embeddings=args.block_size,
            initializer_range=0.08,
        )
    )
    recipe = METHODS[method]
    section = {name: recipe[name] for name in ("natural_gradient",) if name in recipe}
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {**recipe["optimizer"], "params": {**recipe["optimizer"]["params"], "lr": rate}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "paceline": section,
    }
    engine, optimizer, *_ = paceline.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    order = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(args.steps):
        share = min(1.0, (step + 1) / args.warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        ids = train[torch.randint(0, len(train), (args.batch_size,), generator=order)]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if (step + 1) % args.eval_every == 0:
            with torch.no_grad():
                losses = [model(input_ids=rows, labels=rows).loss.item() for rows in held_out.split(64)]
            mean = statistics.mean(losses)
            curve.append(round(mean, 5) if math.isfinite(mean) and mean < 20 else None)
            if curve[-1] is None:
                break
    engine.destroy()
    print(f"{method} rate {rate:g} seed {seed}: {curve[-1]}", flush=True)
    file.write_text(json.dumps(curve))
    return curve


def _final(curve: list[float | None]) -> float:
    return math.inf if curve[-1] is None else curve[-1]


def final(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Final losses, and the share of the steps after which a method is where plain SGD ends, by seed."""
    summary: dict[str, Any] = {}
    plain = found.get("SGD", {}).get("held_out_loss", {})
    for method, of in found.items():
        losses = {seed: curve[-1] for seed, curve in of["held_out_loss"].items()}
        summary[method] = {"held_out_loss": losses, "mean": round(statistics.mean(losses.values()), 4)}
        if method != "SGD" and plain:
            shares = {}
            for seed, curve in of["held_out_loss"].items():
                there = [place for place, loss in enumerate(curve, 1) if loss <= plain[seed][-1]]
                shares[seed] = there[0] * args.eval_every / args.steps if there else None
            summary[method]["share_of_steps_to_plain_sgds_loss"] = shares
    return summary


def draw(args: argparse.Namespace, found: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean and range of the seeds."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "paceline", "svg.fonttype": "none", "font.size": 8})
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = figure.subplots()
        for method, of in found.items():
            at_steps = list(zip(*of["held_out_loss"].values(), strict=True))
            steps = [args.eval_every * (place + 1) for place in range(len(at_steps))]
            low, mean, high = ([kind(at) for at in at_steps] for kind in (min, statistics.mean, max))
            label = f"{method} ({of['learning_rate']:g})"
            axes.plot(steps, mean, color=COLOURS[method], linewidth=1.2, label=label)
            axes.fill_between(steps, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel("held-out loss")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
