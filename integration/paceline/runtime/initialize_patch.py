"""``deepspeed.initialize`` that reads our section: for a script or a Trainer that calls it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..config import PacelineConfig
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

        given = signature.bind(*args, **kwargs).arguments
        config = given.get("config") or given.get("config_params")
        config = config or getattr(given.get("args"), "deepspeed_config", None)
        ds_config = _as_dict(config)
        asked = plain_parts(ds_config or {})
        is_pipeline = isinstance(given.get("model"), deepspeed.PipelineModule)
        section = (ds_config or {}).get("paceline") or {}
        if not is_pipeline and "pipeline" in section and section["pipeline"] != {"stages": 1}:
            raise ValueError(
                "paceline.pipeline asks for stages, and deepspeed.initialize gets a model that is no pipeline: call "
                "paceline.initialize instead, take paceline.PacelineTrainer for Hugging Face's Trainer, or leave "
                '"pipeline" out of "paceline" (or its "stages" at 1).'
            )
        if not asked:
            return original(*args, **kwargs)
        if is_pipeline:
            if deepspeed.PipelineEngine is deepspeed.runtime.pipe.engine.PipelineEngine:
                raise ValueError(
                    f"paceline.{asked[0]} is for pipelines only with paceline.initialize: call that instead of "
                    f'deepspeed.initialize, or leave "{asked[0]}" out of "paceline".'
                )
            return original(*args, **kwargs)
        if ds_config.get("hybrid_engine", {}).get("enabled"):
            raise ValueError(
                f"paceline.{asked[0]} does not go with hybrid_engine, which is an engine of its own: leave one of them "
                "out."
            )
        engine = plain_engine_for(ds_config)
        assert engine is not None, asked
        with applied(plain_engine_class(engine)):
            return original(*args, **kwargs)

    return initialize


def plain_parts(ds_config: Mapping[str, Any]) -> list[str]:
    """The parts of our section that are there and concern a model without a pipeline."""
    section = PacelineConfig.of(ds_config)
    return [
        part for part in ("moe", "natural_gradient", "max_change", "averaging") if getattr(section, part) is not None
    ]


def plain_engine_for(ds_config: Mapping[str, Any]) -> type | None:
    """What runs a model without a pipeline; None: DeepSpeed's own engine."""
    asked = plain_parts(ds_config)
    if "moe" in asked:
        from .plain_expert_engine import ExpertEngine

        return ExpertEngine
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
