"""How well one stage on one GPU is predicted: seconds of a step and memory, said by the commands and measured.

    python tests/benchmarks/prediction_on_gpu.py [--cases 8b 8b-recomputed …]

Each case is a model of random weights in one stage, bf16 with fp32 masters and AdamW. ``paceline.launch.measure``
measures its layers, ``paceline plan`` predicts a step and its memory from them, ``paceline fit`` says the memory from
the config alone; then the model trains, in a process of its own. ``peak`` is the most that tensors took at a time
(``max_memory_allocated``), ``reserved`` what the allocator held. ``--cases tiny`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from facts import facts

GIB = 2**30


class Case(NamedTuple):
    """A model by its config, the samples of a step, and whether its layers are recomputed."""

    model_type: str
    config: dict[str, Any]
    length: int
    micro_batch_size: int = 1
    micro_batches: int = 8
    is_recomputed: bool = False


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}
LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
QWEN3_MOE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 3,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024, "vocab_size": 50257}

CASES = {
    "8b": Case("llama", LLAMA_8B, 4096),
    "8b-recomputed": Case("llama", LLAMA_8B, 4096, is_recomputed=True),
    "8b-head": Case("llama", {**LLAMA_8B, "num_hidden_layers": 2, "vocab_size": 128256}, 4096),
    "1b": Case("llama", LLAMA_1B, 1024, micro_batch_size=4),
    "1b-short": Case("llama", LLAMA_1B, 512, micro_batch_size=1),
    "gpt2-large": Case("gpt2", GPT2, 1024, micro_batch_size=4),
    "moe": Case("qwen3_moe", QWEN3_MOE, 4096),
    "tiny": Case("llama", TINY, 64),
    "tiny-recomputed": Case("llama", TINY, 64, is_recomputed=True),
}
ENVIRONMENT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29821",
    "PACELINE_RECOMPUTE_EARLY": "0",  # or layers are kept as far as they have room, and little is recomputed
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if "tiny" not in name])
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if args.train:
        print(json.dumps(trained(CASES[args.train], args.warmup, args.steps)))
        return
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        try:
            rows.append({"case": name, **compared(name, args)})
        except subprocess.CalledProcessError as error:
            rows.append({"case": name, "error": (error.stderr or error.stdout)[-2000:]})
        print(json.dumps(rows[-1]), flush=True)
        result = {"emulated_compute": False, "cases": rows, **facts(args, "train")}
        args.output.write_text(json.dumps(result, indent=2) + "\n")


def compared(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Predicted and measured figures of a case, and their ratios."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        model, measured = Path(folder, "model"), Path(folder, "measured")
        config_of(case).save_pretrained(model)
        Path(folder, "ds.json").write_text(json.dumps(settings(case)))
        dtype, checkpointing = "bfloat16", ["gradient_checkpointing"] * case.is_recomputed
        sizes = {"micro_batch_size": case.micro_batch_size, "seq_length": case.length}
        flags = _flags("_", dtype=dtype, **sizes) + [f"--{flag}" for flag in checkpointing]
        _told("-m", "paceline.launch.measure", str(model), "--output_dir", str(measured), *flags)
        files = [f"--{key}={measured / key}.json" for key in ("cluster", "profile")]
        batch = case.micro_batch_size * case.micro_batches
        flag = "--gradient-checkpointing" if case.is_recomputed else "--no-gradient-checkpointing"
        plan_flags = [*files, *_flags("-", train_batch_size=batch, zero=0, **sizes), flag, "--json"]
        fit_flags = ["--deepspeed", f"{folder}/ds.json", *_flags("-", world_size=1, **sizes), "--json"]
        planned = pool.submit(_told, "-m", "paceline.launch.cli", "plan", str(model), *plan_flags)
        fits = pool.submit(_told, "-m", "paceline.launch.cli", "fit", str(model), *fit_flags)
        steps = _flags("-", warmup=args.warmup, steps=args.steps)
        found = json.loads(_told(__file__, "--train", name, *steps).splitlines()[-1])
        plan, fit = json.loads(planned.result())["plans"][0], json.loads(fits.result())["memory"][0]
    said = {"step_s": round(plan["step_s"], 4), "terms": {k: round(v, 4) for k, v in plan["terms"].items() if v}}
    parts = {key: round(fit[key] / GIB, 3) for key in _PARTS}
    memory = {"plan_gib": round(plan["memory_gib"], 2), "fit_gib": round(fit["total"] / GIB, 2), "parts_gib": parts}
    ratios = {"step": round(plan["step_s"] / found["step_s"], 3)}
    if found["peak_gib"]:
        ratios |= {"memory": round(fit["total"] / GIB / found["peak_gib"], 3)}
    return {"predicted": {**said, **memory}, "measured": found, "predicted_by_measured": ratios}


_PARTS = ("weights", "gradients", "masters", "moments", "activations", "working")


def _flags(between: str, **values: Any) -> list[str]:
    return [text for key, value in values.items() for text in (f"--{key.replace('_', between)}", str(value))]


def _told(*arguments: str) -> str:
    env = {**os.environ, **ENVIRONMENT}
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, env=env).stdout


def config_of(case: Case) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(case.model_type, **case.config)


def settings(case: Case) -> dict[str, Any]:
    recompute = {"recompute": case.config["num_hidden_layers"]} if case.is_recomputed else {}
    return {
        "train_micro_batch_size_per_gpu": case.micro_batch_size,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "paceline": {"pipeline": {"stages": 1, **recompute}},
    }


def trained(case: Case, warmup: int, steps: int) -> dict[str, Any]:
    """Seconds of a step, and what the device's allocator saw."""
    import torch

    import paceline

    engine, *_ = paceline.initialize(model=config_of(case), config=settings(case))
    is_cuda = torch.device(engine.device).type == "cuda"
    vocabulary = case.config["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def run(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            shape = (case.micro_batches, case.micro_batch_size, case.length)
            ids = torch.randint(3, vocabulary, shape, generator=generator)
            engine.train_batch(iter([{"input_ids": each, "labels": each.clone()} for each in ids]))
        if is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    run(warmup)
    found: dict[str, Any] = {"step_s": round(run(steps), 4), "peak_gib": None}
    if is_cuda:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found |= {"peak_gib": round(peak / GIB, 2), "reserved_gib": round(reserved / GIB, 2)}
        found |= {"gpu": torch.cuda.get_device_name()}
    engine.destroy()
    return found


if __name__ == "__main__":
    main()
