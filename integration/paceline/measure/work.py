"""What is work and what is speed: the times of layers on several devices, separated."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import median
from typing import NamedTuple


class Seen(NamedTuple):
    """One item as its stage computed it: seconds of one micro-batch. Items of one ``kind`` are equal work."""

    item: int
    stage: int
    kind: Hashable
    forward_s: float
    backward_s: float


class Separated(NamedTuple):
    """Times as work divided by speed."""

    work: dict[int, tuple[float, float]]
    """Item -> forward and backward seconds on a device of speed 1."""
    speeds: tuple[float, ...]
    """Of each stage's device, relative to stage 0's."""
    guessed: tuple[int, ...] = ()
    """Stages whose speed follows from sizes and not from layers that another stage has too."""


def separate(seen: Sequence[Seen], sizes: Mapping[Hashable, float]) -> Separated:
    """Work of every item and speed of every stage, from seconds alone.

    A layer of kind k takes ``t = w_k / P_s`` on stage s, so ``log t = log w_k - log P_s``: linear, and solved by least
    squares over all items (t forward and backward together, each item with the same weight: an error of some percent
    counts alike in short and long layers). ``P_0 = 1``. A kind that a single stage has does not tell about speeds; its
    work follows from that stage's. The forward and the backward of a kind are the medians of ``t · P_s``.

    Layers of one kind without a backward (frozen ones at the beginning of a model) count as a kind of their own.

    Stages that share no kind with stage 0, directly or through others, cannot be compared: they are put on its scale
    as if work were in proportion to ``sizes`` (median over items), or, without sizes, as if their typical device were
    as fast as the typical one known; ``guessed`` says which.

    Args:
        seen: at least one item; several of one item (replicas) are all taken in. Items of no time (functions) are of
            no work and tell nothing.
        sizes: kind -> what its work is roughly in proportion to, for example the number of parameters.

    Raises:
        ValueError: nothing was seen, or a time is negative or not a number.
    """
    _check(seen)
    num_stages = 1 + max(entry.stage for entry in seen)
    timed = [entry for entry in seen if entry.forward_s + entry.backward_s > 0]
    speeds: dict[int, float] = {}
    known: list[float] = []  # work per size, of each item on the scale of stage 0
    guessed: list[int] = []
    for stages in _connected(timed, num_stages):
        own = [entry for entry in timed if entry.stage in stages]
        found = _least_squares(own, stages)
        ratios = _per_size(own, found, sizes)
        if 0 not in stages:
            scale = median(known) / median(ratios) if known and ratios else _typical(speeds) / _typical(found)
            found = {stage: speed * scale for stage, speed in found.items()}
            guessed += stages
        else:
            known = ratios
        speeds |= found
    return Separated(_work(seen, speeds), tuple(speeds[stage] for stage in range(num_stages)), tuple(sorted(guessed)))


def _check(seen: Sequence[Seen]) -> None:
    if not seen:
        raise ValueError("no layer was seen: give the times of at least one item.")
    for entry in seen:
        if not (isfinite(entry.forward_s + entry.backward_s) and min(entry.forward_s, entry.backward_s) >= 0):
            raise ValueError(f"{entry}: seconds must be finite and not negative, measure this item again.")


def _key(entry: Seen) -> Hashable:
    return entry.kind, entry.backward_s > 0


def _connected(timed: Iterable[Seen], num_stages: int) -> list[list[int]]:
    """Groups of stages linked by kinds that they share; the group of stage 0 first."""
    group = list(range(num_stages))
    first_with: dict[Hashable, int] = {}
    for entry in timed:
        a, b = group[entry.stage], group[first_with.setdefault(_key(entry), entry.stage)]
        group = [min(a, b) if g in (a, b) else g for g in group]
    return [[stage for stage in range(num_stages) if group[stage] == g] for g in sorted(set(group))]


def _least_squares(own: Sequence[Seen], stages: Sequence[int]) -> dict[int, float]:
    """Speeds of stages that are linked, the first one's being 1."""
    import numpy as np

    kinds = {key: i for i, key in enumerate(dict.fromkeys(map(_key, own)))}
    column = {stage: len(kinds) + i - 1 for i, stage in enumerate(stages)}  # of all but the first, which is the gauge
    matrix = np.zeros((len(own), len(kinds) + len(stages) - 1))
    for row, entry in enumerate(own):
        matrix[row, kinds[_key(entry)]] = 1.0
        if entry.stage != stages[0]:
            matrix[row, column[entry.stage]] = -1.0
    right = np.array([log(entry.forward_s + entry.backward_s) for entry in own])
    solution = np.linalg.lstsq(matrix, right, rcond=None)[0] if own else ()
    return {stage: 1.0 if stage == stages[0] else exp(solution[column[stage]]) for stage in stages}


def _per_size(own: Iterable[Seen], speeds: Mapping[int, float], sizes: Mapping[Hashable, float]) -> list[float]:
    return [
        (entry.forward_s + entry.backward_s) * speeds[entry.stage] / sizes[entry.kind]
        for entry in own
        if sizes.get(entry.kind, 0) > 0
    ]


def _typical(speeds: Mapping[int, float]) -> float:
    return median(speeds.values())


def _work(seen: Iterable[Seen], speeds: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    forward_s: dict[Hashable, list[float]] = {}
    backward_s: dict[Hashable, list[float]] = {}
    kinds: dict[int, Hashable] = {}
    for entry in seen:
        key = _key(entry) if entry.forward_s + entry.backward_s > 0 else None
        kinds[entry.item] = kinds.get(entry.item) or key
        forward_s.setdefault(key, []).append(entry.forward_s * speeds[entry.stage])
        backward_s.setdefault(key, []).append(entry.backward_s * speeds[entry.stage])
    return {item: (median(forward_s[key]), median(backward_s[key])) for item, key in kinds.items()}
