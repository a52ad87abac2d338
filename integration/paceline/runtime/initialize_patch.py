"""``deepspeed.initialize`` that reads our section: for a script or a Trainer that calls it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..averaging.islands import separate_monitors
from ..config import Features, PacelineConfig, PipelineConfig, RunPlan, check_exclusions, plan_as_built
from ..patches.deepspeed_initialize import plain_engine_class
from ..patches.registry import applied


def initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """``deepspeed.initialize`` that reads our section, for a script or a Trainer that calls it.

    It accepts keys that it does not know without a word: ``"paceline": {"moe": ...}`` would do nothing, and a misspelt
    key in it neither.

    Raises:
        ValueError: the section is wrong, or asks for what this call cannot build.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.pipe.engine import PipelineEngine

        given = signature.bind(*args, **kwargs).arguments
        config = given.get("config") or given.get("config_params")
        config = config or getattr(given.get("args"), "deepspeed_config", None)
        ds_config = _as_dict(config) or {}
        is_chosen = any(getattr(deepspeed, kind.__name__) is not kind for kind in (PipelineEngine, DeepSpeedEngine))
        if is_chosen:  # by paceline.initialize, which has read all this
            return original(*args, **kwargs)
        section = PacelineConfig.of(ds_config)
        if isinstance(given.get("model"), deepspeed.PipelineModule):
            if asked := plain_parts(section):
                raise ValueError(
                    f"paceline.{asked[0]} is for pipelines only with paceline.initialize: call that instead of "
                    f'deepspeed.initialize, or leave "{asked[0]}" out of "paceline".'
                )
            return original(*args, **kwargs)
        engine = plain_engine_for(section, ds_config)
        with applied(*(() if engine is None else (plain_engine_class(with_plan(engine, section)),))):
            return original(*args, **kwargs)

    return initialize


def with_plan(engine: type, known: RunPlan | PacelineConfig, *, stages: int = 1) -> Callable[..., Any]:
    """Builder of ``engine`` that gives it its plan; its arguments are those of DeepSpeed's engines.

    Args:
        known: the plan; or the section, for a model that was built by something else: DeepSpeed's batch sizes count.
        stages: of that model.
    """

    def build(*args: Any, config_class: Any, **kwargs: Any) -> Any:
        plan = known
        if isinstance(plan, PacelineConfig):
            plan = plan_as_built(
                plan,
                config_class._param_dict,
                stages=stages,
                data_parallel=int(config_class.world_size),
                micro_batch_size=config_class.train_micro_batch_size_per_gpu,
                micro_batches=config_class.gradient_accumulation_steps,
                train_batch_size=config_class.train_batch_size,
            )
        separate_monitors(config_class.monitor_config, plan.averaging)
        return engine(*args, config_class=config_class, plan=plan, **kwargs)

    build.__name__ = engine.__name__
    return build


def plain_parts(section: PacelineConfig) -> list[str]:
    """The parts of our section that are there and concern a model without a pipeline."""
    return [
        part for part in ("moe", "natural_gradient", "max_change", "averaging") if getattr(section, part) is not None
    ]


def plain_engine_for(section: PacelineConfig, ds_config: Mapping[str, Any]) -> type | None:
    """Class of the engine that runs a model without a pipeline; None: DeepSpeed's own.

    Raises:
        ValueError: the section asks for stages, or for what goes with no engine of ours.
    """
    if "pipeline" in section.model_fields_set and section.pipeline != PipelineConfig(stages=1):
        raise ValueError(
            "paceline.pipeline asks for stages, and deepspeed.initialize gets a model that is no pipeline: call "
            "paceline.initialize instead, take paceline.PacelineTrainer for Hugging Face's Trainer, or leave "
            '"pipeline" out of "paceline" (or its "stages" at 1).'
        )
    asked = plain_parts(section)
    if asked:
        check_exclusions(Features(ds_config, section, is_pipeline=False))
    if asked:
        from .plain_engine import PlainEngine

        return PlainEngine
    return None


def _as_dict(config: Any) -> Any:
    """A config as ``deepspeed.initialize`` takes it: an object, a file of Hjson, or base64 of that."""
    import deepspeed
    import hjson  # type: ignore[import-untyped]

    if isinstance(config, str) and os.path.exists(config):
        with open(config) as file:  # DeepSpeed leaves it open
            return hjson.load(file)
    return None if config is None else deepspeed.load_ds_config(config)
