"""``deepspeed/runtime/pipe/module.py``: further partition methods for scripts that build their own pipelines."""

from __future__ import annotations

from paceline.patches.registry import Load, Patch

PARTITION_METHODS = Patch(
    target="deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
    make=Load("paceline.runtime.pipe_module:taking_our_methods"),
    requires="deepspeed>=0.19.8,<0.20",
    reason="a script that cannot change builds DeepSpeed's PipelineModule, which takes names of methods only",
    removable_when="DeepSpeed's partition_method takes boundaries, or an object that computes them",
    watches="deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
    fingerprint="7289164616d3",
    applied_by="paceline.launch.patched",
    optional=True,  # a script that names one of DeepSpeed's methods runs without it
)

PATCHES = (PARTITION_METHODS,)
