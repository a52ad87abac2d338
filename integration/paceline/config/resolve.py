"""A DeepSpeed config, resolved for ranks and a model: stages, partition, batch sizes and schedule, all checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ..schedules.asynchronous import MULTIDIRECTION
from ..schedules.families import INTERLEAVED
from .batch_sizes import MICRO_BATCH, MICRO_BATCHES, TRAIN_BATCH, batch_sizes
from .effects import without_effect
from .exclusions import Features, check_exclusions
from .expert_parallel import EXPERT_PARALLEL, resolve_expert_parallel
from .known import check_objects, near_misses
from .optimizers import check_optimizer, check_optimizer_values
from .partitions import resolve_partition
from .recompute_keys import check_stages
from .replica_keys import check_shares, first_shares
from .run_plan import Choice, RunPlan
from .schedulers import check_scheduler
from .schedules import resolve_schedule
from .section import SECTION, PacelineConfig, show, value_at
from .stage_counts import (
    STAGES,
    blocks_per_layer,
    head_slices,
    resolve_method,
    resolve_stages,
    schedule_type,
    stages_a_rank,
)
from .tensor_parallel import TENSOR_PARALLEL, resolve_tensor_parallel

ZERO_STAGE = "zero_optimization.stage"

GRADIENTS = "data_types.grad_accum_dtype"

FLOATS = (
    *("fp32", "float32", "float", "torch.float32"),
    *("bf16", "bfloat16", "torch.bfloat16"),
    *("fp16", "float16", "half", "torch.float16"),
)
"""DeepSpeed's names of the dtypes that gradients can be added up in."""


def resolve(
    ds_config: Mapping[str, Any],
    *,
    world_size: int,
    num_layers: int,
    num_items: int,
    state_bytes: int | None,
    device_bytes: int | None,
    cpu: bool | None = None,
    section: PacelineConfig | None = None,
) -> RunPlan:
    """Decide what is left open and check what is not.

    Args:
        ds_config: without ``"auto"`` (see :func:`~paceline.config.fill_auto`).
        world_size: ranks.
        num_layers: decoder layers.
        num_items: what a partition cuts, where layers stay whole: embedding, decoder layers, head.
        state_bytes: of weights, gradients and optimizer states of the whole model; ``None`` if unknown.
        device_bytes: memory of the smallest device; ``None`` if unknown.
        cpu: whether the ranks compute on CPUs; asks DeepSpeed's accelerator if ``None``.
        section: of ``ds_config``, where it has been read already.

    Raises:
        ValueError: one line with the value, the rule and the remedy.
    """
    config = copy.deepcopy(dict(ds_config))
    chosen: dict[str, Choice] = {}
    check_objects(config)
    section = section or PacelineConfig.of(config)

    # These two not for DeepSpeed, which would put layers of its own into the stages.
    tensor_parallel = resolve_tensor_parallel(config.pop(TENSOR_PARALLEL, {}), world_size)
    ranks = world_size // tensor_parallel
    stages, why = resolve_stages(
        section,
        config,
        world_size=ranks,
        num_layers=num_layers,
        state_bytes=state_bytes,
        device_bytes=device_bytes,
        num_slices=tensor_parallel,
    )
    if why:
        chosen[STAGES] = Choice(stages, why)
    replicas = ranks // stages if tensor_parallel == 1 else None  # with slices it has to be 1 anyway
    expert_parallel = resolve_expert_parallel(config.pop(EXPERT_PARALLEL, {}), replicas)
    check_features(config, section, expert_parallel, tensor_parallel)

    blocks = blocks_per_layer(section)
    check_stages(section.pipeline.recompute, stages * stages_a_rank(section), num_layers, may_share=blocks > 1)
    method, path = resolve_method(section, config)
    if isinstance(method, tuple):
        slices = head_slices(section) if stages > 1 else 1
        finer = (blocks - 1) * num_layers + slices - 1
        _check_boundaries(path, method, stages * stages_a_rank(section), num_items + finer, blocks, slices)
    partition, defaults = resolve_partition(section, method)
    chosen |= {key: Choice(*default) for key, default in defaults.items()}
    data_parallel = ranks // stages
    in_rounds = schedule_type(section) in (MULTIDIRECTION, INTERLEAVED)
    sizes, reasons = batch_sizes(config, stages, data_parallel, in_rounds=in_rounds)
    config.update(sizes)
    chosen |= {key: Choice(sizes[key], reason) for key, reason in reasons.items()}

    schedule, defaults = resolve_schedule(section, stages, sizes[MICRO_BATCHES], micro_batch_size=sizes[MICRO_BATCH])
    chosen |= {key: Choice(*default) for key, default in defaults.items()}
    unequal = section.pipeline.unequal_replicas
    if unequal is not None:
        usual = {"replicas": data_parallel, "micro_batches": sizes[MICRO_BATCHES]}
        check_shares(first_shares(unequal, **usual), **usual, counts=schedule.micro_batch_counts(stages))
    if (schedule.directions or 1) > 1 and not value_at(config, ZERO_STAGE):
        why = "several directions have optimizer states once among the ranks that hold a stage, with 0 as with 1"
        chosen[ZERO_STAGE] = Choice(1, why)

    if _is_stock_adam(config) and (_on_cpu() if cpu is None else cpu):
        config["optimizer"].setdefault("params", {})["torch_adam"] = True
        chosen["optimizer.params.torch_adam"] = Choice(True, "saves building DeepSpeed's C++ Adam on CPUs")
    return RunPlan(
        section=section,
        stages=stages,
        data_parallel=data_parallel,
        partition_choice=partition,
        micro_batch_size=sizes[MICRO_BATCH],
        micro_batches=sizes[MICRO_BATCHES],
        train_batch_size=sizes[TRAIN_BATCH],
        schedule=schedule,
        ds_config=config,
        chosen=chosen,
        expert_parallel=expert_parallel,
        tensor_parallel=tensor_parallel,
    )


