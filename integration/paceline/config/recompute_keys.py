"""The key ``"recompute"`` of a pipeline's section: how many layers of each stage backwards compute again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

FIT: Final = "fit"
"""As many layers as it takes for each stage to fit into memory."""

PATH = "paceline.pipeline.recompute"
Recompute: TypeAlias = int | tuple[int, ...] | Literal["fit"]

SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"const": FIT},
        {"type": "null"},
    ]
}


def check_recompute(value: Any) -> Recompute | None:
    """``"fit"``, a number of layers of every stage, or numbers, one a stage.

    Raises:
        ValueError: the rule that ``value`` breaks.
    """
    if value is None or value == FIT or _is_count(value):
        found: Recompute | None = value
        return found
    if isinstance(value, (list, tuple)) and value and all(map(_is_count, value)):
        return tuple(value)
    raise ValueError(
        f'it must be "{FIT}", how many layers of each stage are recomputed, or a list of such numbers, one a stage; '
        "write such as [4, 2, 1, 0]"
    )


def check_stages(value: Recompute | None, stages: int, num_layers: int, *, may_share: bool = False) -> None:
    """Raise ValueError unless ``value`` goes with so many stages, and with so many decoder layers in all of them.

    Args:
        may_share: stages may end within a layer, which both stages count then.
    """
    most = num_layers + (stages - 1) * may_share
    if isinstance(value, tuple) and len(value) != stages:
        raise ValueError(
            f"{PATH} is {list(value)}: there are {stages} stages, and each has a number; give {stages} numbers, one "
            f'for all stages, or "{FIT}".'
        )
    if isinstance(value, tuple) and sum(value) > most:
        raise ValueError(
            f"{PATH} is {list(value)}: these are {sum(value)} layers, and the model has {num_layers}; give each stage "
            f'at most as many as it has, or "{FIT}" for as many as it takes.'
        )


def counts_of(value: int | Sequence[int], layers: Sequence[int]) -> tuple[int, ...]:
    """Recomputed layers of each stage; one number for all means at most the layers that a stage has.

    Args:
        layers: that each stage has.

    Raises:
        ValueError: a stage has fewer layers than its number.
    """
    if isinstance(value, int):
        return tuple(min(value, count) for count in layers)
    for stage, (asked, count) in enumerate(zip(value, layers, strict=True)):
        if asked > count:
            raise ValueError(
                f"{PATH} is {list(value)}: stage {stage} has {count} layers; give at most {count} there, or "
                f'"{FIT}" for as many as it takes.'
            )
    return tuple(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
