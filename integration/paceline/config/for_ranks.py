"""A DeepSpeed config on a number of ranks, before there are devices, a model or a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planning.divisors import divisors
from .auto import open_autos
from .resolve import resolve
from .run_plan import RunPlan
from .section import PacelineConfig
from .stage_counts import blocks_per_layer, fewest_that_go, head_slices, resolve_method

MANY = 64
"""Decoder layers for each rank, of a model that is not known: more than any schedule asks for."""


def resolve_for_ranks(
    section: PacelineConfig, ds_config: Mapping[str, Any], world_size: int, num_layers: int | None = None
) -> RunPlan:
    """Resolve a config for so many ranks; what is ``"auto"`` in it is taken as left out.

    Args:
        section: of ``ds_config``.
        num_layers: decoder layers; None: as many as an explicit partition has, otherwise enough.

    Raises:
        ValueError: it does not go with so many ranks: one line with the value, the rule and the remedy.
    """
    filled = {key for key in open_autos(ds_config) if key in ds_config}
    settled = {key: value for key, value in ds_config.items() if key not in filled}
    layers = num_layers or _layers_of(section, ds_config) or MANY * world_size

    def resolved(section: PacelineConfig) -> RunPlan:
        return resolve(
            settled,
            world_size=world_size,
            num_layers=layers,
            num_items=layers + 2,
            state_bytes=None,
            device_bytes=None,
            cpu=False,
            section=section,
        )

    return fewest_that_go(section, settled, resolved, divisors(world_size))


def _layers_of(section: PacelineConfig, ds_config: Mapping[str, Any]) -> int:
    """Decoder layers of an explicit partition; 0 where there is none."""
    boundaries, _ = resolve_method(section, ds_config)
    if not isinstance(boundaries, tuple):
        return 0
    return (boundaries[-1] - 1 - head_slices(section)) // blocks_per_layer(section)
