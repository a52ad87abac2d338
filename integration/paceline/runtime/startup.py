"""From a model, a JSON and the ranks that there are to stages, partition and batch sizes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import PretrainedConfig, PreTrainedModel

from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing
from ..config import (
    Choice,
    PacelineConfig,
    RunPlan,
    fill_auto,
    resolve,
    resolve_stages,
)
from ..config.batch_sizes import MICRO_BATCH, TRAIN_BATCH
from ..config.expert_parallel import EXPERT_PARALLEL
from ..config.planned_cuts import halves_excluded, slices_excluded
from ..config.recompute_keys import FIT, PATH
from ..config.section import PLAN, ScheduleConfig, show, value_at
from ..config.stage_counts import (
    FEWEST_THAT_GO,
    HALVES,
    SLICES,
    STAGES,
    asks_for_chunks,
    asks_for_halves,
    asks_for_less,
    asks_for_slices,
    blocks_per_layer,
    fewest_that_go,
    has_stages,
    head_slices,
    is_planned,
    may_have_chunks,
    may_plan_halves,
    may_plan_slices,
    states_fit,
    uncut,
)
from ..config.tensor_parallel import SIZE, TENSOR_PARALLEL, resolve_tensor_parallel
from ..hf.anatomy import anatomy_of
from ..hf.check import require_halves
from ..hf.peft import NeedsValuesError, trained_share, without_memory
from ..hf.weights import skeleton
from ..measure.device_memory import plannable_bytes
from ..measure.tokens import tokens_of_sample
from ..moe.hf_experts import experts_of, share_of
from ..planning.divisors import divisors
from ..planning.finer_cuts import HEAD_SLICES
from ..planning.stage_choice import Stages
from .first_partition import work_boundaries as work_boundaries
from .hetero import Shape
from .module import CausalLMPipeline, check_slices
from .plan_at_start import as_before, plan_stages, stages_kept, stages_of

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger("paceline")

STATE_BYTES = 16
"""Per parameter under Adam: weight, gradient and two moments in fp32, or their mixed-precision equivalents."""

FROZEN_BYTES = 4
"""Per parameter of a model of which only adapters are trained: its weight in fp32; the adapters are small."""


MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""DeepSpeed's monitors, by their section of the JSON, and the package that each takes."""


class _Room(TypedDict):
    """The world, and what a model takes of a device and finds on it."""

    world_size: int
    num_layers: int
    state_bytes: int
    device_bytes: int


