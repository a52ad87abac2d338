"""Those who run the emulated training: DeepSpeed's pipelines, torch's, and ours with each schedule and partition."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lab.asynchronous import SCHEDULES, AsynchronousStep
from lab.clairvoyant import clairvoyant_step
from lab.emulation import OPTIMIZERS, EmulatedLayer, Emulation, loss
from paceline.runtime.measured_costs import MeasuredCosts
from paceline.schedules.families import CHUNKED, chunked_route, v_route
from paceline.schedules.generator import generated
from paceline.schedules.schedule import Schedule
from paceline.schedules.split_families import dualpipev_split
from paceline.schedules.verify import peaks

Step = Callable[[], dict[str, Any]]
"""One step of training, called on every rank: what there is to say about it.

Always ``loss``, and ``schedule``: what ran, where it is chosen at run time, else empty. Of a DeepSpeed pipeline
``boundaries`` over the layers; where layers have moved since the step before, ``migration``: the engine's figures.
The first time that a schedule of ours runs, ``verified``: what it keeps, by rank the figures of
:class:`lab.kept.Peaks`.
An :class:`~lab.asynchronous.AsynchronousStep` tells the loss later, unless each of its steps is flushed.
"""

OURS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": {"type": "1f1b"}},
    "gpipe": {"schedule": {"type": "gpipe"}},
    "kfkb2": {"schedule": {"type": "kfkb", "k": 2}},
    "kfkb4": {"schedule": {"type": "kfkb", "k": 4}},
    "eager1": {"schedule": {"type": "eager", "slack": 1.0}},
    "eager2": {"schedule": {"type": "eager", "slack": 2.0}},
    "adaptive": {"schedule": {"type": "adaptive"}},
    "zbh1": {"schedule": {"type": "zbh1"}},
    "zbh2": {"schedule": {"type": "zbh2"}},
    "interleaved": {"schedule": {"type": "interleaved", "chunks": 2}},
    "our-dualpipev": {"schedule": {"type": "dualpipev"}},
    "our-dualpipev-split": {"schedule": {"type": "dualpipev"}},
    "zbv": {"schedule": {"type": "zbv"}},
    "vhalf": {"schedule": {"type": "vhalf"}},
    "vmin": {"schedule": {"type": "vmin"}},
}
"""Sections ``paceline.pipeline`` by a short name; the last six have two half stages a rank."""

CLAIRVOYANT = "clairvoyant"
"""Ours with the best schedule at the rates of each moment, which it knows (:mod:`lab.clairvoyant`)."""

MEASURED_STEPS = 4
"""After so many a schedule is generated from what they have taken, but for the first."""

_SET: dict[str, Callable[[int, int], Schedule]] = {"our-dualpipev-split": dualpipev_split}
"""Schedules that the JSON has no name for, set after the start."""


def make(name: str, emulation: Emulation) -> Step:
    """A contestant, ready to train.

    Args:
        name: ``stock`` (its partition is uniform), ``stock-parameters``, ``dualpipev`` (two half stages a rank),
            ``torch-1f1b``, ``torch-gpipe``, ``torch-interleaved``, ``torch-zbv`` and ``torch-dualpipev`` (two half
            stages a rank), ``generated`` and ``generated-v`` (two half stages a rank), a name of :data:`OURS` or of
            :data:`lab.asynchronous.SCHEDULES`, ``clairvoyant=FILE`` with a trace of rates, or ``LABEL={JSON}`` with
            another schedule of ours, or with a ``schedule`` and a ``partition``.

    Raises:
        ValueError: there is no such contestant, or it cannot have several layers a rank.
    """
    if name in _OTHERS:
        return _OTHERS[name](emulation)
    if name in SCHEDULES:
        return AsynchronousStep(name, emulation)
    if label_of(name) == CLAIRVOYANT:
        engine = _engine(emulation, OURS["1f1b"])
        step = _deepspeed_step(engine, emulation)
        return clairvoyant_step(engine, Path(name.partition("=")[2]), emulation, step)
    engine = _engine(emulation, section_of(name))
    if name in _SET:
        engine.set_schedule(_SET[name](emulation.num_ranks, emulation.num_micro_batches))
    return _deepspeed_step(engine, emulation)


def label_of(name: str) -> str:
    """What a contestant is called in results."""
    return name.partition("=")[0]


def num_chunks_of(name: str) -> int:
    """Equal parts into which a contestant cuts the layer of a rank."""
    label, _, text = name.partition("=")
    if label == CLAIRVOYANT:
        return 1
    section = json.loads(text) if text else OURS.get(label, {}).get("schedule", {})
    in_two = label in _IN_TWO or section.get("type", section.get("schedule", {}).get("type")) in CHUNKED
    return 2 if in_two else 1


def section_of(name: str) -> dict[str, Any]:
    """The section ``paceline.pipeline`` that ``name`` gives our engine.

    Raises:
        ValueError: there is no such contestant.
    """
    label, _, text = name.partition("=")
    if text:
        section = json.loads(text)
        return {"schedule": section} if "type" in section else section
    if label in OURS:
        return OURS[label]
    raise ValueError(f"no contestant {name}: it must be one of {', '.join(NAMES)}, or LABEL={{JSON of ours}}")


def _trained(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def _config(emulation: Emulation, section: dict[str, Any] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": emulation.num_micro_batches,
        "optimizer": {"type": emulation.optimizer, "params": OPTIMIZERS[emulation.optimizer]},
        "gradient_clipping": 0.0,  # DeepSpeed clips by default
        "steps_per_print": None,
    }
    return config | ({"paceline": {"pipeline": section}} if section else {})


def _layers(emulation: Emulation) -> list[LayerSpec]:
    return [LayerSpec(EmulatedLayer, *emulation.layer_arguments(index)) for index in range(emulation.num_layers)]


def _stock(method: str, emulation: Emulation) -> Step:
    net = PipelineModule(
        layers=_layers(emulation), num_stages=emulation.num_ranks, loss_fn=loss, partition_method=method
    )
    engine, *_ = deepspeed.initialize(model=net, model_parameters=_trained(net), config=_config(emulation))
    return _deepspeed_step(engine, emulation)


def _dualpipev(emulation: Emulation) -> Step:
    _check_a_layer_a_rank("dualpipev", emulation)
    ranks = range(emulation.num_ranks)
    net = DualPipeVModule(
        layers=[LayerSpec(EmulatedLayer, *emulation.layer_arguments(rank, 2)) for rank in (*ranks, *reversed(ranks))],
        num_stages=emulation.num_ranks,
        loss_fn=loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=net, model_parameters=_trained(net), config=_config(emulation))
    return _deepspeed_step(engine, emulation)


def _engine(emulation: Emulation, section: dict[str, Any]) -> Any:
    import paceline

    partition = section.get("partition", "uniform")
    method = partition.get("method", "uniform") if isinstance(partition, dict) else partition
    layers, route, kind = _layers(emulation), None, section.get("schedule", {}).get("type")
    if kind in CHUNKED:
        _check_a_layer_a_rank(kind, emulation)
        route = chunked_route(kind, emulation.num_ranks, 2)
        layers = [LayerSpec(EmulatedLayer, *emulation.layer_arguments(rank, 2)) for rank in route]
    net = paceline.PipelineModule(
        layers=layers,
        num_stages=emulation.num_ranks,
        loss_fn=loss,
        partition_method=method,
        routes=None if route is None else [route],
    )
    engine, *_ = paceline.initialize(model=net, model_parameters=_trained(net), config=_config(emulation, section))
    return engine


def _generated(kind: str, emulation: Emulation) -> Step:
    """The schedule that is generated from what some steps of ``kind`` have measured."""
    engine = _engine(emulation, OURS[kind])
    step, num_steps = _deepspeed_step(engine, emulation), 0

    def planned() -> dict[str, Any]:
        nonlocal num_steps
        if num_steps == 1:
            engine.meter.recorder.forget()
        if num_steps == MEASURED_STEPS:
            engine.set_schedule(_generate(engine, emulation.num_micro_batches))
        num_steps += 1
        return step()

    return planned


def _generate(engine: Any, num_micro_batches: int) -> Schedule:
    reports, found = engine.reports.gather({}), [None]
    if engine.global_rank == 0:
        measured = MeasuredCosts(engine.support.routes)
        measured.update(reports)
        found = [generated({tuple(engine.support.routes[0]): measured.costs(engine.cut)}, num_micro_batches)]
    dist.broadcast_object_list(found)
    return found[0]


def _deepspeed_step(engine: Any, emulation: Emulation) -> Step:
    batches = cycle(emulation.batches)
    known, verified = None, set[str]()

    def step() -> dict[str, Any]:
        nonlocal known
        value = float(engine.train_batch(batches))
        schedule = getattr(engine, "schedule", None)
        name = getattr(schedule, "name", "")
        said: dict[str, Any] = {"loss": value, "schedule": name, "boundaries": [*map(int, engine.module.parts)]}
        if schedule is not None and name not in verified:
            verified.add(name)
            said["verified"] = [peaks(order) for order in schedule.orders]
        last = next(reversed(getattr(engine, "migrations", ())), None)
        if last is not known:
            known = last
            said["migration"] = last
        return said

    return step


def _check_a_layer_a_rank(name: str, emulation: Emulation) -> None:
    if emulation.num_layers != emulation.num_ranks:
        raise ValueError(
            f"{name} with {emulation.num_layers} layers on {emulation.num_ranks} ranks: it can have a layer a rank only"
        )


def _torch(kind: type, num_chunks: int, emulation: Emulation, *, in_v: bool = False) -> Step:
    _check_a_layer_a_rank("torch", emulation)
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    ranks = v_route(num_ranks) if in_v else (*range(num_ranks),) * num_chunks
    layers = [emulation.layer(rank, num_chunks) for _ in range(num_chunks)]
    numbers = [number for number, holder in enumerate(ranks) if holder == rank]
    stages = [PipelineStage(layer, n, len(ranks), device) for layer, n in zip(layers, numbers, strict=True)]
    schedule = kind(stages if num_chunks > 1 else stages[0], emulation.num_micro_batches, loss_fn=loss)
    optimizer = _torch_optimizer(nn.ModuleList(layers), emulation)
    inputs, labels = (torch.cat(parts) for parts in zip(*emulation.batches, strict=True))
    is_last = rank == ranks[-1]
    value = torch.zeros(1)

    def step() -> dict[str, Any]:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        more: dict[str, Any] = {"target": labels, "losses": losses} if is_last else {}
        schedule.step(*arguments, **more, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            value.fill_(float(torch.stack(losses).mean()))
        dist.broadcast(value, ranks[-1])  # as DeepSpeed does in every step
        return {"loss": float(value), "schedule": ""}

    return step


def _torch_optimizer(layers: nn.Module, emulation: Emulation) -> torch.optim.Optimizer:
    kind = {"SGD": torch.optim.SGD, "Adam": torch.optim.AdamW}[emulation.optimizer]  # DeepSpeed's Adam is AdamW
    settings = {key: value for key, value in OPTIMIZERS[emulation.optimizer].items() if key != "torch_adam"}
    return kind(layers.parameters(), **settings)


_OTHERS: dict[str, Callable[[Emulation], Step]] = {
    "stock": partial(_stock, "uniform"),
    "stock-parameters": partial(_stock, "parameters"),
    "dualpipev": _dualpipev,
    "generated": partial(_generated, "zbh1"),
    "generated-v": partial(_generated, "zbv"),
    "torch-1f1b": lambda emulation: _torch(pipelining.Schedule1F1B, 1, emulation),
    "torch-gpipe": lambda emulation: _torch(pipelining.ScheduleGPipe, 1, emulation),
    "torch-interleaved": lambda emulation: _torch(pipelining.ScheduleInterleaved1F1B, 2, emulation),
    "torch-zbv": lambda emulation: _torch(pipelining.ScheduleZBVZeroBubble, 2, emulation, in_v=True),
    "torch-dualpipev": lambda emulation: _torch(pipelining.ScheduleDualPipeV, 2, emulation, in_v=True),
}

_IN_TWO = ("dualpipev", "generated-v", "torch-interleaved", "torch-zbv", "torch-dualpipev")

NAMES: Sequence[str] = (*_OTHERS, *OURS, *SCHEDULES)
