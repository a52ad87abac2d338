"""Build the pipeline of a Hugging Face model: the one way for ``initialize``, the Trainer and the main job."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig

from ..comm.control import ControlPlane
from ..config import RunPlan
from ..config.resolve import check_features
from ..config.section import HETERO
from ..config.stage_counts import SLICES
from ..hf.sliced_head import check_head
from ..hf.weights import skeleton
from ..planning.finer_cuts import HEAD_SLICES, largest_stages
from .compiling import compile_as_written
from .first_partition import first_partition, recompute_as_written
from .module import CausalLMPipeline, ModelSource
from .startup import dtype_of

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger("paceline")

WORTH_A_LINE = 0.1
"""Share of the largest stage's work that slices must save to be advised."""


def build_pipeline(
    model: ModelSource,
    hf_config: PretrainedConfig,
    resolved: RunPlan,
    control: ControlPlane,
    *,
    sequence_length: int | None = None,
    gradient_checkpointing: bool = False,
    seed: int = 42,
    timeout: timedelta | None = None,
    peft_config: PeftConfig | None = None,
    **from_pretrained: object,
) -> CausalLMPipeline:
    """Choose the first partition and load this rank's stage. Collective.

    Args:
        model: as for :class:`CausalLMPipeline`, as are ``seed``, ``timeout``, ``peft_config``, ``from_pretrained``.
        resolved: the JSON, completed for this model and world.
        sequence_length: tokens of a sample, where they are known; the partition is chosen for them.
        gradient_checkpointing: recompute each decoder layer's activations in the backward pass.

    Raises:
        ValueError: on every rank: a partition or adapters that do not fit the model.
    """
    dtype = dtype_of(resolved.ds_config)
    if isinstance(model, nn.Module) and not control.rank:
        _tell_of_another_dtype(model, dtype)
    first = first_partition(
        hf_config,
        resolved,
        control,
        dtype=dtype,
        sequence_length=sequence_length,
        gradient_checkpointing=gradient_checkpointing,
    )
    pipeline = CausalLMPipeline(
        model,
        num_stages=resolved.stages,
        partition=first.partition,
        dtype=dtype,
        seed=seed,
        gradient_checkpointing=gradient_checkpointing,
        half_layers=resolved.half_layers,
        head_slices=resolved.head_slices,
        routes=resolved.schedule.routes(resolved.stages),
        expert_parallel=resolved.expert_parallel,
        tensor_parallel=resolved.tensor_parallel,
        config=hf_config,
        timeout=timeout,
        peft_config=peft_config,
        **from_pretrained,
    )
    pipeline.planned(first.profile)
    _advise_slices(pipeline, resolved)
    recompute_as_written(pipeline, resolved, first.recomputed)
    compile_as_written(pipeline, resolved)
    return pipeline


def _tell_of_another_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Say that a model in half or in double precision trains in fp32: DeepSpeed itself would train it as it is."""
    others = torch.bfloat16, torch.float16, torch.float64
    own = next((p.dtype for p in model.parameters() if p.dtype in others), dtype)
    if dtype == torch.float32 and own != dtype:
        logger.warning(
            "the model has weights in %s, and is trained and written in float32, since the JSON asks for neither bf16 "
            'nor fp16: write "bf16": {"enabled": true} to train in bf16 (bf16=True of TrainingArguments)',
            str(own).removeprefix("torch."),
        )


def _advise_slices(pipeline: CausalLMPipeline, resolved: RunPlan) -> None:
    """Say once, on the first rank, where a head in slices would make the largest stage clearly smaller, unless the run
    has compared them."""
    if SLICES in resolved.planned or pipeline.control.rank:
        return
    if pipeline.num_virtual_stages > pipeline.num_stages or pipeline.has_slices:
        return
    now, sliced = largest_stages([item.work for item in pipeline.items], pipeline.parts)
    if sliced > (1 - WORTH_A_LINE) * now or not _may_slice(pipeline, resolved):
        return
    logger.info(
        'partition: the largest stage has %.2f times a mean one\'s work; "head_slices": %d in "pipeline", with which '
        "stages share the head, would make it %.2f times",
        *(now, HEAD_SLICES, sliced),
    )


def _may_slice(pipeline: CausalLMPipeline, resolved: RunPlan) -> bool:
    """Whether neither the model nor another feature of the run is in the way of a head in slices."""
    keys = resolved.section.pipeline.model_copy(update={"head_slices": HEAD_SLICES})
    section = resolved.section.model_copy(update={"pipeline": keys})
    try:
        check_features(resolved.ds_config, section, resolved.expert_parallel, resolved.tensor_parallel)
        check_head(skeleton(pipeline.config), replace(pipeline.anatomy, head_slices=HEAD_SLICES))
    except ValueError:
        return False
    return resolved.partition != HETERO and pipeline.stage.router_loss is None