def plan_for(
    hf_config: PretrainedConfig,
    ds_config: Mapping[str, object],
    section: PacelineConfig,
    control: ControlPlane,
    *,
    args: object = None,
    given: Iterable[str] = (),
    num_steps: Callable[[RunPlan], int] | None = None,
    peft_config: PeftConfig | None = None,
    sequence_length: int | None = None,
    gradient_checkpointing: bool = False,
    is_quantised: bool = False,
    plans_unasked: bool = False,
    has_own_loss: bool = False,
    kept: Mapping[str, object] | None = None,
) -> RunPlan:
    """Resolve what ``ds_config`` leaves open for this model on this world, and log the result once. Collective.

    Args:
        section: of ``ds_config``.
        args: the command line that fills ``"auto"`` values, see :func:`paceline.config.fill_auto`.
        given: names in ``args`` that the user gave.
        num_steps: optimizer steps of the run, once the batch sizes are known.
        peft_config: of adapters that are trained, where the weights themselves are frozen.
        sequence_length: tokens of a sample, where they are known.
        gradient_checkpointing: layers are computed again in the backward.
        is_quantised: weights will be quantised when they are loaded.
        plans_unasked: a number of stages that is left out is planned, as with ``"plan"``.
        has_own_loss: the loss is made of whole logits by something else than the model: a head that may be cut stays
            whole.
        kept: ``RunPlan.planned`` of a run in as many ranks that goes on, and is not to be planned anew.

    Raises:
        ValueError: stages, batch sizes and world do not fit.
    """
    if blocks_per_layer(section) > 1:
        require_halves(hf_config)
    if head_slices(section) > 1:
        check_slices(hf_config, head_slices(section))
    _check_monitors(ds_config, control)
    model = skeleton(hf_config)
    room = _room(model, ds_config, STATE_BYTES if peft_config is None else FROZEN_BYTES)
    world_size, num_items = room["world_size"], room["num_layers"] + 2
    slices = resolve_tensor_parallel(ds_config.get(TENSOR_PARALLEL, {}), world_size)
    whole_ranks: _Room = {**room, "world_size": world_size // slices}

    def filled(config: Mapping[str, object], max_steps: int | None, section: PacelineConfig = section) -> RunPlan:
        stages, _ = resolve_stages(section, config, **whole_ranks, num_slices=slices)
        complete = fill_auto(
            config,
            args,
            data_parallel=world_size // slices // stages,
            hidden_size=hf_config.get_text_config().hidden_size,
            max_steps=max_steps,
            given=given,
        )
        return resolve(complete, num_items=num_items, section=section, **room)

    without_schedule = {key: value for key, value in ds_config.items() if key != "scheduler"}
    is_quantised = is_quantised or getattr(hf_config, "quantization_config", None) is not None
    is_open = is_planned(section, ds_config, unasked=plans_unasked) and world_size > 1 and not is_quantised
    is_open = is_open and slices == 1
    fitting = [s for s in divisors(world_size) if states_fit(s, room["state_bytes"], room["device_bytes"])]
    usual = fewest_that_go(
        section,
        ds_config,
        lambda section: filled(without_schedule, None, section),
        fitting if is_open else (),
        unasked=plans_unasked,
    )
    recomputes = gradient_checkpointing or bool(value_at(usual.ds_config, "pipeline.activation_checkpoint_interval"))
    planned: RunPlan | None = None
    if is_open:
        cuts = _finer_cuts(
            section, usual, kept, hf_config, peft_config, unasked=plans_unasked, has_own_loss=has_own_loss
        )
        kept = _kept_that_goes(kept, cuts, recomputes=recomputes)
        options = _options(without_schedule, usual, section, filled, fitting, kept, unasked=plans_unasked)
        if kept is not None and stages_kept(kept) not in options:
            if dist.get_rank() == 0:
                logger.warning(
                    "plan: the checkpoint's %s do not go with these flags and JSON: chosen anew", stages_kept(kept).text
                )
            kept = None
        if len(options) == 1 and kept is not None and len(kept) > 1:
            planned = as_before(options, kept)
        elif len(options) > 1 or (options and cuts.are_asked and max(options).num_stages > 1):
            shape = Shape(
                dtype_of(usual.ds_config),
                usual.micro_batch_size,
                tokens_of_sample(sequence_length, hf_config),
                recomputes,
                usual.half_layers,
            )
            planned = plan_stages(
                *(hf_config, control, options, usual, shape, peft_config, kept),
                may_halve=cuts.halves,
                may_slice=cuts.slices,
            )
    elif (section.pipeline.stages == PLAN or asks_for_less(section)) and dist.get_rank() == 0:
        logger.warning(
            "plan: paceline.pipeline.stages, half_layers, head_slices or schedule.chunks is "
            '"plan", and this run cannot plan them: '
            "it takes several ranks, a model that is not quantised, the schedule 1f1b or adaptive, and no boundaries; "
            "it starts with %d",
            usual.stages,
        )

    taken = usual if planned is None else planned
    # As many stages as were found, where the fewest do not go with the JSON.
    is_another = planned is None and usual.section.pipeline.stages != section.pipeline.stages
    if planned is not None:
        ds_config = {**ds_config, TRAIN_BATCH: planned.train_batch_size, MICRO_BATCH: planned.micro_batch_size}
        if args is None and planned.data_parallel > usual.data_parallel and dist.get_rank() == 0:
            logger.warning(
                "there are %d replicas: each must be given samples of its own, those of engine.grid.data_parallel_id "
                "of engine.plan.data_parallel, in micro-batches of engine.plan.micro_batch_size; write "
                "paceline.pipeline.stages to keep their number",
                planned.data_parallel,
            )
    section = section if planned is None and not is_another else taken.section
    resolved = filled(ds_config, num_steps(taken) if num_steps is not None else None, section)
    _check_precision(resolved.ds_config)
    _check_said_once(resolved, recomputes=recomputes)
    if peft_config is not None:
        resolved = _with_adapters(resolved, peft_config, model)
    if planned is not None:
        samples = usual.chosen.get(TRAIN_BATCH)
        of_batch = {} if samples is None else {TRAIN_BATCH: samples}
        resolved = replace(resolved, chosen=of_batch | resolved.chosen | planned.chosen)
        resolved = replace(resolved, pool=planned.pool, planned=planned.planned)
    elif is_another:
        resolved = replace(resolved, chosen={STAGES: Choice(usual.stages, FEWEST_THAT_GO), **resolved.chosen})
    if dist.get_rank() == 0:
        for path, choice in resolved.chosen.items():
            logger.info("chosen: %s = %s (%s)", path, json.dumps(choice.value), choice.why)
        logger.info("config: %s", json.dumps(resolved.ds_config, default=str))
    return resolved


def _room(model: PreTrainedModel, ds_config: Mapping[str, object], bytes_each: int) -> _Room:
    """Collective. Ranks see different amounts of free memory: the least of all decides.

    Args:
        bytes_each: of a parameter's states.
    """
    device = torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    least = torch.tensor([plannable_bytes(device, ranks_sharing(device))], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return {
        "world_size": dist.get_world_size(),
        "num_layers": anatomy_of(model).num_layers,
        "state_bytes": bytes_each * parameters_of_rank(model, ds_config),
        "device_bytes": int(least),
    }


class _FinerCuts(NamedTuple):
    """Whether a plan may end stages within decoder layers, and have stages share the head."""

    halves: bool
    slices: bool
    are_asked: bool
    """The section asks for one of those that may be."""


def _finer_cuts(
    section: PacelineConfig,
    usual: RunPlan,
    kept: Mapping[str, object] | None,
    hf_config: PretrainedConfig,
    peft_config: PeftConfig | None,
    *,
    unasked: bool,
    has_own_loss: bool,
) -> _FinerCuts:
    """The arguments are those of :func:`plan_for`."""
    kept = kept or {}
    asks_halves, asks_slices = asks_for_halves(section), asks_for_slices(section)
    halves = may_plan_halves(section) and (unasked or asks_halves or kept.get(HALVES) is True)
    if halves:
        halves = _goes("in halves of layers", halves_excluded(usual), is_asked=asks_halves)
    slices = may_plan_slices(section) and (unasked or asks_slices or kept.get(SLICES, 1) != 1)
    if slices:
        why_not = "the loss is not the model's own" if has_own_loss else ""
        if peft_config is not None and _has_adapted_head(hf_config, peft_config):
            why_not = why_not or "adapters are in the head"
        why_not = why_not or slices_excluded(usual, HEAD_SLICES)
        slices = _goes("with slices of the head", why_not, is_asked=asks_slices)
    return _FinerCuts(halves, slices, (asks_halves and halves) or (asks_slices and slices))


def _kept_that_goes(
    kept: Mapping[str, object] | None, cuts: _FinerCuts, *, recomputes: bool
) -> Mapping[str, object] | None:
    """The plan of the run before, without what does not go any more."""
    if kept is None:
        return None
    gone = {PATH} if recomputes else set()  # what this start asks for goes before the one before
    if not cuts.halves and kept.get(HALVES) is True:
        gone.add(HALVES)
    if not cuts.slices and kept.get(SLICES, 1) != 1:
        gone.add(SLICES)
    return {path: value for path, value in kept.items() if path not in gone}


def _with_adapters(resolved: RunPlan, peft_config: PeftConfig, model: PreTrainedModel) -> RunPlan:
    """With the share of the parameters that is trained, where it is the same on all stages.

    Raises:
        ValueError: layers are to be recomputed as it takes, and the adapters cannot be counted.
    """
    try:
        without_memory(peft_config, model, anatomy_of(model))
    except NeedsValuesError:  # adapters that cannot be made without memory count as the whole model
        if resolved.recompute == FIT:
            raise
        return resolved
    # An embedding or a head that is trained whole is not to be spread over all stages.
    if resolved.recompute == FIT or not getattr(peft_config, "modules_to_save", None):
        return replace(resolved, trained=trained_share(model))
    return resolved


def _check_precision(ds_config: Mapping[str, object]) -> None:
    """Raise ValueError where DeepSpeed would refuse fp16 on this device, without the key and the remedy."""
    accelerator = get_accelerator()
    if value_at(ds_config, "fp16.enabled") and not accelerator.is_fp16_supported():
        raise ValueError(
            f"fp16.enabled (--fp16) is true, and DeepSpeed has no fp16 on this device ({accelerator.device_name()}): "
            "take bf16 (--bf16), or leave it out for fp32."
        )


def _check_monitors(ds_config: Mapping[str, object], control: ControlPlane) -> None:
    """Raise ValueError on all ranks where rank 0, which starts DeepSpeed's monitors, lacks a package of theirs."""
    with control.together("looking for the monitors' packages"):
        for key, package in MONITORS.items() if control.rank == 0 else ():
            if value_at(ds_config, f"{key}.enabled") and find_spec(package) is None:
                raise ValueError(
                    f"{key}.enabled is true, and its package is not installed: pip install {package}, or leave it out."
                )


def _options(
    ds_config: Mapping[str, object],
    usual: RunPlan,
    section: PacelineConfig,
    filled: Callable[[Mapping[str, object], int | None, PacelineConfig], RunPlan],
    fitting: Iterable[int],
    kept: Mapping[str, object] | None,
    *,
    unasked: bool,
) -> dict[Stages, RunPlan]:
    """Plans by stages, with the same samples a step in micro-batches of the same size.

    A schedule that is left out is ``"adaptive"``, where nothing excludes it; several chunks have no other. Where one
    number of stages is left, that of chunks alone is no choice that a run makes unasked.

    Args:
        fitting: numbers of stages that leave room on the devices.
    """
    if not is_planned(uncut(section), ds_config, unasked=unasked):
        return {stages_of(usual): usual}  # finer cuts alone are planned, for what there is without
    counts = {usual.stages}
    if not has_stages(section, ds_config):
        counts |= set(fitting)
        counts |= set() if kept is None else {stages_kept(kept).num_stages}  # though less memory may be free by now
    chunks = (1, 2) if may_have_chunks(section) else (1,)
    same = {**ds_config, TRAIN_BATCH: usual.train_batch_size, MICRO_BATCH: usual.micro_batch_size}
    schedule = section.pipeline.schedule
    tuned = ScheduleConfig(type="adaptive") if schedule is None else schedule
    found: dict[Stages, RunPlan] = {}
    refused: dict[Stages, str] = {}
    tried: list[ScheduleConfig | None]
    for shape in map(Stages._make, product(sorted(counts), chunks)):
        if shape.chunks > 1:
            tried = [tuned.model_copy(update={"chunks": shape.chunks})] if shape.num_stages > 1 else []
        elif schedule is None:
            tried = [tuned, None] if shape.num_stages > 1 else [None]
        else:
            tried = [schedule.model_copy(update={"chunks": 1}) if schedule.chunks == PLAN else schedule]
        for one in tried:
            update = {"stages": shape.num_stages, "schedule": one}
            written = section.model_copy(update={"pipeline": section.pipeline.model_copy(update=update)})
            try:
                found[shape] = filled(same, None, written)
                break
            except ValueError as error:
                refused[shape] = str(error)
    is_asked = section.pipeline.stages == PLAN or asks_for_chunks(section)
    if not is_asked and len({shape.num_stages for shape in found}) == 1:
        found = {shape: plan for shape, plan in found.items() if shape.chunks == 1}
    if len(found) < 2 and refused and dist.get_rank() == 0:
        level = logging.INFO if is_asked else logging.DEBUG
        logger.log(level, "plan: these batch sizes and layers leave one number of stages to choose from")
        for shape, why in refused.items():
            logger.debug("plan: not %s: %s", shape.text, why)
    return found


def _has_adapted_head(hf_config: PretrainedConfig, peft_config: PeftConfig) -> bool:
    """Whether adapters are in the head, or may be."""
    model = skeleton(hf_config)
    try:
        without_memory(peft_config, model, anatomy_of(model))
    except NeedsValuesError:  # adapters that cannot be made without memory
        return True
    return type(model.get_output_embeddings()) is not torch.nn.Linear


def _goes(how: str, why_not: str, *, is_asked: bool) -> bool:
    """Whether nothing is in the way of stages that are cut so."""
    if why_not and dist.get_rank() == 0:
        logger.log(logging.INFO if is_asked else logging.DEBUG, "plan: not %s: %s", how, why_not)
    return not why_not


def _check_said_once(resolved: RunPlan, *, recomputes: bool) -> None:
    """Raise ValueError where the JSON says which layers are recomputed, and something else that all are."""
    if resolved.recompute is not None and recomputes:
        raise ValueError(
            f"{PATH} is {show(resolved.recompute)}, and gradient checkpointing, which recomputes all layers, is on as "
            "well: leave one of them out (TRL's SFTConfig has gradient_checkpointing=True unless it is given)."
        )


def dtype_of(ds_config: Mapping[str, object]) -> torch.dtype:
    """The dtype that DeepSpeed will train in."""
    for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if value_at(ds_config, f"{name}.enabled"):
            return dtype
    return torch.float32


def parameters_of_rank(model: PreTrainedModel, ds_config: Mapping[str, object]) -> int:
    """Parameters of a model in one stage: of experts one rank's share, of layers in slices about one slice."""
    whole = int(sum(p.numel() for p in model.parameters()))
    section = value_at(ds_config, EXPERT_PARALLEL)
    size = section.get("autoep_size", 1) if isinstance(section, Mapping) and section.get("enabled") else 1
    if (slices := resolve_tensor_parallel(ds_config.get(TENSOR_PARALLEL, {}), None)) > 1:
        of_layers = sum(p.numel() for p in anatomy_of(model).layers_of(model).parameters())
        return whole - of_layers + of_layers // slices
    if not isinstance(size, int) or size < 1:
        return whole
    layers = experts_of(model).values()
    experts = sum(p.numel() for layer in layers for p in layer.parameters())
    return whole - int(experts) + sum(share_of(layer, size) for layer in layers)


def plan_for_pipeline(pipeline: CausalLMPipeline, ds_config: Mapping[str, object], section: PacelineConfig) -> RunPlan:
    """Resolve what ``ds_config`` leaves open for a pipeline that is built already.

    Args:
        section: of ``ds_config``.

    Raises:
        ValueError: it asks for another number of stages than the pipeline has, or for a partition of another model.
    """
    asked = section.pipeline.stages
    if asked not in (None, PLAN, pipeline.num_stages):
        raise ValueError(
            f"paceline.pipeline.stages is {asked} and the pipeline was built with {pipeline.num_stages} stages: "
            "leave the key out, or build it anew."
        )
    has_halves = pipeline.anatomy.blocks_per_layer == 2
    if section.pipeline.half_layers is True and not has_halves:
        raise ValueError(
            "paceline.pipeline.half_layers is true and the pipeline was built with whole layers: leave the key out, or "
            "build it with half_layers=True."
        )
    slices = pipeline.anatomy.head_slices
    asked_slices = section.pipeline.head_slices
    if asked_slices not in (1, PLAN, slices):
        raise ValueError(
            f"paceline.pipeline.head_slices is {asked_slices} and the pipeline was built with {slices}: leave the key "
            f"out, or build it with head_slices={asked_slices}."
        )
    finer = {"half_layers": has_halves, "head_slices": slices}
    built = section.pipeline.model_copy(update={"stages": pipeline.num_stages, **finer})
    experts = {"enabled": True, "autoep_size": pipeline.expert_parallel}
    slices = pipeline.tensor_parallel
    config = {EXPERT_PARALLEL: experts, TENSOR_PARALLEL: {SIZE: slices}, **ds_config}
    num_layers = pipeline.anatomy.num_layers
    _check_monitors(config, pipeline.control)
    resolved = resolve(
        fill_auto(config, None, data_parallel=dist.get_world_size() // slices // pipeline.num_stages),
        world_size=dist.get_world_size(),
        num_layers=num_layers,
        num_items=num_layers + 2,
        state_bytes=None,
        device_bytes=None,
        section=section.model_copy(update={"pipeline": built}),
    )
    _check_precision(resolved.ds_config)
    _check_said_once(resolved, recomputes=pipeline.is_recomputed)
    if resolved.recompute == FIT:
        raise ValueError(
            f'{PATH} is "{FIT}", which is found before the weights are there, and the pipeline is built: give the '
            "model itself to have it built, or write how many layers of each stage are recomputed."
        )
    if resolved.expert_parallel != pipeline.expert_parallel:
        raise ValueError(
            f"expert_parallel.autoep_size is {resolved.expert_parallel} and the pipeline was built with "
            f"expert_parallel={pipeline.expert_parallel}: leave the section out, or build it anew."
        )
    if resolved.tensor_parallel != slices:
        raise ValueError(
            f"{TENSOR_PARALLEL}.{SIZE} is {resolved.tensor_parallel} and the pipeline was built with "
            f"tensor_parallel={slices}: leave the section out, or build it anew."
        )
    pipeline_section = section.pipeline.model_copy(update=finer)
    return replace(resolved, section=section.model_copy(update={"pipeline": pipeline_section}))
