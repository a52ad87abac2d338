"""Which device owns which experts, so that the most loaded device has little load: without copies of experts.

Source: ``expert placement``, the greedy rule of the seed system. What copies add is in ``replicas.py``, how tokens are
split over them in ``splitting.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import fsum

from .experts import Placement, checked_loads, device_loads, imbalance, moved, slowness_of
from .replicas import replicated
from .slots import check_current, checked_shape, in_slots
from .splitting import split

__all__ = [
    "Placement",
    "device_loads",
    "greedy",
    "imbalance",
    "lower_bound",
    "moved",
    "replicated",
    "split",
]


def greedy(
    loads: Sequence[float],
    num_devices: int,
    slots: int | None = None,
    current: Placement | None = None,
    *,
    nodes: int = 1,
    speeds: Sequence[float] | None = None,
) -> Placement:
    """Experts by falling load, each to the device with the least load so far that still has a slot.

    Of several such devices it is the one that owns the expert now, else the first. Where devices differ in speed, it is
    the one that would be done first.

    Args:
        loads: of each expert, in any unit.
        slots: experts that a device has room for; None: as few as hold all.
        current: keeps experts in their slots as far as they stay; None: experts are in the order of their numbers.
        nodes: groups of neighbouring devices, of equal size: experts are dealt to them by the same rule first, and then
            to the devices of each.
        speeds: of each device, in any unit; None: equal.

    Raises:
        ValueError: no placement is possible, or ``current`` or ``speeds`` is not of these experts and devices.
    """
    loads = checked_loads(loads)
    slots = checked_shape(len(loads), num_devices, slots, nodes)
    check_current(current, len(loads), num_devices)
    slowness = slowness_of(speeds, num_devices)
    home = [None] * len(loads) if current is None else current.owners
    per_node = num_devices // nodes
    node_homes = [None if device is None else device // per_node for device in home]
    owned: list[list[int]] = []
    of_nodes = [slowness[first : first + per_node] for first in range(0, num_devices, per_node)]
    slow_nodes = [per_node / fsum(1 / slow for slow in own) for own in of_nodes]
    for node, members in enumerate(_dealt(range(len(loads)), loads, slow_nodes, slots * per_node, node_homes)):
        homes = [None if device is None else device - node * per_node for device in home]
        owned += _dealt(sorted(members), loads, of_nodes[node], slots, homes)
    return in_slots(owned, [()] * num_devices, current)


def _dealt(
    experts: Iterable[int], loads: Sequence[float], slowness: Sequence[float], room: int, homes: Sequence[int | None]
) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in slowness]
    total = [0.0] * len(bins)
    open_bins = list(range(len(bins)))
    are_equal = len(set(slowness)) == 1
    for expert in sorted(experts, key=lambda expert: -loads[expert]):
        after = total if are_equal else [(t + loads[expert]) * slow for t, slow in zip(total, slowness, strict=True)]
        best, home = min(open_bins, key=after.__getitem__), homes[expert]
        if home in open_bins and after[home] == after[best]:
            best = home
        bins[best].append(expert)
        total[best] += loads[expert]
        if len(bins[best]) == room:
            open_bins.remove(best)
    return bins


def lower_bound(
    loads: Sequence[float], num_devices: int, slots: int | None = None, speeds: Sequence[float] | None = None
) -> float:
    """A lower bound of the largest device load, in any placement without copies.

    The largest of: the mean of the devices; the hottest expert with the lightest of those that must be beside it
    because the other devices are full; for each k, the k + 1 lightest of the ``k * num_devices + 1`` hottest experts,
    since some device has as many of these. There need not be a placement that reaches it. Where devices differ in
    speed: the mean, or the hottest expert on the fastest device.

    Raises:
        ValueError: no placement is possible.
    """
    loads = checked_loads(loads)
    slots = checked_shape(len(loads), num_devices, slots)
    slowness = slowness_of(speeds, num_devices)
    if len(set(slowness)) > 1:
        return max(fsum(loads) / num_devices, max(loads) * min(slowness))
    falling = sorted(loads, reverse=True)
    sums = [0.0, *accumulate(falling)]
    beside = len(loads) - (num_devices - 1) * slots - 1
    crowd = max(0, (len(loads) - 1) // num_devices)
    return max(
        sums[-1] / num_devices,
        falling[0] + (fsum(falling[-beside:]) if beside > 0 else 0.0),
        *(fsum(falling[k * (num_devices - 1) : k * num_devices + 1]) for k in range(1, crowd + 1)),
    )
