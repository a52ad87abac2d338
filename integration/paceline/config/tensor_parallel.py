"""DeepSpeed's section ``"tensor_parallel"`` as pipelines read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .section import show

TENSOR_PARALLEL = "tensor_parallel"
SIZE = "autotp_size"


def resolve_tensor_parallel(section: Any, world_size: int | None) -> int:
    """Ranks of a stage that have slices of its layers; 1 where the section is absent or asks for none.

    Args:
        section: ``tensor_parallel`` of the JSON.
        world_size: ranks; None: not known.

    Raises:
        ValueError: a size that does not fit.
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"{TENSOR_PARALLEL} is {show(section)}: it must be an object; write one, or leave it out.")
    size = section.get(SIZE, 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"{TENSOR_PARALLEL}.{SIZE} is {show(size)}: it must be a whole number of at least 1.")
    size = size or 1  # DeepSpeed's word for none
    if world_size is not None and world_size % size:
        raise ValueError(
            f"{TENSOR_PARALLEL}.{SIZE} is {size}: it must divide the {world_size} ranks; choose a divisor, or start "
            "other ranks."
        )
    return size
