"""The ``"boundary"`` part of a pipeline's section: in which formats activations and gradients travel."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from .part import Part

FormatName: TypeAlias = Literal["bf16", "int8", "fp8_e4m3", "int4"]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class BoundaryConfig(Part):
    """Fewer bytes between stages, for less precision: a step then computes other numbers."""

    forward: FormatName | None = Field(
        default=None,
        description='Format of activations between stages, in training: "bf16"; "int8" and "fp8_e4m3": a byte a value, '
        'a scale for each token; "int4": half a byte, a scale for 8 values, the mean and four directions of each '
        "sequence of 64 tokens or more apart. Left out: as they are.",
    )
    backward: FormatName | None = Field(
        default=None,
        description='The same of their gradients; "int4" has a scale for 16 values. Left out: as they are.',
    )
    allowed: Annotated[tuple[FormatName, ...] | None, BeforeValidator(_tuple), Field(min_length=1)] = Field(
        default=None,
        description='With the schedule "adaptive", instead of both: formats that it may choose for both directions, '
        "beside none. Numbers then depend on what it chooses.",
    )

    @field_validator("allowed")
    @classmethod
    def _is_said_once(cls, value: Any, info: ValidationInfo) -> Any:
        written = next((name for name in ("forward", "backward") if info.data.get(name) is not None), None)
        if value is not None and written is not None:
            raise ValueError(f'it leaves the choice to "adaptive", and {written} has made it; drop one of them.')
        return value
