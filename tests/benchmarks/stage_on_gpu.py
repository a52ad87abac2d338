"""One stage on one GPU: seconds of a step, MFU, and what the device's time goes to.

    python tests/benchmarks/stage_on_gpu.py [--shape 8b] [--compile]

A Llama of random weights in one stage, bf16 with fp32 masters and AdamW: of an 8B model 8 layers, or 2 layers and the
head; of a 1B model 4 layers. ``--shape tiny`` tries the script without a GPU. ``mfu`` is of ``--peak`` TFLOP/s;
its operations are those of the model, recomputation not counted. ``device_ms`` is by kind of kernel, of one step, and
``calls`` counts what the host asks of CUDA in it: ``cudaStreamSynchronize`` is where it waits.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from facts import facts
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

import paceline


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    micro_batches: int


SHAPES = {
    "8b": Shape(4096, 14336, 8, 32, 8, 8192, 4096, 8),
    "8b-head": Shape(4096, 14336, 2, 32, 8, 128256, 4096, 8),
    "1b": Shape(2048, 8192, 4, 32, 8, 8192, 4096, 8),
    "tiny": Shape(64, 128, 2, 4, 2, 97, 64, 4),
}
CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "cudaLaunchKernel",
    "cuLaunchKernelEx",
    "cudaLaunchKernelExC",
)
KINDS = {
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "gemm": ("gemm", "nvjet", "xmma", "cutlass"),
    "adam": ("multi_tensor",),
    "copy or cast": ("copy", "memcpy"),
    "loss": ("softmax", "nll"),
    "reduce": ("reduce",),
    "elementwise": ("elementwise", "vectorized", "triton"),
}
"""Kinds of kernels, by parts of their names; the first that fits."""
ONE_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29811",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--compile", action="store_true", help="the layers")
    parser.add_argument("--schedule", default="1f1b", help="zbh1: with split backwards")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device in bf16")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    os.environ.update({key: os.environ.get(key, value) for key, value in ONE_RANK.items()})
    result = {"emulated_compute": False, **measured(args), **facts(args)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[args.shape]
    engine, *_ = paceline.initialize(model=config_of(shape), config=settings(shape, args))
    is_cuda = torch.device(engine.device).type == "cuda"
    data = batches(shape)

    def run(num_steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(num_steps):
            engine.train_batch(data)
        if is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / num_steps

    run(args.warmup)
    step_s = run(args.steps)
    rate = operations(shape, engine.module) / step_s / 1e12
    tokens_per_s = shape.micro_batches * shape.length / step_s
    found = {"step_s": round(step_s, 4), "tokens_per_s": round(tokens_per_s), "tflops": round(rate, 1)}
    if is_cuda:
        peak = torch.cuda.max_memory_allocated() / 2**30
        found |= {"gpu": torch.cuda.get_device_name(), "mfu": round(rate / args.peak, 3), "peak_gib": round(peak, 1)}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            run(1)
        found |= by_kind(seen)
    engine.destroy()
    return found


def config_of(shape: Shape) -> Any:
    return AutoConfig.for_model(
        "llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
    )


def settings(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": shape.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "paceline": {"pipeline": {"stages": 1, "compile": args.compile, "schedule": args.schedule}},
    }


def batches(shape: Shape) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(3, shape.vocabulary, (1, shape.length), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


def operations(shape: Shape, model: torch.nn.Module) -> float:
    """Floating-point operations of a step; half of the attention scores of causal attention are left out."""
    numel = sum(parameter.numel() for name, parameter in model.named_parameters() if "embed" not in name)
    attention = 6.0 * shape.layers * shape.length**2 * shape.hidden
    return shape.micro_batches * (6.0 * numel * shape.length + attention)


def by_kind(seen: profile) -> dict[str, Any]:
    calls = {event.key: event.count for event in seen.key_averages() if event.key in CALLS}
    device_ms: dict[str, float] = defaultdict(float)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
            device_ms[kind] += event.time_range.elapsed_us() / 1e3
    ordered = sorted(device_ms.items(), key=lambda entry: -entry[1])
    return {"calls": calls, "device_ms": {kind: round(value, 1) for kind, value in ordered}}


if __name__ == "__main__":
    main()