def _check_boundaries(
    path: str, boundaries: tuple[int, ...], stages: int, num_items: int, blocks: int, slices: int
) -> None:
    if len(boundaries) != stages + 1:
        raise ValueError(
            f"{path} is {show(boundaries)}: {stages} stages need {stages + 1} boundaries, it has {len(boundaries)}; "
            "correct it, or leave out one of stages and partition."
        )
    if boundaries[-1] != num_items:
        named = "decoder layers" if blocks == 1 else "halves of decoder layers"
        head = "head" if slices == 1 else f"{slices} slices of the head"
        raise ValueError(
            f"{path} is {show(boundaries)}: it must end at {num_items}, the number of items (embedding, "
            f"{num_items - 1 - slices} {named}, {head}); correct its last number."
        )


def check_features(
    config: Mapping[str, Any], section: PacelineConfig, expert_parallel: int = 1, tensor_parallel: int = 1
) -> None:
    """Raise ValueError for features of a pipeline that exclude each other: one line with values, rule and remedy.

    Args:
        section: of ``config``.
        expert_parallel: ranks of a stage that share its experts.
        tensor_parallel: ranks of a stage that have slices of its layers.
    """
    zero = config.get("zero_optimization", {})
    zero_stage = zero.get("stage", 0) if isinstance(zero, Mapping) else zero
    if not isinstance(zero_stage, int) or not 0 <= zero_stage <= 3:
        raise ValueError(f"{ZERO_STAGE} is {show(zero_stage)}: it must be 0, 1, 2 or 3; write one of them.")
    _check_numbers(config)
    method, _ = resolve_method(section, config)
    resolve_partition(section, method, default=None)
    check_exclusions(Features(config, section, expert_parallel=expert_parallel, tensor_parallel=tensor_parallel))


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Raise ValueError for values that DeepSpeed takes as they are, and a pipeline computes with.

    ``"auto"`` is filled, or refused, elsewhere.
    """
    every, interval = config.get("steps_per_print"), value_at(config, "pipeline.activation_checkpoint_interval")
    if every not in (None, "auto") and (isinstance(every, bool) or not isinstance(every, int | float) or every < 1):
        raise ValueError(f"steps_per_print is {show(every)}: it must be a number, at least 1; leave it out for none.")
    if interval not in (None, "auto") and (not isinstance(interval, int) or interval < 0):
        raise ValueError(
            f"pipeline.activation_checkpoint_interval is {show(interval)}: it must be a whole number, at least 0; "
            "leave it out to recompute nothing."
        )
    if (dtype := value_at(config, GRADIENTS)) is not None and dtype not in FLOATS:
        raise ValueError(f"{GRADIENTS} is {show(dtype)}: it must be fp32, bf16 or fp16; write one, or leave it out.")


def check_written(config: Mapping[str, Any], section: PacelineConfig, *, is_pipeline: bool) -> None:
    """:func:`check_features`, as far as a JSON alone tells: without ranks and model."""
    if not is_pipeline:
        check_exclusions(Features(config, section, is_pipeline=False))
        return
    expert_parallel = resolve_expert_parallel(config.get(EXPERT_PARALLEL, {}), None)
    tensor_parallel = resolve_tensor_parallel(config.get(TENSOR_PARALLEL, {}), None)
    left = {key: value for key, value in config.items() if key not in (EXPERT_PARALLEL, TENSOR_PARALLEL)}
    check_features(left, section, expert_parallel, tensor_parallel)


def check_ds_config(
    config: Mapping[str, Any], warn: Callable[[str], Any], *, is_pipeline: bool | None = None
) -> PacelineConfig:
    """Check everything that a JSON alone tells; the section.

    Args:
        warn: called with a line for each key that has no effect.
        is_pipeline: by default, whether the section has a pipeline.

    Raises:
        ValueError: one line with the value, the rule and the remedy.
    """
    check_scheduler(config)
    check_optimizer_values(config)
    section = PacelineConfig.of(config)
    if is_pipeline is None:
        is_pipeline = "pipeline" in config.get(SECTION, {})
    for line in [*near_misses(config), *(without_effect(config) if is_pipeline else ())]:
        warn(line)
    if is_pipeline:
        check_optimizer(config)
    check_written(config, section, is_pipeline=is_pipeline)
    return section


def _is_stock_adam(config: Mapping[str, Any]) -> bool:
    name = str(value_at(config, "optimizer.type")).lower()
    return name in ("adam", "adamw") and value_at(config, "optimizer.params.torch_adam") is None


def _on_cpu() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cpu")
