"""Blocks out of layers: neighbours that stay together, so that there are few enough to solve quickly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum, inf


def merge(weights: Sequence[float], num_blocks: int, *, together: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Boundaries of at most so many blocks of neighbouring layers, about equally heavy.

    A block ends where one more layer would take it further from an equal share of what is left. There are exactly
    ``num_blocks`` if there are so many places to cut. Four to eight blocks a device are enough to balance.

    Args:
        weights: of the layers, say their seconds.
        num_blocks: most blocks.
        together: (first, last) layers of runs, ``last`` included, that are not cut: layers with shared weights, or
            between which more than an activation passes. Runs that overlap are one.

    Returns:
        Where blocks begin, and the number of layers: ``[0, ..., len(weights)]``.

    Raises:
        ValueError: a weight is negative or no number, there are no layers, no blocks, or a run is none of layers.
    """
    if not weights:
        raise ValueError("there are no layers: give one weight at least.")
    if num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks} must be 1 or more.")
    for index, weight in enumerate(weights):
        if not 0 <= weight < inf:
            raise ValueError(f"weights[{index}] is {weight}: give a number from 0 upwards.")
    places = _places(len(weights), together)
    runs = [fsum(weights[first:end]) for first, end in pairwise(places)]
    boundaries = [0]
    share, weight = _share(runs, num_blocks), 0.0
    for index, run in enumerate(runs):
        blocks_left = num_blocks - len(boundaries)
        further = abs(weight + run - share) >= abs(weight - share)
        if index and blocks_left and (further or len(runs) - index <= blocks_left):
            boundaries.append(places[index])
            share, weight = _share(runs[index:], blocks_left), 0.0
        weight += run
    return [*boundaries, len(weights)]


def _share(runs: Sequence[float], num_blocks: int) -> float:
    """What a block should weigh: a run heavier than that is a block by itself, and the others share the rest."""
    left = fsum(runs)
    for run in sorted(runs, reverse=True):
        if num_blocks == 1 or run * num_blocks <= left:
            break
        left -= run
        num_blocks -= 1
    return left / num_blocks


def _places(num_layers: int, together: Iterable[tuple[int, int]]) -> list[int]:
    """Where a cut may be, the outer two included."""
    inside: set[int] = set()
    for first, last in together:
        if not 0 <= first <= last < num_layers:
            raise ValueError(
                f"({first}, {last}) is no run of {num_layers} layers: give the first and the last, from 0 to "
                f"{num_layers - 1}."
            )
        inside.update(range(first + 1, last + 1))
    return [place for place in range(num_layers + 1) if place not in inside]
