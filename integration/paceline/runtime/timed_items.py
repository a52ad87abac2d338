"""Costs of single layers, from the steps in which they were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..measure.work import Seen as SeenItem
from ..measure.work import Separated, separate
from ..planning.rebalance import NOT_UNEVEN, Uneven
from ..planning.repartition import ItemCosts, item_costs
from .rank_reports import LayerReport, Report

MOST_TIMED = 4096
"""Times of layers that are kept, the newest."""

LEAST_PART = 0.1
"""Smallest share of a layer's time that it would take with evenly busy experts: less is an error of measurement."""


@dataclass
class TimedItems:
    """Costs of a model's items as measured so far.

    Args:
        num_devices: of the pipeline.
    """

    num_devices: int
    items: tuple[ItemCosts, ...] = ()
    """Once layers were timed, with what their experts take longer because they are unevenly busy."""
    measured: tuple[ItemCosts, ...] = ()
    """:attr:`items`, as experts were busy in the last step."""
    guessed: tuple[int, ...] = ()
    """Devices that could be compared with the others by sizes only."""
    uneven_s: dict[int, Uneven] = field(default_factory=dict)
    """Seconds of a sample by item; once layers were timed, on a device of speed 1."""
    _timed: list[tuple[int, int, LayerReport]] = field(default_factory=list)
    """Device, item and times of every layer that was timed, as if its experts had been evenly busy."""
    _even: tuple[ItemCosts, ...] = ()
    """:attr:`items`, if all experts were evenly busy."""
    _speeds: tuple[float, ...] = ()
    """Speed of each device when layers were timed."""
    _size: int = 1
    """Samples of a micro-batch when layers were timed."""

    def update(self, reports: Sequence[Report], num_items: int) -> bool:
        """Take in reports; whether layers were timed in them."""
        is_timed = self._learn(reports, num_items)
        self._take_uneven(reports)
        return is_timed

    def _learn(self, reports: Sequence[Report], num_items: int) -> bool:
        """Cost of each item, from the step in which the layers were timed."""
        timed = [(r.device, item, layer) for r in reports for item, layer in r.layers.items()]
        if not timed or not num_items:
            return False
        # Whether experts are evenly busy tells nothing of a device: it goes with the layer.
        uneven_s = {item: s for r in reports for item, s in (r.uneven_s or {}).items()}
        timed = [(device, item, _evenly(layer, uneven_s.get(item, NOT_UNEVEN))) for device, item, layer in timed]
        # A layer that was timed on two devices tells how they compare.
        size = timed[0][2].size
        self._timed = [*(entry for entry in self._timed if entry[2].size == size), *timed][-MOST_TIMED:]
        found = _separated(self._timed)
        others = {
            item: (layer.times.saved_bytes, layer.times.output_bytes, float(layer.num_parameters))
            for _, item, layer in self._timed
        }
        self.items = self.measured = self._even = item_costs(found.work, others, num_items)
        self.guessed = found.guessed
        unseen = self.num_devices - len(found.speeds)  # the last ones, whose items are functions, which nobody times
        self._speeds, self._size = (*found.speeds, *[median(found.speeds)] * unseen), size
        return True

    def _take_uneven(self, reports: Sequence[Report]) -> None:
        """Add to each layer the time that its unevenly busy experts take: it changes with the load, and moves along."""
        for report in reports:
            speed = self._speeds[report.device] if self._speeds else 1.0
            self.uneven_s |= {item: seconds.times(speed) for item, seconds in (report.uneven_s or {}).items()}
        if self._even and self.uneven_s:
            uneven = [self.uneven_s.get(n, NOT_UNEVEN).times(self._size) for n in range(len(self._even))]
            pairs = list(zip(self._even, uneven, strict=True))
            self.measured = tuple(_longer(item, seconds.measured) for item, seconds in pairs)
            self.items = tuple(_longer(item, seconds.expected) for item, seconds in pairs)


def _evenly(layer: LayerReport, uneven_s: Uneven) -> LayerReport:
    """A layer that was timed, if its experts had been evenly busy.

    Args:
        uneven_s: of a sample.
    """
    times = layer.times
    whole = times.forward_s + times.backward_s
    part = max(1 - uneven_s.measured * layer.size / whole, LEAST_PART) if whole else 1.0
    even = times._replace(forward_s=times.forward_s * part, backward_s=times.backward_s * part)
    return layer._replace(times=even)


def _longer(item: ItemCosts, seconds: float) -> ItemCosts:
    part = 1 + seconds / item.work_s if item.work_s else 1.0
    return item._replace(forward_s=item.forward_s * part, backward_s=item.backward_s * part)


def _separated(timed: Sequence[tuple[int, int, LayerReport]]) -> Separated:
    """Work of the items and speed of the stages, by what certainly is alike, or if that tells too little, probably."""

    def by(which: int) -> Separated:
        seen = [
            SeenItem(item, stage, layer.kinds[which], layer.times.forward_s, layer.times.backward_s)
            for stage, item, layer in timed
        ]
        # The first item is left out: an embedding takes less time than its weights would tell.
        return separate(seen, {layer.kinds[which]: float(layer.num_parameters) for _, item, layer in timed if item})

    certain = by(0)
    if not certain.guessed:
        return certain
    probable = by(1)
    own: dict[int, list[tuple[float, float]]] = {}  # of each replica
    for stage, item, layer in timed:
        speed = probable.speeds[stage]
        own.setdefault(item, []).append((layer.times.forward_s * speed, layer.times.backward_s * speed))
    work = {item: (median(f for f, _ in each), median(b for _, b in each)) for item, each in own.items()}
    return Separated(work, probable.speeds, probable.guessed)
