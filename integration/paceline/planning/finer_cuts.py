"""Where stages would be more alike if decoder layers were cut in halves, or the head into slices for the last stages to
share.

Items are the embedding, whole decoder layers, and the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .partition_methods import by_work
from .strategy import NEAR

HEAD_SLICES = 16
"""Slices that are planned and advised: of most shapes as good as more."""


def largest_stages(work: Sequence[float], parts: Sequence[int]) -> tuple[float, float]:
    """Work of the largest stage by that of a mean one: as it is, and with the head in :data:`HEAD_SLICES`.

    Args:
        work: of the items, the head last.
        parts: boundaries between the stages.
    """
    stages, mean = len(parts) - 1, sum(work) / (len(parts) - 1)
    finer = [*work[:-1], *[work[-1] / HEAD_SLICES] * HEAD_SLICES]
    found = []
    for items, edges in ((work, parts), (finer, by_work(finer, [1.0] * stages))):
        found.append(max(sum(items[first:end]) for first, end in pairwise(edges)) / mean if mean else 1.0)
    return found[0], found[1]


def halves_may_gain(seconds: Sequence[float], stages: int, chunks: int = 1) -> bool:
    """Whether the largest stage is clearly above what it would be if decoder layers could be cut anywhere.

    Args:
        seconds: of the items.
        chunks: of each stage.
    """
    count = stages * chunks
    if not 1 < count <= len(seconds) - 2:
        return False
    edges = by_work(seconds, [1.0] * count)
    largest = max(sum(seconds[first:last]) for first, last in pairwise(edges))
    return largest > (1 + NEAR) * max(sum(seconds) / count, seconds[0], seconds[-1])


def slices_may_gain(seconds: Sequence[float], stages: int, chunks: int = 1) -> bool:
    """Whether the largest stage would be clearly smaller if stages shared the head; those of several chunks do not.

    Args:
        seconds: of the items.
    """
    if chunks > 1 or not 1 < stages <= len(seconds) - 2:
        return False
    whole, sliced = largest_stages(seconds, by_work(seconds, [1.0] * stages))
    return whole > (1 + NEAR) * sliced
