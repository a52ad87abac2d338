"""Paceline: fine-tune Hugging Face models as DeepSpeed pipelines that follow the cluster they run on."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = [
    "CausalLMPipeline",
    "PacelineSFTTrainer",
    "PacelineTrainer",
    "PipelineModule",
    "PipelineTraining",
    "__version__",
    "export",
    "initialize",
    "repair_deepspeed",
]

_HOME = {
    "initialize": "runtime.initialize",
    "CausalLMPipeline": "runtime.module",
    "PipelineModule": "runtime.pipe_module",
    "export": "runtime.model_export",
    "PacelineTrainer": "runtime.trainer",
    "PacelineSFTTrainer": "runtime.sft_trainer",
    "PipelineTraining": "runtime.trainer",
    "repair_deepspeed": "patches.repairs",
}


def __getattr__(name: str) -> Any:
    """Load DeepSpeed and transformers when something of theirs is first asked for, not with the package."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    from .imports import few_collections

    with few_collections():
        module = import_module(f"{__name__}.{_HOME[name]}")
    return getattr(module, name)
