"""``deepspeed.initialize`` builds an engine class of ours: for a pipeline, and for experts that follow the load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.patches.registry import BY_REPAIR, Load, Patch, Use

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

_PLAIN_ENGINE = replace(
    _ENGINE,
    target="deepspeed:DeepSpeedEngine",
    original="deepspeed.runtime.engine:DeepSpeedEngine",
    applied_by='paceline.initialize and the patch of deepspeed.initialize, for "paceline": {"moe": ...}, '
    '{"natural_gradient": ...} and {"averaging": ...} without a pipeline',
)


def engine_class(build: Callable[..., Any]) -> Patch:
    """The patch with which ``deepspeed.initialize`` calls ``build``, a subclass of its ``PipelineEngine`` or a function
    that makes one."""
    return replace(_ENGINE, make=Use(build))


def plain_engine_class(build: Callable[..., Any]) -> Patch:
    """As :func:`engine_class`, for models that are no pipeline: a ``DeepSpeedEngine``."""
    return replace(_PLAIN_ENGINE, make=Use(build))


SECTION = Patch(
    target="deepspeed:initialize",
    make=Load("paceline.runtime.initialize_patch:initialize"),
    requires="deepspeed>=0.19.8,<0.20",
    reason='a script that cannot change calls deepspeed.initialize, which does not read "paceline": {"moe": ...}',
    removable_when="deepspeed.initialize asks others about the keys of its JSON that it does not know",
    watches="deepspeed:initialize",
    fingerprint="82505af39fb2",
    applied_by=BY_REPAIR,
)

# As declared they change nothing; the functions put classes in.
PATCHES = (_ENGINE, _PLAIN_ENGINE)
