"""``deepspeed/runtime/pipe/module.py``: further partition methods for scripts that build their own pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.patches.registry import Patch


def partition_layers(original: Callable[..., None]) -> Callable[..., None]:
    """``PipelineModule._partition_layers`` that takes boundaries, weights by class and ``"hetero"`` too.

    See :class:`paceline.PipelineModule`, which takes them without a patch.
    """

    def _partition_layers(self: Any, method: Any = "uniform") -> None:
        from paceline.runtime import pipe_module

        if pipe_module.is_ours(method):
            pipe_module.partition_layers(self, method)
        else:
            original(self, method)

    return _partition_layers


PARTITION_METHODS = Patch(
    target="deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
    make=partition_layers,
    requires="deepspeed>=0.19.8,<0.20",
    reason="a script that cannot change builds DeepSpeed's PipelineModule, which takes names of methods only",
    removable_when="DeepSpeed's partition_method takes boundaries, or an object that computes them",
    watches="deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
    fingerprint="7289164616d3",
    applied_by="paceline.launch.patched",
    optional=True,  # a script that names one of DeepSpeed's methods runs without it
)

PATCHES = (PARTITION_METHODS,)
