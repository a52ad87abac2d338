"""Partition methods that DeepSpeed lacks, for a row of layers: boundaries, and weights by class name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from .blocks import Block, Device
from .partition import partition
from .refine import refine


def checked_boundaries(boundaries: Sequence[int], num_layers: int, num_stages: int, named: str = "") -> list[int]:
    """``boundaries``, if they cut ``num_layers`` layers into ``num_stages`` runs.

    Args:
        named: what the layers are called in a message; by default "... layers".

    Raises:
        ValueError: there are not ``num_stages + 1`` whole numbers that rise from 0 to ``num_layers``.
    """
    parts = list(boundaries)
    are_whole = all(isinstance(part, int) and not isinstance(part, bool) for part in parts)
    rise = are_whole and all(a < b for a, b in pairwise(parts))
    if not rise or len(parts) != num_stages + 1 or parts[0] != 0 or parts[-1] != num_layers:
        raise ValueError(
            f"partition {parts} does not cut {named or f'{num_layers} layers'} into {num_stages} stages: give "
            f"{num_stages + 1} rising boundaries from 0 to {num_layers}."
        )
    return parts


def weights_by_class(weights: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """The weight of each layer: of the first regular expression that its class name matches, of none 0.

    Args:
        weights: by regular expression; upper and lower case are the same, and a part of the name is enough.
        names: of the layers' classes, in order.

    Raises:
        ValueError: no layer weighs anything.
    """
    rules = [(re.compile(pattern, re.IGNORECASE), weight) for pattern, weight in weights.items()]
    found = [next((weight for rule, weight in rules if rule.search(name)), 0) for name in names]
    if not any(found):
        raise ValueError(
            f"partition weights {dict(weights)} match no layer class with a weight; the classes are "
            f"{sorted(set(names))}: correct the regular expressions."
        )
    return found


def by_work(work: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Boundaries of ``len(speeds)`` runs of layers, each at least one, whose slowest takes the least time.

    Args:
        work: of each layer, in any unit. If none has any, all have the same.
        speeds: of each stage's device: work per second.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if len(work) < len(speeds):
        raise ValueError(
            f"{len(speeds)} stages are more than the {len(work)} layers: choose at most {len(work)} stages."
        )
    blocks = [Block(float(w)) for w in (work if any(work) else [1.0] * len(work))]
    return list(partition(blocks, [Device(float(speed)) for speed in speeds]).boundaries)


def by_work_of_devices(work: Sequence[float], route: Sequence[int]) -> list[int]:
    """Boundaries of as many runs of layers as ``route`` has stages: first the slowest stage is as fast as can be, then
    neighbours give each other layers as long as the device with the most work gets less.

    Args:
        work: of each layer, as of :func:`by_work`.
        route: device of each stage.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    start = by_work(work, [1.0] * len(route))
    sums = [0.0, *accumulate(work if any(work) else [1.0] * len(work))]

    def most(cuts: Sequence[int]) -> float:
        loads = [0.0] * (max(route) + 1)
        for device, (first, end) in zip(route, pairwise(cuts), strict=True):
            loads[device] += sums[end] - sums[first]
        return max(loads)

    return list(refine(start, most)[0])
