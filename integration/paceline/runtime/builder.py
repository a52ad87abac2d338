"""Build the pipeline of a Hugging Face model: the one way for ``initialize``, the Trainer and the main job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from ..comm.control import ControlPlane
from ..config import RunPlan
from .module import CausalLMPipeline, ModelSource
from .startup import compile_as_written, dtype_of, first_partition, recompute_as_written

if TYPE_CHECKING:
    from peft import PeftConfig


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
        config=hf_config,
        timeout=timeout,
        peft_config=peft_config,
        **from_pretrained,
    )
    pipeline.planned(first.profile)
    recompute_as_written(pipeline, resolved, first.recomputed)
    compile_as_written(pipeline, resolved)
    return pipeline
