"""Recompute as few layers as it takes where stages are given. Those that a device holds share its memory."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import DoesNotFit
from .memory import ItemMemory, States
from .recomputation import (
    Recomputation,
    first_layers,
    items_per_layer,
    layers_of_stages,
    num_layers,
    recomputed,
)
from .shared_devices import Held


class SharedRecomputable:
    """A model in stages, of whose layers some may be recomputed: the first ones of each stage.

    A stage recomputes as many layers on each device that holds it, one in each direction.

    Args:
        items: memory of each item if nothing is recomputed.
        held: stages of each device.
    """

    def __init__(self, items: Sequence[ItemMemory], states: States, held: Sequence[Held]) -> None:
        self._items, self._states, self._held = items, states, held
        self._again = recomputed(items)
        self._blocks_per_layer = items_per_layer(items)
        self._known: dict[tuple[int, tuple[tuple[int, int, int], ...]], float] = {}
        """Bytes of a device, by the items (from, to) and the number of recomputed layers of each of its stages."""

    def fewest(self, boundaries: Sequence[int], limits: Sequence[float]) -> Recomputation:
        """As few recomputed layers as it takes for every device to fit.

        A device takes one after another, each from the stage where that frees most. Where its stages keep most at
        different times, one layer fewer might do.

        Args:
            boundaries: of the stages, over items.
            limits: bytes of each device.

        Raises:
            DoesNotFit: a device does not fit with all its layers recomputed.
        """
        layers = [num_layers(own, self._blocks_per_layer) for own in layers_of_stages(boundaries)]
        counts = [0] * len(layers)
        for device, (held, limit) in enumerate(zip(self._held, limits, strict=True)):
            while (need := self._need(device, boundaries, counts)) > limit:
                more = [_with(counts, stage, 1) for stage in held.stages if counts[stage] < layers[stage]]
                if not more:
                    raise DoesNotFit(device, device, need, limit, "with all its layers recomputed")
                counts = min(more, key=lambda tried: self._need(device, boundaries, tried))
        # What was taken before something else, or for another device, may not be needed after it.
        for stage in reversed(range(len(counts))):
            while counts[stage] and self._fits(fewer := _with(counts, stage, -1), boundaries, limits):
                counts = fewer
        if not self._fits(counts, boundaries, limits):  # a layer that is whole again for its backward needs room, too
            needs = [self._need(device, boundaries, counts) for device in range(len(limits))]
            worst = max(range(len(limits)), key=lambda device: needs[device] - limits[device])
            raise DoesNotFit(worst, worst, needs[worst], limits[worst], "with layers recomputed")
        of_stages = zip(layers_of_stages(boundaries), counts, strict=True)
        return Recomputation(
            tuple(boundaries),
            tuple(item for own, count in of_stages for item in first_layers(own, count, self._blocks_per_layer)),
        )

    def _fits(self, counts: Sequence[int], boundaries: Sequence[int], limits: Sequence[float]) -> bool:
        return all(self._need(device, boundaries, counts) <= limit for device, limit in enumerate(limits))

    def _need(self, device: int, boundaries: Sequence[int], counts: Sequence[int]) -> float:
        """Bytes of a device if so many layers of each stage are recomputed."""
        held = self._held[device]
        key = device, tuple((boundaries[stage], boundaries[stage + 1], counts[stage]) for stage in held.stages)
        if key not in self._known:
            mixed = list(self._items)
            for stage in held.stages:
                again = first_layers(layers_of_stages(boundaries)[stage], counts[stage], self._blocks_per_layer)
                mixed[again.start : again.stop] = self._again[again.start : again.stop]
            self._known[key] = held.memory(mixed, boundaries, self._states).total
        return self._known[key]


def _with(counts: Sequence[int], stage: int, more: int) -> list[int]:
    return [count + more * (number == stage) for number, count in enumerate(counts)]
