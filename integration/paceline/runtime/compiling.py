"""Have the layers of a pipeline compiled, as its JSON or a call asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from ..config import PacelineConfig, RunPlan, check_features, exclusion
from ..config.exclusions import COMPILED, LAYERS
from ..config.section import SECTION, show
from ..config.stage_counts import TYPE
from .module import CausalLMPipeline

logger = logging.getLogger("paceline")


def compile_as_written(pipeline: CausalLMPipeline, resolved: RunPlan) -> None:
    """Have the layers compiled, if the JSON says so."""
    if resolved.compile is not None:
        pipeline.compile(**resolved.compile.arguments)
        if dist.get_rank() == 0:
            logger.info("compile: the decoder layers are compiled in the first steps, which take longer")


def compile_by_call(pipeline: nn.Module, resolved: RunPlan, backend: object, arguments: Mapping[str, object]) -> None:
    """Have the layers compiled as a call asks, with what the JSON's ``"compile"`` allows.

    Args:
        arguments: of ``torch.compile``; those that ask for nothing are left out.

    Raises:
        ValueError: it does not allow them, or the run has a feature that does not go with it.
    """
    if not isinstance(pipeline, CausalLMPipeline):
        raise ValueError(exclusion(COMPILED, LAYERS).message("compile()", f"the model is a {type(pipeline).__name__}"))
    if pipeline.is_compiled:
        return
    if resolved.schedule.is_tuned:
        raise ValueError(
            f"compile() and {TYPE} {show(resolved.schedule.type)}: schedules are compared from the start, for layers "
            'as they are; write "compile": true in "paceline"."pipeline" instead.'
        )
    keys = {"backend": backend, **{name: value for name, value in arguments.items() if value}}
    compiling = PacelineConfig.of({SECTION: {"pipeline": {"compile": keys}}}).pipeline.compile
    assert compiling is not None
    section = resolved.section.model_copy(
        update={"pipeline": resolved.section.pipeline.model_copy(update={"compile": compiling})}
    )
    check_features(resolved.ds_config, section, resolved.expert_parallel, resolved.tensor_parallel)
    pipeline.compile(**compiling.arguments)
