"""The partition that a pipeline begins with, and the layers that are recomputed from the start."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import PretrainedConfig

from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing
from ..config import RunPlan
from ..config.recompute_keys import FIT, PATH, counts_of
from ..config.section import HETERO, WORK, value_at
from ..hf.activations import count_items
from ..hf.anatomy import anatomy_of
from ..hf.weights import skeleton
from ..measure.device_memory import plannable_bytes
from ..measure.profile_file import Profile
from ..measure.tokens import tokens_of_sample
from ..planning.blocks import Device, DoesNotFit
from ..planning.memory import ItemMemory, States, with_head_slices
from ..planning.recomputation import Recomputable, counts_of_layers, first_layers, layers_of_stages, num_layers
from ..planning.recomputed_stages import fastest_stages
from ..planning.shared_devices import held_by, whole_schedule
from ..planning.shared_recomputation import SharedRecomputable
from ..planning.stages import within_memory
from ..schedules.schedule import Schedule
from .compiled_layers import compile_layers_of
from .early_room import PLANNED, keeps_what_has_room
from .hetero import Shape, hetero_boundaries, shared_memory
from .module import CausalLMPipeline, Item, items_of, partition_items, route_of_chunks

logger = logging.getLogger("paceline")


def first_partition(
    hf_config: PretrainedConfig,
    resolved: RunPlan,
    control: ControlPlane,
    *,
    dtype: torch.dtype,
    sequence_length: int | None = None,
    gradient_checkpointing: bool = False,
) -> FirstPartition:
    """The partition that a :class:`CausalLMPipeline` is built with: ``"hetero"`` and ``"work"`` become boundaries.

    Collective.

    Args:
        dtype: of the weights.
        sequence_length: tokens of a sample; ``None``: unknown, as many as the model has positions for, at most
            :data:`~paceline.measure.tokens.MOST_TOKENS`.
        gradient_checkpointing: the layers' activations are computed again in the backward pass.

    Raises:
        ValueError: a profile that does not fit, or a model that fits the devices in no way, or whose layers are to be
            recomputed as it takes and cannot be counted.
    """
    choice, fits = resolved.partition_choice, resolved.recompute == FIT
    partition = method_of(resolved)
    if partition not in (HETERO, WORK) and not fits:
        return FirstPartition(partition)
    interval = value_at(resolved.ds_config, "pipeline.activation_checkpoint_interval")
    shape = Shape(
        dtype,
        resolved.micro_batch_size,
        tokens_of_sample(sequence_length, hf_config),
        gradient_checkpointing or bool(interval),
        resolved.half_layers,
    )
    if partition != HETERO:
        device = torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))
        least = min(control.gather(plannable_bytes(device, ranks_sharing(device))))
        limits = [choice.memory_bytes or least] * resolved.stages
        found: FirstPartition | None = None
        with control.together("planning the partition"):
            if dist.get_rank() == 0 and partition == WORK:
                found = by_work(hf_config, resolved, shape, limits)
                logger.info("partition %s", found.partition)
            elif dist.get_rank() == 0:
                found = as_it_takes(hf_config, resolved, shape, limits, partition)
        result = control.from_first(found)
        assert result is not None, "the first rank has found it"
        return result
    boundaries, measured, recomputed = hetero_boundaries(
        hf_config,
        control,
        shape,
        num_stages=resolved.stages,
        micro_batches=resolved.micro_batches,
        schedule=resolved.schedule,
        states=_states(resolved),
        expert_parallel=resolved.expert_parallel,
        num_copies=resolved.num_copies,
        profile=choice.profile,
        memory_bytes=choice.memory_bytes,
        may_recompute=fits,
        compiled=compile_layers_of(resolved),
    )
    return FirstPartition(boundaries, measured, recomputed)


class FirstPartition(NamedTuple):
    """The partition that a pipeline is built with.

    Args:
        partition: a method, or boundaries over items.
        profile: what was measured for it, if anything was.
        recomputed: items of the layers that are recomputed so that all fits; of others the JSON tells.
    """

    partition: str | list[int] | dict[str, float]
    profile: Profile | None = None
    recomputed: tuple[int, ...] = ()


def method_of(resolved: RunPlan) -> str | list[int] | dict[str, float]:
    """The method by which a run cuts its stages, or boundaries. With one stage there is nothing to measure for."""
    return "uniform" if resolved.stages == 1 and resolved.partition in (HETERO, WORK) else resolved.partition


def _states(resolved: RunPlan) -> States:
    return replace(States.from_config(resolved.ds_config, resolved.data_parallel), trained=resolved.trained)


def by_work(
    hf_config: PretrainedConfig, resolved: RunPlan, shape: Shape, limit_bytes: Sequence[float]
) -> FirstPartition:
    """Boundaries over items that give all stages about equally much work, as far as memory allows.

    With gradient checkpointing, layers whose activations have room count as they are: they are kept. Where what a stage
    keeps cannot be counted (a forward that depends on values, experts on several ranks; without checkpointing also
    several stages a rank) work alone decides.

    Args:
        limit_bytes: of each device.
    """
    model = skeleton(hf_config)
    anatomy = anatomy_of(model, half_layers=shape.half_layers, head_slices=resolved.head_slices)
    items = items_of(model, anatomy, shape.sequence_length, recomputes=shape.gradient_checkpointing)
    routes = resolved.schedule.routes(resolved.stages)
    num_stages = len(routes[0])
    if resolved.recompute == FIT:
        return as_it_takes(hf_config, resolved, shape, limit_bytes, WORK)
    is_uncounted = resolved.expert_parallel > 1
    may_keep = shape.gradient_checkpointing and keeps_what_has_room(resolved.schedule)
    if may_keep and not is_uncounted and resolved.head_slices == 1:
        with suppress(ValueError):  # it cannot be counted, or does not fit either way
            whole, limits = shape._replace(gradient_checkpointing=False), [PLANNED * limit for limit in limit_bytes]
            kept = _fewest(
                *_as_asked(hf_config, resolved, whole, WORK),
                _memories(hf_config, resolved, whole),
                *(resolved, limits),
                moves=True,
            )
            return FirstPartition(kept.partition)
    if resolved.schedule.has_directions or is_uncounted or num_stages > resolved.stages:
        return FirstPartition(partition_items(items, num_stages, WORK, route_of_chunks(routes)))
    try:
        memories = count_items(hf_config, **shape._asdict())
    except ValueError:
        return FirstPartition(partition_items(items, resolved.stages, WORK))
    if resolved.head_slices > 1:
        memories = with_head_slices(memories, resolved.head_slices)
    schedule = resolved.schedule.first(resolved.stages, resolved.micro_batches)
    return FirstPartition(work_boundaries(items, memories, limit_bytes, _states(resolved), schedule))


def as_it_takes(
    hf_config: PretrainedConfig,
    resolved: RunPlan,
    shape: Shape,
    limit_bytes: Sequence[float],
    method: str | list[int] | dict[str, float],
) -> FirstPartition:
    """The partition, and as few recomputed layers as it takes for each stage to fit. With ``"work"``, stages that do
    not fit as they are get other boundaries too.

    Args:
        limit_bytes: of each device.

    Raises:
        ValueError: what the model keeps cannot be counted.
    """
    boundaries, items = _as_asked(hf_config, resolved, shape, method)
    try:
        memories = _memories(hf_config, resolved, shape)
    except ValueError as error:
        raise ValueError(f'{PATH} is "{FIT}", which counts what layers keep; write a number. {error}') from None
    try:
        return _fewest(boundaries, items, memories, resolved, limit_bytes, moves=method == WORK)
    except DoesNotFit as error:
        logger.warning("recompute: all layers, since %s", error)
        return FirstPartition(boundaries, recomputed=tuple(range(1, len(items) - 1)))


def _as_asked(
    hf_config: PretrainedConfig, resolved: RunPlan, shape: Shape, method: str | list[int] | dict[str, float]
) -> tuple[list[int], list[Item]]:
    """Boundaries by a method where nothing is recomputed, and the items that they are over."""
    model = skeleton(hf_config)
    items = items_of(model, anatomy_of(model, half_layers=shape.half_layers), shape.sequence_length)
    routes = resolved.schedule.routes(resolved.stages)
    return partition_items(items, len(routes[0]), method, route_of_chunks(routes)), items


def _memories(hf_config: PretrainedConfig, resolved: RunPlan, shape: Shape) -> Sequence[ItemMemory]:
    """Memory of each item on a rank. Raises ValueError if it cannot be counted."""
    return shared_memory(
        hf_config,
        count_items(hf_config, **shape._asdict()),
        resolved.expert_parallel,
        resolved.num_copies,
        half_layers=shape.half_layers,
    )


def _fewest(
    boundaries: list[int],
    items: Sequence[Item],
    memories: Sequence[ItemMemory],
    resolved: RunPlan,
    limit_bytes: Sequence[float],
    *,
    moves: bool,
) -> FirstPartition:
    """As few recomputed layers as it takes for each stage to fit.

    Args:
        moves: stages may have other boundaries, where that is faster.

    Raises:
        DoesNotFit: not even with all.
    """
    seconds = [(item.work / 3, item.work / 1.5) for item in items]
    schedule = resolved.schedule.planned(resolved.stages, resolved.micro_batches)
    states, devices = _states(resolved), [Device(1.0, limit) for limit in limit_bytes]
    owners = resolved.schedule.optimizer_owners
    held = held_by(whole_schedule(schedule), owners)
    with suppress(DoesNotFit) if moves else nullcontext():
        found = SharedRecomputable(memories, states, held).fewest(boundaries, limit_bytes)
        if not moves or not found.items:
            return FirstPartition(list(found.boundaries), recomputed=found.items)
    if any(len(own.stages) > 1 for own in held):
        plan, again = fastest_stages(memories, seconds, devices, states, schedule, owners=owners, may_recompute=True)
        return FirstPartition(list(plan.boundaries), recomputed=again)
    found = Recomputable.of(memories, seconds, states, whole_schedule(schedule)).partition(devices)
    return FirstPartition(list(found.boundaries), recomputed=found.items)


def recompute_as_written(pipeline: CausalLMPipeline, resolved: RunPlan, fitting: Collection[int] = ()) -> None:
    """Have as many layers of each stage recomputed as the JSON says; where it leaves the number open, those that are
    ``fitting``.

    Raises:
        ValueError: a stage has fewer layers.
    """
    if resolved.recompute is None:
        return
    blocks = pipeline.anatomy.blocks_per_layer
    items = fitting if resolved.recompute == FIT else as_written(resolved, pipeline.parts, blocks)
    pipeline.recompute(items)
    if dist.get_rank() == 0:
        held = layers_of_stages(pipeline.parts, pipeline.anatomy.head_slices)
        stages = [num_layers(layers, blocks) for layers in held]
        found = list(counts_of_layers(pipeline.parts, items, blocks))
        logger.info("recompute: %s of the %s layers of the stages", found, stages)


def as_written(resolved: RunPlan, boundaries: Sequence[int], blocks: int) -> list[int]:
    """The items that are recomputed where the JSON says how many of each stage are: the first ones.

    Args:
        blocks: items that a decoder layer is: itself, or its two halves.

    Raises:
        ValueError: a stage has fewer layers.
    """
    asked = resolved.recompute
    if asked is None or asked == FIT:
        return []
    stages = layers_of_stages(boundaries, resolved.head_slices)
    counts = counts_of(asked, [num_layers(layers, blocks) for layers in stages])
    return [item for layers, count in zip(stages, counts, strict=True) for item in first_layers(layers, count, blocks)]


def work_boundaries(
    items: Sequence[Item],
    memories: Sequence[ItemMemory],
    limit_bytes: Sequence[float],
    states: States,
    schedule: Schedule,
) -> list[int]:
    """Boundaries over items that give all stages about equally much work and fit into memory.

    Where nothing fits, parameters decide: then states, at least, are spread.

    Args:
        limit_bytes: of each stage's device.
    """
    stages = len(limit_bytes)
    seconds = [(item.work / 3, item.work / 1.5) for item in items]
    devices = [Device(1.0, limit) for limit in limit_bytes]
    try:
        return list(within_memory(partition_items(items, stages, WORK), memories, seconds, devices, states, schedule))
    except DoesNotFit as error:
        logger.info("partition: by parameters, since by work %s", error)
        return partition_items(items, stages, "parameters")
