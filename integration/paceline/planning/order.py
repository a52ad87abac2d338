"""Which device comes first: the partition over all orders of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, cycle, pairwise, product
from math import inf, prod
from typing import TypeAlias

from .blocks import TIE, Block, Device, DoesNotFit, Partition, check, check_links, times
from .partition import Sums, enter, extend, first_block, first_start, partition

# How many devices of each kind are on the stages so far.
_Used: TypeAlias = tuple[int, ...]
# A(j, m) by what is used and the kind of the last device.
_Rows: TypeAlias = dict[tuple[_Used, int], list[float]]

# Blocks that the search may visit, all stages of all orders together: about five seconds.
MOST_VISITS = 2_500_000


def search_order(
    blocks: Sequence[Block],
    devices: Sequence[Device],
    links: Sequence[Sequence[float]] = (),
    *,
    live: Sequence[float] | None = None,
) -> Partition:
    """The split with the smallest bottleneck, where any device may run any stage.

    Exact while the number of states is small: the dynamic programme then goes over which devices are used up, and
    devices that nothing tells apart count as one kind. That is ten different devices and two hundred blocks, or 64 of
    two kinds and a thousand. Beyond that, a local search: from the best of the order given, by speed and by memory, two
    devices change places as long as that helps. The order given is kept unless another is better. Takes some seconds
    at most.

    Args:
        links: bytes a second from each device (row) to each other (column); the slower of the two directions counts,
            the diagonal does not. Empty: infinitely fast.
        blocks, devices, live: as of :func:`~paceline.planning.partition`; ``live`` is by stage, not by device.

    Raises:
        DoesNotFit: no split fits in memory in any order that was tried; of the order given.
        ValueError: as of :func:`~paceline.planning.partition`, or the links are no square matrix.
    """
    live = check(blocks, devices, (), live)
    _check_matrix(links, len(devices))
    search = _Search(blocks, devices, links, live)
    best = search.split(search.best_order())
    try:
        as_given = search.split(range(len(devices)))
    except DoesNotFit:
        return best
    return best if best.bottleneck_s < as_given.bottleneck_s * (1 - TIE) else as_given


def links_in_order(links: Sequence[Sequence[float]], order: Sequence[int]) -> list[float]:
    """Bytes a second between neighbours: of each two, the slower direction; empty if ``links`` is."""
    return [min(links[i][j], links[j][i]) for i, j in pairwise(order)] if links else []


class _Search:
    def __init__(
        self,
        blocks: Sequence[Block],
        devices: Sequence[Device],
        links: Sequence[Sequence[float]],
        live: Sequence[float],
    ) -> None:
        self.blocks, self.devices, self.live = blocks, devices, live
        self.sums = Sums.of(blocks)
        self.rates = [
            [inf if not links or i == j else min(links[i][j], links[j][i]) for j in range(len(devices))]
            for i in range(len(devices))
        ]
        self.kinds: list[list[int]] = []  # devices that may change places without any effect
        for device in range(len(devices)):
            kind = next((kind for kind in self.kinds if self._interchangeable(kind[0], device)), None)
            if kind is None:
                self.kinds.append([device])
            else:
                kind.append(device)

    def best_order(self) -> Sequence[int]:
        """The best that can be found in time."""
        states = prod(len(kind) + 1 for kind in self.kinds)
        if len(self.blocks) * states * len(self.kinds) <= MOST_VISITS:
            return self.exact()
        return self.by_swaps(MOST_VISITS // (len(self.blocks) * len(self.devices)))

    def split(self, order: Sequence[int]) -> Partition:
        """The best split in an order of the devices."""
        links = links_in_order(self.rates, order)
        found = partition(self.blocks, [self.devices[i] for i in order], links, live=self.live)
        return replace(found, order=tuple(order))

    def exact(self) -> Sequence[int]:
        """The best order; the one given if nothing fits in any."""
        num_blocks, num_stages = len(self.blocks), len(self.devices)
        rows: _Rows = {}
        level: set[_Used] = {(0,) * len(self.kinds)}
        for stage in range(num_stages):
            ends = range(stage + 1, num_blocks - (num_stages - stage) + 2)
            for used, kind in product(sorted(level), range(len(self.kinds))):
                if used[kind] < len(self.kinds[kind]):
                    start = self._start(rows, used, kind)
                    rows[_plus(used, kind), kind] = extend(start, self.sums, self._device(kind), self.live[stage], ends)
            level = {used for used, _ in rows if sum(used) == stage + 1}
        used = tuple(len(kind) for kind in self.kinds)
        last = min(range(len(self.kinds)), key=lambda kind: rows[used, kind][-1])
        if rows[used, last][-1] == inf:
            return range(num_stages)
        return self._order(rows, used, last)

    def by_swaps(self, budget: int) -> Sequence[int]:
        """The best order that a local search finds within so many orders."""
        seen: dict[tuple[int, ...], list[float]] = {}

        def slowest_first(order: Sequence[int]) -> list[float]:
            """All stages and links, so that one slow link less is better where others are as slow."""
            key = tuple(order)
            if key not in seen:
                try:
                    boundaries = self.split(key).boundaries
                except DoesNotFit:
                    seen[key] = [inf]
                else:
                    in_order = [self.devices[device] for device in key]
                    seconds = times(self.blocks, in_order, links_in_order(self.rates, key), boundaries)
                    seen[key] = sorted(seconds, reverse=True)
            return seen[key]

        given = list(range(len(self.devices)))
        starts = [
            given,
            sorted(given, key=lambda device: -self.devices[device].speed),
            sorted(given, key=lambda device: -self.devices[device].memory_bytes),
        ]
        best = min(starts, key=slowest_first)
        pairs = list(combinations(given, 2))
        since = 0  # pairs tried since the last that helped
        for i, j in cycle(pairs):
            if since == len(pairs) or len(seen) >= budget:
                break
            since += 1
            other = list(best)
            other[i], other[j] = best[j], best[i]
            if not self._interchangeable(best[i], best[j]) and slowest_first(other) < slowest_first(best):
                best, since = other, 0
        return best

    def _interchangeable(self, a: int, b: int) -> bool:
        others = (other for other in range(len(self.devices)) if other not in (a, b))
        return self.devices[a] == self.devices[b] and all(self.rates[a][o] == self.rates[b][o] for o in others)

    def _device(self, kind: int) -> Device:
        return self.devices[self.kinds[kind][0]]

    def _entries(self, rows: _Rows, used: _Used, kind: int) -> dict[int, list[float]]:
        """Best bottleneck before a stage on a device of ``kind``, by the kind of the device before it."""
        entries = {}
        for before in range(len(self.kinds)):
            if (used, before) in rows:
                a, b = self.kinds[before][0], self.kinds[kind][-1]
                entries[before] = enter(self.sums, rows[used, before], self.rates[a][b])
        return entries

    def _start(self, rows: _Rows, used: _Used, kind: int) -> list[float]:
        entries = list(self._entries(rows, used, kind).values())
        if not entries:
            return first_start(len(self.blocks))
        return entries[0] if len(entries) == 1 else list(map(min, *entries))

    def _order(self, rows: _Rows, used: _Used, last: int) -> list[int]:
        """Back from the last stage: which kind of device is on each, the first of a kind before the second."""
        left = [list(kind) for kind in self.kinds]
        end, order = len(self.blocks), []
        while True:
            order.append(left[last].pop())
            if len(order) == len(self.devices):
                return order[::-1]
            most = rows[used, last][end]
            used = tuple(count - (kind == last) for kind, count in enumerate(used))
            start = self._start(rows, used, last)
            end = first_block(start, self.sums, self._device(last), self.live[sum(used)], end, most)
            entries = self._entries(rows, used, last)
            last = min(entries, key=lambda kind: entries[kind][end])


def _plus(used: _Used, kind: int) -> _Used:
    return tuple(count + (index == kind) for index, count in enumerate(used))


def _check_matrix(links: Sequence[Sequence[float]], num_devices: int) -> None:
    if not links:
        return
    if len(links) != num_devices or any(len(row) != num_devices for row in links):
        raise ValueError(
            f"links is no matrix of {num_devices} rows with {num_devices} values each: to search the order of the "
            "devices, give the bytes a second from each device to each other, or leave links out."
        )
    check_links((f"{i}][{j}", rate) for i, row in enumerate(links) for j, rate in enumerate(row) if i != j)
