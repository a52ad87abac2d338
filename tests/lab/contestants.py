"""Those who run the emulated training: DeepSpeed's pipelines, torch's, and ours with each schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lab.emulation import LEARNING_RATE, EmulatedLayer, Emulation, loss

Step = Callable[[], tuple[float, str]]
"""One step of training, called on every rank: the loss, and the schedule that ran where it is chosen at run time."""

OURS: dict[str, dict[str, Any]] = {
    "1f1b": {"type": "1f1b"},
    "gpipe": {"type": "gpipe"},
    "kfkb2": {"type": "kfkb", "k": 2},
    "kfkb4": {"type": "kfkb", "k": 4},
    "eager1": {"type": "eager", "slack": 1.0},
    "eager2": {"type": "eager", "slack": 2.0},
    "adaptive": {"type": "adaptive"},
}
"""Schedules of ``paceline.pipeline.schedule`` by a short name."""


def make(name: str, emulation: Emulation) -> Step:
    """A contestant, ready to train.

    Args:
        name: ``stock``, ``dualpipev`` (two half stages a rank), ``torch-1f1b``, ``torch-gpipe``, ``torch-interleaved``
            (two half stages a rank), a name of :data:`OURS`, or ``LABEL={JSON}`` with another schedule of ours.

    Raises:
        ValueError: there is no such contestant.
    """
    if name in _OTHERS:
        return _OTHERS[name](emulation)
    return _paceline(emulation, schedule_of(name))


def label_of(name: str) -> str:
    """What a contestant is called in results."""
    return name.partition("=")[0]


def schedule_of(name: str) -> dict[str, Any]:
    """The schedule that ``name`` gives our engine.

    Raises:
        ValueError: there is no such contestant.
    """
    label, _, text = name.partition("=")
    if text:
        return json.loads(text)
    if label in OURS:
        return OURS[label]
    raise ValueError(f"no contestant {name}: it must be one of {', '.join(NAMES)}, or LABEL={{JSON of a schedule}}")


def _config(emulation: Emulation, section: dict[str, Any] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": emulation.num_micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": 0.0,  # DeepSpeed clips by default
        "steps_per_print": None,
    }
    return config | ({"paceline": section} if section else {})


def _specs(emulation: Emulation) -> list[LayerSpec]:
    return [LayerSpec(EmulatedLayer, f, b) for f, b in zip(emulation.forward_s, emulation.backward_s, strict=True)]


def _stock(emulation: Emulation) -> Step:
    net = PipelineModule(
        layers=_specs(emulation), num_stages=emulation.num_ranks, loss_fn=loss, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=_config(emulation))
    return _deepspeed_step(engine, emulation)


def _dualpipev(emulation: Emulation) -> Step:
    ranks = range(emulation.num_ranks)
    halves = [(emulation.forward_s[rank] / 2, emulation.backward_s[rank] / 2) for rank in (*ranks, *reversed(ranks))]
    net = DualPipeVModule(
        layers=[LayerSpec(EmulatedLayer, *half) for half in halves],
        num_stages=emulation.num_ranks,
        loss_fn=loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=_config(emulation))
    return _deepspeed_step(engine, emulation)


def _paceline(emulation: Emulation, schedule: dict[str, Any]) -> Step:
    import paceline

    net = PipelineModule(
        layers=_specs(emulation), num_stages=emulation.num_ranks, loss_fn=loss, partition_method="uniform"
    )
    engine, *_ = paceline.initialize(
        model=net,
        model_parameters=list(net.parameters()),
        config=_config(emulation, {"pipeline": {"schedule": schedule}}),
    )
    return _deepspeed_step(engine, emulation)


def _deepspeed_step(engine: Any, emulation: Emulation) -> Step:
    batches = cycle(emulation.batches)

    def step() -> tuple[float, str]:
        value = float(engine.train_batch(batches))
        return value, getattr(getattr(engine, "schedule", None), "name", "")

    return step


def _torch(kind: type, num_chunks: int, emulation: Emulation) -> Step:
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    layers = [emulation.layer(rank, num_chunks) for _ in range(num_chunks)]
    stages = [
        PipelineStage(layer, chunk * num_ranks + rank, num_chunks * num_ranks, device)
        for chunk, layer in enumerate(layers)
    ]
    schedule = kind(stages if num_chunks > 1 else stages[0], emulation.num_micro_batches, loss_fn=loss)
    optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=LEARNING_RATE)
    inputs, labels = (torch.cat(parts) for parts in zip(*emulation.batches, strict=True))
    is_last = rank == num_ranks - 1
    value = torch.zeros(1)

    def step() -> tuple[float, str]:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        more: dict[str, Any] = {"target": labels, "losses": losses} if is_last else {}
        schedule.step(*arguments, **more, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            value.fill_(float(torch.stack(losses).mean()))
        dist.broadcast(value, num_ranks - 1)  # as DeepSpeed does in every step
        return float(value), ""

    return step


_OTHERS: dict[str, Callable[[Emulation], Step]] = {
    "stock": _stock,
    "dualpipev": _dualpipev,
    "torch-1f1b": lambda emulation: _torch(pipelining.Schedule1F1B, 1, emulation),
    "torch-gpipe": lambda emulation: _torch(pipelining.ScheduleGPipe, 1, emulation),
    "torch-interleaved": lambda emulation: _torch(pipelining.ScheduleInterleaved1F1B, 2, emulation),
}

NAMES: Sequence[str] = (*_OTHERS, *OURS)
