"""The ``"unequal_replicas"`` part of a pipeline's section: how many micro-batches of a step each replica computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ..planning.unequal_replicas import MicroBatchCounts
from .part import Part

RESHARE_EVERY = 100

_PATH = "paceline.pipeline.unequal_replicas.micro_batches"


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class UnequalReplicasConfig(Part):
    """Shares of a step's micro-batches for replicas of different speed; without it all have as many."""

    micro_batches: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_tuple), Field(min_length=1)
    ] = Field(
        default=None,
        description="Micro-batches of a step for each replica, in the order of the replicas. Their sum is "
        "gradient_accumulation_steps times the replicas. Left out: chosen during training, by how fast they are.",
    )
    reshare_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description=f"Steps from one choice of shares to the next. Left out: {RESHARE_EVERY}; where the schedule is "
        "adaptive, its retune_every.",
    )

    @field_validator("reshare_every")
    @classmethod
    def _is_for_shares_that_are_chosen(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("micro_batches") is not None:
            raise ValueError("micro_batches says what the shares are, and nothing is chosen; drop one of them.")
        return value


def first_shares(config: UnequalReplicasConfig | None, *, replicas: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of a step for each replica, to begin with.

    Args:
        micro_batches: of a step and replica, where all have as many.
    """
    written = None if config is None else config.micro_batches
    return (micro_batches,) * replicas if written is None else written


def check_shares(shares: Sequence[int], *, replicas: int, micro_batches: int, counts: MicroBatchCounts) -> None:
    """Raise ValueError unless ``shares`` has a number for each replica, and the sum is a step's.

    Args:
        micro_batches: of a step and replica, where all have as many.
        counts: numbers of micro-batches that the schedule can have.
    """
    total = micro_batches * replicas
    if len(shares) != replicas:
        raise ValueError(
            f"{_PATH} is {list(shares)}: there are {replicas} replicas, and each has a number; give {replicas} numbers "
            f"whose sum is {total}, or leave the key out."
        )
    if sum(shares) != total or min(shares) < 1:
        raise ValueError(
            f"{_PATH} is {list(shares)}: each must be at least 1, and their sum {total} (gradient_accumulation_steps "
            f"{micro_batches} times {replicas} replicas); change one of them."
        )
    for share in shares:
        if not counts.allow(share):
            raise ValueError(
                f"{_PATH} is {list(shares)}: the schedule takes {counts.rule}, and {share} are not; give other "
                "numbers, or take another schedule."
            )


def interval(config: UnequalReplicasConfig | None, *, replicas: int, retune_every: int | None) -> int:
    """Steps from one choice of shares to the next; 0: they stay.

    Args:
        retune_every: the same of schedules, where they are chosen too.
    """
    if config is None or config.micro_batches is not None or replicas == 1:
        return 0
    return config.reshare_every or retune_every or RESHARE_EVERY
