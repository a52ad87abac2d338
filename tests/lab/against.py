"""What a host of ``tests/benchmarks/against_zero3.py`` does: train a Llama as one contestant does, and write down what
each step took and sent.

    against.py FOLDER

``FOLDER/job.json`` says what to train; every rank writes ``FOLDER/rank<N>.jsonl``, a line a step. The model is real,
and so are its gradients and what is sent. A decoder layer also sleeps until its forward or backward has taken what it
would take on the accelerator that is emulated: what the layer itself takes on this machine, with the other ranks
computing as well, is timed before and taken off.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from lab import stock_llama
from lab.islands import sent_bytes
from paceline.runtime.module import CausalLMPipeline

Step = Callable[[Tensor], float]
"""Trains on the rows of a step, of all ranks; the loss of this rank's rows."""

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
"""Layers that LoRA adapts. With rank 1, that is as large a share of the parameters as rank 14 of all linear layers of
the 3B model."""

OF_A_WIDTH = {"stage3_param_persistence_threshold": 128 / 3072}
"""What DeepSpeed counts in parameters of one tensor is scaled as the hidden size is: norms stay where they are."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for half a minute
    job = json.loads((folder / "job.json").read_text())
    rank = int(os.environ["PACELINE_ISLAND"] if job["contestant"].startswith("islands") else os.environ["RANK"])
    data = torch.load(folder.parent / "data.pt")
    deepspeed.init_distributed("gloo")
    net = model(job)
    if job["forward_s"]:
        backward_s = job["forward_s"] * (1 if job["lora"] else 2)  # LoRA has next to no gradients of weights
        emulate(net, job["forward_s"], backward_s, job["rows"] // job["computed_at_once"])
    step, held_out = CONTESTANTS[job["contestant"].partition("+")[0]](net, job)
    chance = torch.Generator().manual_seed(0)
    seconds, sent = 0.0, sent_bytes()
    with (folder / f"rank{rank}.jsonl").open("w") as lines:
        for number in range(1, job["steps"] + 1):
            rows = data["train"][torch.randint(0, len(data["train"]), (job["rows"],), generator=chance)]
            begin = time.perf_counter()
            loss = step(rows)
            seconds, before = time.perf_counter() - begin, sent
            sent = sent_bytes()
            record: dict[str, Any] = {"step": number, "seconds": seconds, "sent_bytes": sent - before, "loss": loss}
            if job["evaluate_every"] and number % job["evaluate_every"] == 0:
                record["held_out_loss"] = held_out(data["held_out"])
                sent = sent_bytes()
            lines.write(json.dumps(record) + "\n")
            lines.flush()


def model(job: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(**job["model"]))
    if job["lora"]:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        net = get_peft_model(net, LoraConfig(r=job["lora"], lora_alpha=2 * job["lora"], target_modules=TARGETS))
    return net


# What a layer takes -------------------------------------------------------------------------------------------------


class Busy(torch.autograd.Function):
    """Identity that sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


