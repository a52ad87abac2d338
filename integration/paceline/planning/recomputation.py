"""Recompute the activations of as few layers as it takes for each stage to fit into memory.

Of a stage the first layers are recomputed. 1F1B keeps most micro-batches on the first stages, so these recompute most;
and as a recomputed layer takes a forward longer, boundaries and recomputed layers are found together.

Where stages end within decoder layers, a layer is what a stage has of it: a half, or both halves, which are recomputed
together.

Legend: items are embedding, decoder layers (or their halves), head with loss; L layers, S stages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from ..schedules.costs import Again
from ..schedules.schedule import Schedule
from ..schedules.verify import verify
from .blocks import Device, DoesNotFit
from .memory import ItemMemory, States

CLOSE = 1e-9
"""Share of the slowest stage's seconds to which the smallest is found."""


class Recomputation(NamedTuple):
    """Boundaries of stages, and the items that are recomputed, in order."""

    boundaries: tuple[int, ...]
    items: tuple[int, ...]


class Recomputable:
    """A model in stages, of whose layers some may be recomputed.

    Args:
        kept: memory of each item if nothing is recomputed.
        again: the same if all layers are.
        states: bytes of the weights, gradients, masters and moments of each item.
        seconds: forward and backward of each item if nothing is recomputed, on a device of speed 1.
        live: micro-batches that are alive at once on each stage, or left for later.
        deferred: those that are left for later; empty: none.
    """

    def __init__(
        self,
        kept: Sequence[ItemMemory],
        again: Sequence[ItemMemory],
        states: Sequence[float],
        seconds: Sequence[tuple[float, float]],
        live: Sequence[int],
        deferred: Sequence[int] = (),
    ) -> None:
        self._items, self._live, self._deferred = kept, live, deferred or (0,) * len(live)
        self._more_again = _sums([item.again_bytes for item in again])
        self._blocks_per_layer = items_per_layer(kept)
        self._states = _sums(states)
        self._kept = _sums([item.saved_bytes for item in kept])
        self._again = _sums([item.saved_bytes for item in again])
        self._first_again = [item.first_bytes for item in again]
        self._working = [item.working_bytes for item in kept]
        self._working_again = [item.working_bytes for item in again]
        self._forward_s = _sums([forward_s for forward_s, _ in seconds])
        self._total_s = _sums([sum(both) for both in seconds])

    @classmethod
    def of(
        cls,
        items: Sequence[ItemMemory],
        seconds: Sequence[tuple[float, float]],
        states: States,
        schedule: Schedule,
    ) -> Recomputable:
        """A model as :func:`~paceline.planning.stages.plan_stages` takes it, with one stage a device.

        Args:
            schedule: tells how many micro-batches are alive.
        """
        proof = verify(schedule, paired=False)
        of_items = [sum(states.of(*item.counts)) for item in items]
        return cls(items, recomputed(items), of_items, seconds, proof.peak_held, proof.peak_deferred)

    def partition(self, devices: Sequence[Device]) -> Recomputation:
        """The boundaries whose slowest stage is fastest, each stage with the fewest recomputed layers that it needs.

        For a bound on the seconds of a stage, stages take as many layers as they can, from the last to the first; the
        smallest bound for which the first can take the rest is found by halving. Exact (to :data:`CLOSE`) where layers
        are alike. Of unlike ones it may miss the best: each stage must have an item, and those behind it leave too
        large a one.

        Raises:
            DoesNotFit: no split fits with all layers recomputed.
        """
        best = self._within(inf, devices, tells=True)
        assert best is not None, "or it raised"
        low, high = 0.0, self._slowest_s(best, devices)
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            found = self._within(middle, devices)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, self._slowest_s(found, devices))
        return best

    def _within(self, bound_s: float, devices: Sequence[Device], *, tells: bool = False) -> Recomputation | None:
        """Boundaries with which no stage takes longer than ``bound_s``; None, or with ``tells`` DoesNotFit: there are
        none."""
        cuts, found = [len(self._items)], []
        for stage in reversed(range(len(devices))):
            device, stop = devices[stage], cuts[-1]
            # The first stage has the rest; another begins with one item, and takes as many more as it can, so that one
            # is left to each stage before.
            start = stop - 1 if stage else 0
            count = self._count(stage, start, stop, device.memory_bytes)
            if count is None and tells:
                raise self._short(stage, start, stop, device.memory_bytes)
            if count is None or self._seconds(start, stop, count) > bound_s * device.speed:
                return None
            while start > stage:
                more = self._count(stage, start - 1, stop, device.memory_bytes, count)
                if more is None or self._seconds(start - 1, stop, more) > bound_s * device.speed:
                    break
                start, count = start - 1, more
            cuts.append(start)
            found.append(self._recomputed(start, stop, count))
        return Recomputation(tuple(reversed(cuts)), tuple(item for items in reversed(found) for item in items))

    def _slowest_s(self, found: Recomputation, devices: Sequence[Device]) -> float:
        counts = counts_of_layers(found.boundaries, found.items, self._blocks_per_layer)
        return max(
            self._seconds(start, stop, count) / device.speed
            for (start, stop), count, device in zip(pairwise(found.boundaries), counts, devices, strict=True)
        )

    def _count(self, stage: int, start: int, stop: int, limit: float, likely: int = 0) -> int | None:
        """The fewest recomputed layers with which a stage of these items fits; None: with no number of them.

        Args:
            likely: fewer are tried last: a stage with a layer less needs so many.
        """
        layers = self._num_layers(start, stop)
        tried = (*range(likely, layers + 1), *range(likely))
        return next((count for count in tried if self._need(stage, start, stop, count) <= limit), None)

    def _need(self, stage: int, start: int, stop: int, count: int) -> float:
        """Bytes as :func:`~paceline.planning.memory.stage_memory` has them."""
        again = self._recomputed(start, stop, count)
        first, end = again.start, again.stop
        incoming = self._items[start - 1].output_bytes if start else 0.0
        outgoing = self._items[stop - 1].output_bytes if stop < len(self._items) else 0.0
        saved = self._kept[first] - self._kept[start] + self._again[end] - self._again[first]
        saved += self._kept[stop] - self._kept[end] + outgoing
        saved += self._first_again[start] if count and start == first else 0.0
        working = max((*self._working[start:first], *self._working_again[first:end], *self._working[end:stop]))
        states = self._states[stop] - self._states[start]
        more = self._deferred[stage] * (self._more_again[end] - self._more_again[first])
        return states + self._live[stage] * saved + more + working + 2 * incoming + outgoing

    def _seconds(self, start: int, stop: int, count: int) -> float:
        again = self._recomputed(start, stop, count)
        return self._total_s[stop] - self._total_s[start] + self._forward_s[again.stop] - self._forward_s[again.start]

    def _recomputed(self, start: int, stop: int, count: int) -> range:
        held = range(max(start, 1), min(stop, len(self._items) - 1))
        return first_layers(held, count, self._blocks_per_layer)

    def _num_layers(self, start: int, stop: int) -> int:
        return num_layers(range(max(start, 1), min(stop, len(self._items) - 1)), self._blocks_per_layer)

    def _short(self, stage: int, start: int, stop: int, limit: float) -> DoesNotFit:
        need = min(self._need(stage, start, stop, count) for count in range(self._num_layers(start, stop) + 1))
        return DoesNotFit(stage, stage, need, limit, "with all its layers recomputed")


