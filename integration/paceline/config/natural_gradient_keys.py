"""``"paceline": {"natural_gradient": …}``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from .part import Part

SIMPLE = "simple"
_OF_ESTIMATES = (
    *("rank_in", "rank_out", "num_minibatches_history", "num_samples_history", "update_period", "max_rows"),
)


class MaxChangeConfig(Part):
    """How far parameters may move in one update, learning rate included: Euclidean norms."""

    layer: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.75, description="Of a layer, weight and bias together. 0: any distance."
    )
    head: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.5, description="Of the output layer. 0: any distance."
    )
    total: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=2.0, description="Of all layers together, after the limits of each. 0: any distance."
    )


class NaturalGradientConfig(Part):
    """Weight gradients of linear layers, divided by a running estimate of the Fisher matrix of each (NG-SGD)."""

    method: Literal["online", "simple"] = Field(
        default="online",
        description='"online": by a running estimate; "simple": the rows of each micro-batch by the second moment of '
        "its other rows, which costs more and keeps nothing.",
    )
    layers: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='A regular expression that the names of the layers contain, such as "mlp|lm_head". Left out: all '
        "linear layers, and all experts.",
    )
    rank_in: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Rank of the estimate for what goes into a layer. Left out: 20, at most half of it."
    )
    rank_out: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Rank of that for the derivatives that come back. Left out: 80, at most half of it."
    )
    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=4.0, description="Smoothing: how much of the mean eigenvalue is added to all."
    )
    num_minibatches_history: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Micro-batches over which an estimate reaches back. Left out: 10, unless num_samples_history is "
        "given.",
    )
    num_samples_history: Annotated[float, Field(gt=0, lt=1e6)] | None = Field(
        default=None, description="Rows (tokens) over which it does, instead of micro-batches."
    )
    update_period: Annotated[int, Field(ge=1)] = Field(
        default=4, description="Micro-batches from one update of an estimate to the next, after the first eleven."
    )
    max_rows: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Rows of a micro-batch that the estimates look at, evenly spread over it. Left out: 1024.",
    )
    max_change: MaxChangeConfig | None = Field(
        default=None,
        description="As paceline.max_change, where natural gradients are.",
    )

    @field_validator("alpha")
    @classmethod
    def _is_enough(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("method") == SIMPLE:
            raise ValueError("the rows of a micro-batch do not span all directions; write more than 0, such as 4.")
        return value

    @field_validator(*_OF_ESTIMATES)
    @classmethod
    def _belongs_to_online(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("method") == SIMPLE:
            raise ValueError(
                'it belongs to the method "online" and the method is "simple", which estimates nothing; drop it.'
            )
        return value

    @field_validator("layers")
    @classmethod
    def _is_a_regular_expression(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"it must be a regular expression ({error})") from None
        return value

    @field_validator("num_samples_history")
    @classmethod
    def _is_the_only_history(cls, value: float | None, info: object) -> float | None:
        if value is not None and getattr(info, "data", {}).get("num_minibatches_history") is not None:
            raise ValueError("it says what num_minibatches_history says too; drop one of them.")
        return value
