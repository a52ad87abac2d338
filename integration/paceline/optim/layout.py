"""Who owns which rows of which parameter: buckets of parameters, each cut into one part per owner.

A bucket is one stretch of memory that is reduced at a time. Its owners have equally many elements of it: parameters are
placed such that a cut into equal parts cuts no row (a row is an index of the first dimension), with padding in front of
the few that need it. So most parameters have one owner, a large one is cut by rows, and one reduce-scatter reduces the
bucket. Where too much padding would be needed, parts are equal to within a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod

ALIGNMENT = 16
"""Elements that a parameter's place in a bucket is aligned to: 64 bytes of fp32."""

MOST_PADDING = 1 / 8
"""Share of a bucket that may be added to it for parts of equal length."""

LEAST_CUT = 0.02
"""A cut inside a parameter that would be off by less than this share of an owner's part falls on its edge instead."""


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop - 1`` of parameter ``index``, at ``offset`` in its bucket."""

    index: int
    start: int
    stop: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters one after another, and who owns what of them.

    Args:
        offsets: of each parameter's first element.
        bounds: of the ranks' parts, one more than there are ranks; in elements of the bucket.
        parts: each rank's rows; none of a rank that owns nothing.
    """

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    bounds: tuple[int, ...]
    parts: tuple[tuple[Rows, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether all ranks' parts are of the same length."""
        return len({high - low for low, high in pairwise(self.bounds)}) == 1


def make_buckets(
    shapes: Sequence[Sequence[int]],
    num_ranks: int,
    bucket_numel: int,
    *,
    owners: Sequence[int] | None = None,
    apart: Sequence[int] = (),
    cut: bool = True,
    layers: Sequence[Hashable] | None = None,
    least_numel: int = 0,
) -> list[Bucket]:
    """Buckets over parameters of ``shapes``, last parameter first: the order in which backward finishes them.

    Args:
        bucket_numel: a bucket is closed when it has so many elements.
        owners: ranks that may own rows, ascending; None for all.
        apart: indices of parameters that come last, in a bucket of their own.
        cut: whether a parameter may have several owners.
        layers: of each parameter; a bucket is closed at a layer's edge as soon as it has ``least_numel`` elements, so
            that who owns what of a layer does not depend on which other layers there are.

    >>> [bucket.parts[0] for bucket in make_buckets([(4, 8)], 2, 100)]
    [(Rows(index=0, start=0, stop=2, offset=0, numel=16),)]
    """
    owners = range(num_ranks) if owners is None else owners
    assert list(owners) == sorted(set(owners) & set(range(num_ranks))), (owners, num_ranks)
    assert len(owners) > 0, num_ranks
    runs: list[list[int]] = [[]]
    size = 0
    for index in reversed(range(len(shapes))):
        if index in apart:
            continue
        is_edge = layers is not None and bool(runs[-1]) and layers[index] != layers[runs[-1][-1]]
        if size >= bucket_numel or (is_edge and size >= least_numel):
            runs.append([])
            size = 0
        runs[-1].append(index)
        size += prod(shapes[index])
    runs.append(sorted(apart))
    return [_bucket(run, shapes, num_ranks, owners, cut) for run in runs if run]


def _bucket(
    parameters: Sequence[int], shapes: Sequence[Sequence[int]], num_ranks: int, owners: Sequence[int], cut: bool
) -> Bucket:
    sizes = [(prod(shapes[index]), prod(shapes[index][1 if cut else 0 :])) for index in parameters]
    length = _equal_length(sizes, len(owners))
    offsets, end = _placed(sizes, length)
    if length:
        end = length * len(owners)
        cuts = [length * number for number in range(len(owners))]
    else:
        cuts = [0]
        for number in range(1, len(owners)):
            target = end * number // len(owners)
            slack = LEAST_CUT * end / len(owners)
            cuts.append(max(cuts[-1], _cut_near(target, slack, parameters, offsets, end, shapes, cut)))
    cuts.append(end)
    bounds = [cuts[bisect_left(owners, rank)] for rank in range(num_ranks + 1)]
    parts = tuple(
        tuple(
            rows
            for index, offset in zip(parameters, offsets, strict=True)
            if (rows := _rows(index, shapes[index], offset, low, high))
        )
        for low, high in pairwise(bounds)
    )
    return Bucket(tuple(parameters), tuple(offsets), end, tuple(bounds), parts)


def _equal_length(sizes: Sequence[tuple[int, int]], num_parts: int) -> int:
    """Length of each of ``num_parts`` parts that cut no row; 0 if that needs more than :data:`MOST_PADDING`.

    Args:
        sizes: elements of each parameter, and of a row of it.
    """
    _, total = _placed(sizes)
    share = -(-total // num_parts)
    # A parameter that is longer than a part may be cut twice or more: the length between cuts is whole rows of it.
    step = lcm(ALIGNMENT, *(row for numel, row in sizes if numel > share and num_parts > 2))
    length, growth = -(-share // step) * step, step
    while length <= share * (1 + MOST_PADDING):
        if _placed(sizes, length)[1] <= length * num_parts:
            return length
        length, growth = length + growth, 2 * growth
    return 0


def _placed(sizes: Sequence[tuple[int, int]], length: int = 0) -> tuple[list[int], int]:
    """Offsets of parameters, none of whose rows crosses a multiple of ``length``; and the end of the last one."""
    offsets: list[int] = []
    end = 0
    for numel, row in sizes:
        if length and numel > (room := length - end % length):
            end += room % row
        offsets.append(end)
        end = -(-(end + numel) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _cut_near(
    target: int,
    slack: float,
    parameters: Sequence[int],
    offsets: Sequence[int],
    end: int,
    shapes: Sequence[Sequence[int]],
    cut: bool,
) -> int:
    """The place nearest to ``target`` where no row is cut; an edge of a parameter if one is within ``slack``."""
    edges = [*offsets, end]
    edge = min(edges, key=lambda place: abs(place - target))
    if not cut or abs(edge - target) <= slack:
        return edge
    position = max(i for i, offset in enumerate(offsets) if offset <= target)
    shape, offset = shapes[parameters[position]], offsets[position]
    row = prod(shape[1:])
    inside = offset + min(round((target - offset) / row), shape[0]) * row if shape else offset
    return inside if inside < offset + prod(shape) else edges[position + 1]


def _rows(index: int, shape: Sequence[int], offset: int, low: int, high: int) -> Rows | None:
    """Rows of the parameter between ``low`` and ``high``, which cut none."""
    row = prod(shape[1:]) if shape else 1
    num_rows = shape[0] if shape else 1
    if row == 0:
        return None
    start = min(max(0, -(-(low - offset) // row)), num_rows)
    stop = min(max(0, -(-(high - offset) // row)), num_rows)
    return Rows(index, start, stop, offset + start * row, (stop - start) * row) if stop > start else None