def recomputed(items: Sequence[ItemMemory], which: Collection[int] | None = None) -> list[ItemMemory]:
    """Memory of the items if these layers, by default all, are recomputed: each keeps its input, and one at a time is
    whole again. Of a half, the layer is counted as whole again, although a stage may end between both."""
    found, layers = list(items), range(1, len(items) - 1) if which is None else which
    blocks = items_per_layer(items)
    for index in layers:
        item = items[index]
        first = index - item.is_second
        layer = items[first : first + blocks]
        working = max(each.working_bytes for each in layer) + sum(each.saved_bytes for each in layer)
        saved, as_first = (0.0, item.output_bytes) if item.is_second else (item.output_bytes, 0.0)
        more = max(min(item.saved_bytes, item.factor_bytes) - saved, 0.0)
        routed = sum(each.routed_bytes for each in layer)
        found[index] = item._replace(
            saved_bytes=saved, working_bytes=working, first_bytes=as_first, again_bytes=more, routed_bytes=routed
        )
    return found


def recomputed_s(seconds: Sequence[tuple[float, float]], which: Collection[int]) -> list[tuple[float, float]]:
    """Forward and backward of the items if these layers are recomputed: a forward more in the backward."""
    return [(forth, back + forth * (index in which)) for index, (forth, back) in enumerate(seconds)]


def again_of(
    items: Sequence[ItemMemory],
    forward_s: Sequence[float],
    which: Collection[int],
    boundaries: Sequence[int],
    rooms: Sequence[float],
    stages: Sequence[Sequence[int]],
    *,
    is_collective: bool = False,
) -> Again:
    """Activations that a step computes again, or keeps where they have room.

    Args:
        items: memory with these recomputed.
        forward_s: of each item.
        which: items that are recomputed.
        rooms: bytes of each device for all that is alive, beside one layer that is whole again.
        stages: of each device.
        is_collective: see :class:`~paceline.schedules.costs.Again`.
    """
    held = [[index for index in range(start, stop) if index in which] for start, stop in pairwise(boundaries)]
    whole = [[items[index].working_bytes for index in own] for own in held]
    one = [max((each for stage in own for each in whole[stage]), default=0.0) for own in stages]
    return Again(
        seconds=tuple(sum(forward_s[index] for index in own) for own in held),
        num_bytes=tuple(sum(own) / items_per_layer(items) for own in whole),
        layer_bytes=tuple(max(own, default=0.0) for own in whole),
        kept=(0.0,) * len(held),
        room_bytes=tuple(map(sum, zip(rooms, one, strict=True))),
        is_collective=is_collective,
    )


def layers_of_stages(boundaries: Sequence[int], head_slices: int = 1) -> list[range]:
    """The items of each stage that are decoder layers.

    Args:
        head_slices: items that the head is.
    """
    return [range(max(start, 1), min(stop, boundaries[-1] - head_slices)) for start, stop in pairwise(boundaries)]


def items_per_layer(items: Sequence[ItemMemory]) -> int:
    """Items that a decoder layer is: itself, or its two halves."""
    return 2 if any(item.is_second for item in items) else 1


def num_layers(held: range, blocks_per_layer: int = 1) -> int:
    """Layers that are in a stage as a whole or as a half.

    Args:
        held: its items, without embedding and head.
    """
    return len(range((held.start - 1) // blocks_per_layer, (held.stop - 2) // blocks_per_layer + 1)) if held else 0


def first_layers(held: range, count: int, blocks_per_layer: int = 1) -> range:
    """The items of the first ``count`` layers of a stage. Arguments as of :func:`num_layers`."""
    end = 1 + blocks_per_layer * ((held.start - 1) // blocks_per_layer + count)
    return range(held.start, max(held.start, min(end, held.stop)) if count else held.start)


def counts_of_layers(boundaries: Sequence[int], items: Collection[int], blocks_per_layer: int = 1) -> tuple[int, ...]:
    """Recomputed layers of each stage."""
    return tuple(
        len({(item - 1) // blocks_per_layer for item in range(start, stop) if item in items})
        for start, stop in pairwise(boundaries)
    )


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]