def emulate(net: nn.Module, forward_s: float, backward_s: float, rows_at_once: int) -> None:
    """Have every decoder layer take ``forward_s`` and ``backward_s`` a row, in calls with ``rows_at_once``."""
    layers = [module for module in net.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    taken = own_seconds(net, layers[0], rows_at_once)
    sleeps = [max(0.0, rows_at_once * all_s - own) for all_s, own in zip((forward_s, backward_s), taken, strict=True)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: Busy.apply(output, *sleeps))


def own_seconds(net: nn.Module, layer: nn.Module, rows: int) -> tuple[float, float]:
    """Measured forward and backward seconds of a layer on this machine, all ranks computing."""
    config = net.config
    hidden = torch.randn(rows, config.max_position_embeddings, config.hidden_size, requires_grad=True)
    rotary = next(module for module in net.modules() if type(module).__name__ == "LlamaRotaryEmbedding")
    tables = rotary(hidden, torch.arange(config.max_position_embeddings)[None])
    if dist.get_world_size() > 1:
        dist.barrier()
    forward, backward = [], []
    for _ in range(20):
        begin = time.perf_counter()
        output = layer(hidden, attention_mask=None, position_embeddings=tables)
        middle = time.perf_counter()
        output.sum().backward()
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
    net.zero_grad(set_to_none=True)
    return statistics.median(forward), statistics.median(backward)


# Contestants --------------------------------------------------------------------------------------------------------


def own_rows(rows: Tensor) -> Tensor:
    """This rank's share of a step's rows."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def ds_config(job: dict[str, Any], micro_batch_size: int, micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": job["learning_rate"], "torch_adam": True, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": job["bf16"]},
        "steps_per_print": None,
    }


def zero(net: nn.Module, job: dict[str, Any]) -> tuple[Step, Any]:
    """Stock DeepSpeed. What it counts in parameters is scaled as the model is: buckets, and what stays gathered."""
    config = ds_config(job, job["rows"] // dist.get_world_size(), 1)
    scaled = {key: max(1, int(value * OF_A_WIDTH.get(key, job["scale"]))) for key, value in ZERO_SIZES.items()}
    stage = int(job["contestant"][-1])
    known = {key: value for key, value in scaled.items() if stage == 3 or not key.startswith("stage3")}
    config["zero_optimization"] = {"stage": stage, **known}
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=config)

    def step(rows: Tensor) -> float:
        ids = own_rows(rows)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step, None


ZERO_SIZES = {
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
"""DeepSpeed's defaults, in parameters."""


def fsdp2(net: nn.Module, job: dict[str, Any]) -> tuple[Step, Any]:
    """In the units that accelerate makes of a model. Accelerate itself has FSDP for accelerators only."""
    policy = MixedPrecisionPolicy()
    if job["bf16"]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    causal = net.get_base_model() if job["lora"] else net
    for unit in (*causal.model.layers, causal.model.embed_tokens):
        fully_shard(unit, mp_policy=policy)
    fully_shard([causal.model.norm, causal.lm_head], reshard_after_forward=False, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["learning_rate"], weight_decay=0.0)

    def step(rows: Tensor) -> float:
        ids = own_rows(rows)
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step, None


def stock_pipeline(net: Any, job: dict[str, Any]) -> tuple[Step, Any]:
    pipeline = PipelineModule(
        layers=stock_llama.layers(net),
        num_stages=dist.get_world_size(),
        loss_fn=stock_llama.loss,
        partition_method="type:Layer",
    )
    config = ds_config(job, 1, job["rows"])
    engine, *_ = deepspeed.initialize(model=pipeline, model_parameters=list(pipeline.parameters()), config=config)
    return lambda rows: float(engine.train_batch(iter([(row, row) for row in rows.split(1)]))), None


def ours(net: Any, job: dict[str, Any]) -> tuple[Step, Any]:
    """Paceline's pipeline; ``paceline+FORMAT`` uses that format in both directions."""
    section: dict[str, Any] = {"stages": dist.get_world_size(), "schedule": {"type": "adaptive", "retune_every": 6}}
    if rounded := job["contestant"].partition("+")[2]:
        section["boundary"] = {"forward": rounded, "backward": rounded}
    pipeline = CausalLMPipeline(net, num_stages=dist.get_world_size(), partition="uniform")
    config = ds_config(job, 1, job["rows"]) | {"paceline": {"pipeline": section}}
    engine, *_ = paceline.initialize(model=pipeline, config=config)

    def micro_batches(rows: Tensor) -> Iterator[dict[str, Tensor]]:
        return iter([{"input_ids": row, "labels": row} for row in rows.split(1)])

    def held_out(rows: Tensor) -> float:
        return float(engine.eval_batch(micro_batches(rows), num_micro_batches=len(rows)))

    return lambda rows: float(engine.train_batch(micro_batches(rows))), held_out


def islands(net: Any, job: dict[str, Any]) -> tuple[Step, Any]:
    """Every host by itself, on its share of the rows; they average every ``every_steps`` steps."""
    island, hosts = int(os.environ["PACELINE_ISLAND"]), job["hosts"]
    own = job["rows"] // hosts
    section = {
        "lighthouse": job["lighthouse"],
        "min_islands": hosts,
        "every_tokens": job["every_steps"] * own * job["model"]["max_position_embeddings"],
        "overlap_steps": job["overlap_steps"],
        "first_round": "mean",
        "format": job["contestant"].partition("+")[2] or None,
    }
    config = ds_config(job, own, 1) | {"paceline": {"averaging": section}}
    engine, *_ = paceline.initialize(model=net, model_parameters=list(net.parameters()), config=config)
    numbers = count(1)

    def step(rows: Tensor) -> float:
        ids = rows.chunk(hosts)[island]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if next(numbers) == job["steps"]:
            engine.finish_averaging()
        return float(loss)

    def held_out(rows: Tensor) -> float:
        with torch.no_grad():
            return statistics.mean(float(net(input_ids=part, labels=part).loss) for part in rows.split(1))

    return step, held_out


CONTESTANTS: dict[str, Callable[[Any, dict[str, Any]], tuple[Step, Any]]] = {
    "zero3": zero,
    "zero1": zero,
    "fsdp2": fsdp2,
    "stock-pipeline": stock_pipeline,
    "paceline": ours,
    "islands": islands,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
