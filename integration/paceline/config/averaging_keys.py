"""``"paceline": {"averaging": …}``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from .boundary_keys import FormatName
from .part import Part

NESTEROV = "nesterov"
HELD_OUT = "held_out"
MOST_WAIT_S = 1e8
"""Three years: more is a mistake, and may be no number of milliseconds any more."""


class AveragingConfig(Part):
    """Islands: DeepSpeed jobs of their own that train on shares of the data and average their parameters at times."""

    lighthouse: str = Field(description="host:port of `paceline lighthouse`, where islands find each other.")
    min_islands: Annotated[int, Field(ge=1)] = Field(
        default=1, description="A round waits until so many islands are there."
    )
    islands: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Number of shares that the data are divided into. Left out: min_islands."
    )
    every_tokens: Annotated[int, Field(ge=1)] = Field(
        default=400_000,
        description="Tokens that an island trains on from round to round. Without a pipeline padding counts.",
    )
    outer: Literal["mean", "nesterov"] = Field(
        default="mean",
        description='What becomes of the average: "mean": the parameters; "nesterov": how far it is from the last '
        "round's is the gradient of an outer SGD with Nesterov momentum (DiLoCo).",
    )
    outer_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="nesterov: learning rate of the outer SGD. Left out: 0.7."
    )
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="nesterov: its momentum. Left out: 0.9."
    )
    first_round: Literal["best", "mean"] | None = Field(
        default=None,
        description='What the first round takes: "best": the island with the smallest loss; "mean": the average. Left '
        'out: "best" with random weights and the outer "mean", else "mean".',
    )
    difference_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Nats by which an island's mean loss over the round may exceed the best one's; an island that is "
        "further off does not count in the average, and goes on from it.",
    )
    optimizer_state: Literal["keep", "average", "reset"] | None = Field(
        default=None,
        description='What becomes of the optimizer\'s states at a round: "keep": each island its own; "average"; '
        '"reset". Left out: "keep".',
    )
    scale_learning_rate: bool | None = Field(
        default=None,
        description="Multiply the learning rate by the number of islands expected in the next round, whose average "
        "divides the change of each by that. "
        'Left out: with plain SGD and the outer "mean" only.',
    )
    decay_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Tokens of all islands together over which the learning rate falls exponentially to a tenth. Left "
        "out: it follows the scheduler alone.",
    )
    parts: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Parts that the parameters are averaged in, one after another, evenly spread in time."
    )
    overlap_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps that training goes on while a part is under way. 0: it waits."
    )
    format: FormatName | None = Field(
        default=None,
        description="Format of what islands send each other: by how much their parameters have changed since the last "
        'round, rounded, "int8" or "int4" for instance. What rounding takes away is sent with the next round. Left '
        "out: the parameters themselves, exact.",
    )
    combine_rounds: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Last rounds whose models are combined in the end, to the final model."
    )
    combine_weights: Literal["mean", "held_out"] = Field(
        default="mean",
        description='How: "mean"; "held_out": with the weights, none negative and 1 in all, that lose least on '
        "held-out data, which there must be.",
    )
    timeout_s: Annotated[float, Field(gt=0, le=MOST_WAIT_S, allow_inf_nan=False)] = Field(
        default=600.0,
        description="Seconds after which an island gives a round up and trains on alone until the next. An island that "
        "is dead is waited for a few seconds.",
    )
    grace_s: Annotated[float, Field(gt=0, le=MOST_WAIT_S, allow_inf_nan=False)] = Field(
        default=300.0,
        description="Seconds that an island waits at a round before it calls the others: they come at the end of their "
        "step, with weights for the tokens that they have trained on. One that does not come in as long again is left "
        "out, and takes part in the next round.",
    )

    @field_validator("lighthouse")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or set(" /") & set(host):
            raise ValueError('it must be host:port, such as "node1:29510", where `paceline lighthouse` runs.')
        return value

    @field_validator("outer_learning_rate", "outer_momentum")
    @classmethod
    def _belongs_to_nesterov(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("outer", NESTEROV) != NESTEROV:
            raise ValueError(
                'it belongs to the outer "nesterov" and the outer is "mean"; drop it, or write "nesterov".'
            )
        return value

    @field_validator("combine_weights")
    @classmethod
    def _have_several(cls, value: str, info: ValidationInfo) -> str:
        if value == HELD_OUT and info.data.get("combine_rounds", 2) == 1:
            raise ValueError(
                "it says how the models of the last rounds are combined and combine_rounds is 1; drop it, or write "
                '"combine_rounds": 4.'
            )
        return value

    @field_validator("islands")
    @classmethod
    def _are_enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("min_islands", 1):
            raise ValueError(
                f"min_islands is {info.data['min_islands']}, and there are never more than islands; correct one."
            )
        return value
