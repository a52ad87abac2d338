"""``paceline.initialize``: ``deepspeed.initialize``, with Hugging Face models as pipelines."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch.nn import Module
from transformers import PretrainedConfig, PreTrainedModel

from ..comm.control import ControlPlane
from ..comm.groups import end_left_groups, end_with, groups_here, naming_the_interface, naming_the_meeting_place
from ..comm.launcher_variables import translate
from ..comm.single_process import become_a_world, is_alone
from ..comm.staging import share_gpu, shares_gpu
from ..config import (
    Features,
    PacelineConfig,
    PipelineConfig,
    RunPlan,
    check_features,
    check_optimizer_values,
    check_scheduler,
    exclusion,
    read_ds_config,
    warn_near_misses,
    without_effect,
)
from ..config.exclusions import COMPILED, HALVES, HEAD, LAYERS, NO_FLUSH, RECOMPUTED, SLICED, UNEQUAL
from ..config.recompute_keys import PATH
from ..config.section import HETERO, PLAN, WORK, show, value_at
from ..config.stage_counts import PARTITION, STAGES, may_be_late, open_keys, stages_a_rank
from ..hf.check import require_language_model, require_supported
from ..hf.peft import config_of_adapters, is_peft_model
from ..hf.stage import require_whole
from ..patches.deepspeed_initialize import engine_class, plain_engine_class
from ..patches.deepspeed_ops import NO_SHM_COMM
from ..patches.registry import applied
from ..patches.repairs import repair_deepspeed
from ..schedules.asynchronous import STREAMS
from ..schedules.families import chunked_route
from ..supervise.build_locks import warn_of_locks
from ..supervise.watch import WATCH
from .builder import build_pipeline
from .compiling import compile_as_written
from .engine import PacelineEngine
from .first_partition import first_partition, recompute_as_written
from .initialize_patch import plain_engine_for, with_plan
from .module import CausalLMPipeline, config_of
from .pipe_module import routes_of
from .rate import check_scheduler_object
from .startup import plan_for, plan_for_pipeline

logger = logging.getLogger("paceline")

TIMEOUT_S = 1800.0
"""Without progress for so long, a job ends, unless it has called ``WATCH.start`` with another limit before."""


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """As :func:`deepspeed.initialize`; in addition ``model`` may be a Hugging Face model to be cut into stages.

    Args:
        model: * a hub name, a directory or a ``PretrainedConfig``: becomes a :class:`CausalLMPipeline`;
            * a ``PreTrainedModel``, also one with PEFT's adapters (``get_peft_model``): likewise, if the config has
              ``"paceline": {"pipeline": …}``;
            * a ``PipelineModule``: run by :class:`PacelineEngine`;
            * any other module: given to DeepSpeed as it is, and run by an engine of ours if the ``"paceline"`` section
              has something for it: ``"moe"``, ``"natural_gradient"``, ``"max_change"``, ``"averaging"``.
        training_data: a data set with a length, not a stream.
        config: path or dict of the DeepSpeed JSON, with its ``"paceline"`` section, and numbers in place of ``"auto"``:
            there is no command line to fill it from. Or the plan that the JSON has been resolved to, for a pipeline
            that was built as it says.
        lr_scheduler: a function, ``lambda optimizer: StepLR(optimizer, 100)``, called with the optimizer that trains;
            or a scheduler over ``optimizer``. One over another would never act, and is refused.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Raises:
        ValueError: on every rank, if config, model and world do not fit.

    Example::

        engine, *_ = paceline.initialize(model="Qwen/Qwen3-0.6B", config="ds.json")
        loss = engine.train_batch(iter(loader))  # batches with input_ids, labels, attention_mask, …
    """
    source = config if config is not None else config_params
    if source is None:
        source, args = getattr(args, "deepspeed_config", None), None
    if source is None:
        raise ValueError("no DeepSpeed config: pass config=PATH or a dict, or args with deepspeed_config.")
    plan = source if isinstance(source, RunPlan) else None
    ds_config = read_ds_config(source) if plan is None else plan.ds_config
    section = PacelineConfig.of(ds_config) if plan is None else plan.section
    check_scheduler(ds_config)
    if optimizer is None:
        check_optimizer_values(ds_config)
    check_scheduler_object(lr_scheduler, optimizer)
    start_distributed(dist_init_required=dist_init_required, distributed_port=distributed_port)
    WATCH.start(TIMEOUT_S)
    if dist.get_rank() == 0:
        warn_near_misses(ds_config)

    if training_data is not None and not hasattr(training_data, "__len__"):
        raise ValueError(
            f"training_data is a {type(training_data).__name__}, a stream without a length, which DeepSpeed's loader "
            "needs: leave it out, and give train_batch() an iterator over a loader of your own, "
            "iter(DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu()))."
        )
    repair_deepspeed()
    end_left_groups()
    groups = groups_here()
    is_given = isinstance(model, PipelineModule)
    has_section = "pipeline" in ds_config.get("paceline", {})
    boundaries: list[int] | None = None
    is_in_memory = isinstance(model, PreTrainedModel) or is_peft_model(model)
    # A module of one's own is trained as it is if one stage is all that the section asks for.
    is_to_be_cut = has_section and not is_given and (is_in_memory or section.pipeline != PipelineConfig(stages=1))
    if isinstance(model, (str, Path, PretrainedConfig)) or is_to_be_cut:
        model, plan = _pipeline(model, ds_config, section)
    elif isinstance(model, CausalLMPipeline) and plan is None:
        plan = plan_for_pipeline(model, ds_config, section)
        is_asked = PARTITION not in plan.chosen and plan.partition in (HETERO, WORK)
        if is_asked and model.num_stages > 1 and not model.is_planned:
            boundaries = _measure(model, plan)
        recompute_as_written(model, plan)
        compile_as_written(model, plan)
    ds_config = ds_config if plan is None else plan.ds_config
    engine: type | None = None
    patches = []
    if isinstance(model, PipelineModule):
        if plan is None:
            check_features(ds_config, section)
        idle = without_effect(ds_config)
        if is_given and not isinstance(source, RunPlan):
            why = f"the {type(model).__name__} is built; give the model itself to have it built as planned"
            idle += [f'{key} is "{PLAN}", which has no effect: {why}.' for key in open_keys(section)]
        for line in idle if dist.get_rank() == 0 else ():
            logger.warning(line)
        _check_schedule(model, ds_config, section, plan)
        engine = PacelineEngine
        patches = [engine_class(with_plan(engine, plan or section, stages=model.num_stages))]
        if model_parameters is None:
            model_parameters = [p for p in model.parameters() if p.requires_grad]
    elif (engine := plain_engine_for(section, ds_config)) is not None:
        patches = [plain_engine_class(with_plan(engine, section))]
    with applied(*patches):
        results = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=ds_config,
            mesh_param=mesh_param,
        )
    assert engine is None or isinstance(results[0], engine), f"deepspeed.initialize built a {type(results[0]).__name__}"
    if boundaries is not None:
        results[0].repartition(boundaries)
    if isinstance(model, PipelineModule):
        end_with(results[0] if is_given else model, groups)
    return tuple(results)


def _check_schedule(
    model: PipelineModule, ds_config: Mapping[str, Any], section: PacelineConfig, plan: RunPlan | None
) -> None:
    """Raise ValueError where a pipeline that is there was not built for the schedule."""
    schedule = section.pipeline.schedule
    kind = None if schedule is None else schedule.type
    if not isinstance(model, CausalLMPipeline):
        if (number := section.pipeline.stages) not in (None, PLAN, model.num_stages):
            raise ValueError(
                f"{STAGES} is {number} and the {type(model).__name__} has {model.num_stages}: leave the key out, or "
                f"make it with num_stages={number}."
            )
        is_late = may_be_late(section)
        if kind in STREAMS or is_late:
            key = "late_gradients is true" if is_late else f"type {show(kind)}"
            written = (f"paceline.pipeline.schedule.{key}", f"the model is a {type(model).__name__}")
            raise ValueError(exclusion(NO_FLUSH, LAYERS).message(*written))
        for feature in (UNEQUAL, "recompute", HALVES, HEAD, COMPILED, SLICED):
            text = Features(ds_config, section).written(feature)
            if text is not None:
                raise ValueError(exclusion(feature, LAYERS).message(text, f"the model is a {type(model).__name__}"))
    elif plan is not None and model.has_experts:
        check_experts_without_flush(plan, is_recomputed=model.is_recomputed)
    stages = model.num_stages
    wanted: tuple[tuple[int, ...], ...] = (tuple(range(stages)),)
    if plan is not None:
        wanted = plan.schedule.routes(stages)
    elif stages_a_rank(section) > 1:
        wanted = (chunked_route(str(kind), stages, stages_a_rank(section)),)
    if routes_of(model) != wanted:
        raise ValueError(
            f"paceline.pipeline.schedule.type is {show(kind)}, which needs a pipeline with the routes {wanted}, and "
            f"this one was built with {routes_of(model)}: give the model itself to have it built, or pass these routes."
        )


def check_experts_without_flush(plan: RunPlan, *, is_recomputed: bool) -> None:
    """Raise ValueError where a model with experts recomputes layers in a schedule without a flush.

    Args:
        is_recomputed: layers are, by what else there is beside the plan's JSON.
    """
    interval = value_at(plan.ds_config, "pipeline.activation_checkpoint_interval")
    if plan.schedule.is_asynchronous and (interval or is_recomputed):
        asked = plan.recompute
        key = "pipeline.activation_checkpoint_interval" if asked is None else PATH
        value = (interval or 1) if asked is None else show(list(asked) if isinstance(asked, tuple) else asked)
        told = f"the model has experts, {key} is {value}"
        raise ValueError(exclusion(RECOMPUTED, NO_FLUSH).message(told, f"{show(plan.schedule.type)} has no flush"))


def start_distributed(**kwargs: Any) -> None:
    """``deepspeed.init_distributed`` without the C++ build that DeepSpeed starts with on a CPU.

    A process that no launcher has started is a world of one rank; one that mpirun or srun has started meets the others
    by what these say. Where this node has more ranks than GPUs, ranks share them, and the backend is gloo.
    """
    if not dist.is_initialized():
        translate(os.environ)
        if is_alone(os.environ):
            become_a_world(os.environ)
            logger.info(
                "no launcher has started this process: it is the only rank (torchrun and deepspeed start several)"
            )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn_of_locks()
    if shares_gpu():
        share_gpu(kwargs.get("timeout"))
    on_cpu = get_accelerator().device_name() == "cpu"
    if not on_cpu:
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with applied(*([NO_SHM_COMM] if on_cpu else [])), naming_the_interface(), naming_the_meeting_place():
        deepspeed.init_distributed(get_accelerator().communication_backend_name(), **kwargs)


def _measure(pipeline: CausalLMPipeline, resolved: RunPlan) -> list[int]:
    """Boundaries by the layers' times or work, for a pipeline that was built by something else."""
    dtype = next(pipeline.parameters()).dtype
    found = first_partition(pipeline.config, resolved, pipeline.control, dtype=dtype)
    assert isinstance(found.partition, list), "more than one stage"
    pipeline.planned(found.profile)
    return found.partition


def _pipeline(
    model: str | Path | PretrainedConfig | PreTrainedModel, ds_config: dict[str, Any], section: PacelineConfig
) -> tuple[CausalLMPipeline, RunPlan]:
    control = ControlPlane.create()
    with control.together("reading the model's config"):
        require_whole(model)
        require_language_model(model)
        hf_config = config_of(model)
        require_supported(hf_config)
    parts = model.modules() if isinstance(model, Module) else ()  # the property of it all is named anew, and warns
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in parts)
    adapters = config_of_adapters(model)
    plan = plan_for(hf_config, ds_config, section, control, peft_config=adapters, gradient_checkpointing=recomputes)
    return build_pipeline(model, hf_config, plan, control), plan
