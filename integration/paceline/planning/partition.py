"""Which blocks each device gets: the split of a row of blocks whose slowest part is fastest, exactly.

Source: ``adaptive partition``, the dynamic programme of the seed system. With the work w_l of block l, the bytes a_l of
its output, the speed P_m of device m and the bandwidth B_m between the devices m-1 and m,

    T(i, j; m) = (w_i + ... + w_j) / P_m
    C(s; m)    = 2 a_s / B_m                    an activation there and its gradient back
    A(j, 1)    = T(1, j; 1)
    A(j, m)    = min over s of max{ A(s, m-1), C(s; m), T(s+1, j; m) }

and A(L, M) is the bottleneck. It is a maximum because stages compute and send at the same time. What fill and drain of
a step add, and what the two directions of a link share, the simulator knows: :func:`~paceline.planning.refine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from .blocks import TIE, Block, Device, DoesNotFit, Partition, bottleneck, check

__all__ = ["Block", "Device", "DoesNotFit", "Partition", "bottleneck", "partition"]


def partition(
    blocks: Sequence[Block],
    devices: Sequence[Device],
    links: Sequence[float] = (),
    *,
    live: Sequence[float] | None = None,
) -> Partition:
    """The split with the smallest bottleneck: every device gets a run of at least one block, in the order given.

    Among splits that are equally good it is the one whose last cut is the earliest, and the blocks before that are
    split by the same rule: later stages hold more, since they keep fewer micro-batches alive. Time is proportional to
    blocks x devices.

    Args:
        blocks: in the order of the model.
        devices: in the order of the stages.
        links: bytes a second between neighbouring devices; empty: infinitely fast.
        live: micro-batches that are alive at once on each stage (``peak_activations`` of its schedule); None: 0. A
            stage needs the ``memory_bytes`` of its blocks and ``live`` times their ``live_bytes``.

    Raises:
        DoesNotFit: no split fits in memory.
        ValueError: a number or a length is none that can be, or there are more devices than blocks.
    """
    live = check(blocks, devices, links, live)
    sums = Sums.of(blocks)
    starts: list[list[float]] = []  # by stage: what each first block costs before the stage itself
    rows: list[list[float]] = []  # A(j, m), by stage and by j
    for stage, device in enumerate(devices):
        link_bytes_per_s = links[stage - 1] if links and stage else inf
        starts.append(enter(sums, rows[-1], link_bytes_per_s) if rows else first_start(len(blocks)))
        ends = range(stage + 1, len(blocks) - (len(devices) - stage) + 2)
        ends = ends[-1:] if stage == len(devices) - 1 else ends
        rows.append(extend(starts[-1], sums, device, live[stage], ends))
        if min(rows[-1]) == inf:
            raise _does_not_fit(starts[-1], sums, stage, device, live[stage], ends)
    boundaries = [len(blocks)]
    for stage in reversed(range(len(devices))):
        end = boundaries[-1]
        boundaries.append(first_block(starts[stage], sums, devices[stage], live[stage], end, rows[stage][end]))
    found = tuple(reversed(boundaries))
    return Partition(found, bottleneck(blocks, devices, links, found), tuple(range(len(devices))))


class Sums(NamedTuple):
    """Running sums over the first 0, 1, ..., L blocks, exact for whole numbers; and what the cut before each block
    sends, there and back."""

    work: list[float]
    memory_bytes: list[float]
    live_bytes: list[float]
    message_bytes: list[float]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Sums:
        work, sent, memory, kept = zip(*blocks, strict=True)
        works, memories, keeps = (list(accumulate(column, initial=0)) for column in (work, memory, kept))
        return cls(works, memories, keeps, [0.0, *(2 * each for each in sent)])

    def needs(self, live: float) -> list[float]:
        """Bytes of the first 0, 1, ..., L blocks with so many micro-batches alive."""
        if not live:
            return self.memory_bytes
        return [memory + live * kept for memory, kept in zip(self.memory_bytes, self.live_bytes, strict=True)]


def first_start(num_blocks: int) -> list[float]:
    """The counterpart of :func:`enter` for the first stage: it begins with block 0, and nothing is before it."""
    return [0.0] + [inf] * (num_blocks - 1)


def enter(sums: Sums, row: Sequence[float], link_bytes_per_s: float) -> list[float]:
    """max{A(s, m-1), C(s; m)} for the stage after ``row``, by its first block s."""
    if link_bytes_per_s == inf:
        return list(row[:-1])
    return [max(before, sent / link_bytes_per_s) for before, sent in zip(row[:-1], sums.message_bytes, strict=False)]


def extend(start: Sequence[float], sums: Sums, device: Device, live: float, ends: range) -> list[float]:
    """A(j, m) for the ends j of a stage, infinite where nothing fits and outside ``ends``.

    The same minimum as of the formula without looking at every s: the time of the stage falls with s, and the smallest
    ``start`` of s and all later ones rises with it, so the best s is one of the two where they cross. With j the
    crossing only moves forward, and the deque keeps the smallest starts behind it.

    Args:
        start: by first block s of the stage, what everything before it costs.
        device: of the stage.
        live: micro-batches alive on it.
        ends: the j that are asked for, rising one by one.
    """
    work, need = sums.work, sums.needs(live)
    speed, limit = device.speed, device.memory_bytes
    row = [inf] * len(work)
    low = 0  # no s before this one is needed any more
    least: deque[int] = deque()  # from low on: the s with the smallest start, the smallest after that one, ...
    for s in range(ends.stop - 1):
        while least and start[least[-1]] > start[s]:
            least.pop()
        least.append(s)
        j = s + 1
        while need[j] - need[low] > limit:
            low += 1
        while least and least[0] < low:
            least.popleft()
        following = s
        while low < s:
            following = least[least[0] == low]
            if start[following] > (work[j] - work[low + 1]) / speed:
                break
            if least[0] == low:
                least.popleft()
            low += 1
        if j in ends and least:
            row[j] = min(max(start[i], (work[j] - work[i]) / speed) for i in {least[0], following})
    return row


def first_block(start: Sequence[float], sums: Sums, device: Device, live: float, end: int, most_s: float) -> int:
    """The earliest s of a stage up to ``end`` that costs ``most_s``, what :func:`extend` found for that end."""
    work, need = sums.work, sums.needs(live)
    return next(
        s
        for s in range(end)
        if max(start[s], (work[end] - work[s]) / device.speed) <= most_s * (1 + TIE)
        and need[end] - need[s] <= device.memory_bytes
    )


def _does_not_fit(
    start: Sequence[float], sums: Sums, stage: int, device: Device, live: float, ends: range
) -> DoesNotFit:
    """The error for the first stage that does not fit: with the least that any split leaves it."""
    need = sums.needs(live)
    possible = [first for first, seconds in enumerate(start) if seconds < inf]
    runs = [(first, max(first + 1, ends.start)) for first in possible if first + 1 < ends.stop]
    least, first, end = min((need[end] - need[first], first, end) for first, end in runs)
    if end - first == 1:
        why = f"block {first} alone"
    elif stage == 0:
        why = "all blocks"
    else:
        why = f"blocks {first} to {end - 1}, what the stages before cannot hold"
    return DoesNotFit(stage, stage, least, device.memory_bytes, why)
