"""``deepspeed.initialize`` builds an engine class of ours for a pipeline."""

from __future__ import annotations

from dataclasses import replace

from paceline.patches.registry import Patch, Use

_ENGINE = Patch(
    target="deepspeed:PipelineEngine",
    make=lambda original: original,
    requires="deepspeed>=0.19.8,<0.20",
    reason="deepspeed.initialize has no registry of engines: it builds what this global names when it is called",
    removable_when="deepspeed.initialize takes an engine class",
    watches="deepspeed:initialize",
    fingerprint="82505af39fb2",
    original="deepspeed.runtime.pipe.engine:PipelineEngine",
    applied_by="paceline.initialize, for a pipeline",
)

# As declared it changes nothing; engine_class puts a class in.
PATCHES = (_ENGINE,)


def engine_class(cls: type) -> Patch:
    """The patch with which ``deepspeed.initialize`` builds ``cls``, a subclass of its ``PipelineEngine``."""
    return replace(_ENGINE, make=Use(cls))
