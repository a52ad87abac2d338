"""The ``"boundary"`` part of a pipeline's section: in which formats activations and gradients travel."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from .part import Part

FormatName: TypeAlias = Literal["bf16", "int8", "fp8_e4m3", "int4"]


class BoundaryConfig(Part):
    """Fewer bytes between stages, for less precision: a step then computes other numbers."""

    forward: FormatName | None = Field(
        default=None,
        description='Format of activations between stages, in training: "bf16"; "int8" and "fp8_e4m3": a byte a value, '
        'a scale for each token; "int4": half a byte, a scale for 64 values. Left out: as they are.',
    )
    backward: FormatName | None = Field(default=None, description="The same of their gradients. Left out: as they are.")
