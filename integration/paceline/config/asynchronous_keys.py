"""What the types of schedule whose steps may run into each other ask of the rest of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..schedules.asynchronous import ONE_DIRECTION, STREAMS
from .section import SECTION, PacelineConfig, PartitionConfig, show, value_at
from .stage_counts import PARTITION, TYPE, schedule_type


def check_asynchronous(config: Mapping[str, Any], section: PacelineConfig, expert_parallel: int = 1) -> None:
    """Raise ValueError for what these types of schedule cannot do yet: one line with value, rule and remedy.

    Args:
        config: a DeepSpeed config; with a schedule of another type it is left alone.
        section: of ``config``.
        expert_parallel: ranks of a stage that share its experts.
    """
    kind = schedule_type(section)
    if kind not in STREAMS:
        return
    written = f"{TYPE} {show(kind)}"
    every = (section.pipeline.partition or PartitionConfig()).repartition_every
    if every:
        raise ValueError(
            f"{PARTITION}.repartition_every is {every} and {written}: with this schedule a layer is on several "
            "devices, or in steps that are under way, and stays where it is; write 0, or take another schedule."
        )
    if expert_parallel > 1:
        raise ValueError(
            f"expert_parallel.autoep_size is {expert_parallel} and {written}: with this schedule every rank has all "
            "experts of its stages; leave expert_parallel out, or take another schedule."
        )
    if section.moe is not None:
        raise ValueError(
            f"{SECTION}.moe is there and {written}: with this schedule experts stay where they are; leave moe out, or "
            "take another schedule."
        )
    for part in ("natural_gradient", "max_change", "averaging"):
        if getattr(section, part) is not None:
            raise ValueError(
                f"{SECTION}.{part} is there and {written}: they have not been made to work together; leave one of them "
                "out."
            )
    trace_every = section.report.trace_every
    if trace_every is not None:
        raise ValueError(
            f"{SECTION}.report.trace_every is {trace_every} and {written}: timelines of this schedule are not recorded "
            "yet (`paceline simulate --draw` shows predicted ones); leave trace_every out, or take another schedule."
        )
    if value_at(config, "torch_autocast.enabled") is True:
        raise ValueError(
            f"torch_autocast.enabled is true and {written}: backwards would use copies of weights that an update has "
            "replaced; write bf16 instead, or take another schedule."
        )
    if kind == ONE_DIRECTION and value_at(config, "fp16.enabled") is True:
        raise ValueError(
            f"fp16.enabled is true and {written}: the backwards of two steps overlap, so that there is no one loss "
            "scale; write bf16 instead, or take another schedule."
        )
