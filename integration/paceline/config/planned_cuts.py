"""Reasons why a run may not choose stages that end within decoder layers, or that share the head."""

from __future__ import annotations

from dataclasses import replace

from .optimizers import is_elementwise_name
from .resolve import check_features
from .run_plan import RunPlan
from .section import WORK, show, value_at
from .stage_counts import PARTITION, as_it_starts


def halves_excluded(plan: RunPlan) -> str:
    """Why stages of ``plan`` cannot end within decoder layers; empty: they can."""
    return _excluded(plan, "half_layers", True)


def slices_excluded(plan: RunPlan, number: int) -> str:
    """Why stages of ``plan`` cannot share a head of so many slices; empty: they can, as far as the JSON tells."""
    method, name = plan.partition_choice.method, value_at(plan.ds_config, "optimizer.type") or "AdamW"
    if method != WORK:
        return f'{PARTITION} is {show(method)}, and only "{WORK}" has stages share the head'
    if not is_elementwise_name(str(name)):
        return f"optimizer.type is {name}, which is not elementwise"
    return _excluded(replace(plan, section=as_it_starts(plan.section, plan.stages)), "head_slices", number)


def _excluded(plan: RunPlan, key: str, value: object) -> str:
    pipeline = plan.section.pipeline.model_copy(update={key: value})
    try:
        check_features(
            plan.ds_config,
            plan.section.model_copy(update={"pipeline": pipeline}),
            plan.expert_parallel,
            plan.tensor_parallel,
        )
    except ValueError as error:
        return str(error)
    return ""
