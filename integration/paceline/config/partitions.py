"""The partition of a model into stages: the section's ``pipeline.partition`` with its defaults filled in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .section import HETERO, WORK, Method, PacelineConfig, PartitionConfig
from .stage_counts import PARTITION

REPARTITION_EVERY = 100


@dataclass(frozen=True)
class PartitionChoice:
    """A partition as a run is started with it.

    Args:
        method: a name, weights by regular expressions over class names, or boundaries over the pipeline's items;
            ``None``: the pipeline stays as it was built.
        repartition_every: interval in steps, at most, at which a better partition is searched; 0: never.
        profile: path of a profile file to take the layers' times from; ``None``: they are measured.
        memory_bytes: of each device that a partition may count on; ``None``: what is free.
    """

    method: Method | None
    repartition_every: int = 0
    profile: str | None = None
    memory_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The values that apply, for a JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def resolve_partition(
    section: PacelineConfig, method: Method | None, *, default: str | None = WORK
) -> tuple[PartitionChoice, dict[str, tuple[Any, str]]]:
    """The partition of a run, and by path what was chosen because its key was left out: the value and why.

    Args:
        method: as :func:`~paceline.config.stage_counts.resolve_method` finds it; ``None`` if the JSON has none.
        default: method where the JSON has none; ``None``: the pipeline stays as it was built.
    """
    config = section.pipeline.partition
    chosen: dict[str, tuple[Any, str]] = {}
    if method is None:
        method = default
        if method is not None:
            why = "the default: stages of about equally much work, counted from the model's shapes"
            chosen[PARTITION] = (method, why)
        if config is None:
            return PartitionChoice(method), chosen
    config = config or PartitionConfig()
    every = config.repartition_every
    if every is None:
        follows = method == HETERO
        every = REPARTITION_EVERY if follows else 0
        unasked = f'only "{HETERO}" follows the devices unasked'
        why = "often for a device's changes, seldom for steps" if follows else unasked
        chosen[f"{PARTITION}.repartition_every"] = (every, why)
    memory_bytes = None if config.memory_gib is None else int(config.memory_gib * 2**30)
    return PartitionChoice(method, every, config.profile, memory_bytes), chosen
