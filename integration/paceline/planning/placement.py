"""Which device owns which experts, so that the most loaded device has little load: without copies of experts.

Source: ``expert placement``, the greedy rule of the seed system. What copies add is in ``replicas.py``, how tokens are
split over them in ``splitting.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import fsum

from .experts import Placement, checked_loads, device_loads, imbalance, moved
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
) -> Placement:
    """Experts by falling load, each to the device with the least load so far that still has a slot.

    Of several such devices it is the one that owns the expert now, else the first.

    Args:
        loads: of each expert, in any unit.
        slots: experts that a device has room for; None: as few as hold all.
        current: keeps experts in their slots as far as they stay; None: experts are in the order of their numbers.
        nodes: groups of neighbouring devices, of equal size: experts are dealt to them by the same rule first, and then
            to the devices of each.

    Raises:
        ValueError: no placement is possible, or ``current`` is not of these experts and devices.
    """
    loads = checked_loads(loads)
    slots = checked_shape(len(loads), num_devices, slots, nodes)
    check_current(current, len(loads), num_devices)
    home = [None] * len(loads) if current is None else current.owners
    per_node = num_devices // nodes
    node_homes = [None if device is None else device // per_node for device in home]
    owned: list[list[int]] = []
    for node, members in enumerate(_dealt(range(len(loads)), loads, nodes, slots * per_node, node_homes)):
        homes = [None if device is None else device - node * per_node for device in home]
        owned += _dealt(sorted(members), loads, per_node, slots, homes)
    return in_slots(owned, [()] * num_devices, current)


def _dealt(
    experts: Iterable[int], loads: Sequence[float], num_bins: int, room: int, homes: Sequence[int | None]
) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    total = [0.0] * num_bins
    open_bins = list(range(num_bins))
    for expert in sorted(experts, key=lambda expert: -loads[expert]):
        best, home = min(open_bins, key=total.__getitem__), homes[expert]
        if home in open_bins and total[home] == total[best]:
            best = home
        bins[best].append(expert)
        total[best] += loads[expert]
        if len(bins[best]) == room:
            open_bins.remove(best)
    return bins


def lower_bound(loads: Sequence[float], num_devices: int, slots: int | None = None) -> float:
    """A lower bound of the largest device load, in any placement without copies.

    The largest of: the mean of the devices; the hottest expert with the lightest of those that must be beside it
    because the other devices are full; for each k, the k + 1 lightest of the ``k * num_devices + 1`` hottest experts,
    since some device has as many of these. There need not be a placement that reaches it.

    Raises:
        ValueError: no placement is possible.
    """
    loads = checked_loads(loads)
    slots = checked_shape(len(loads), num_devices, slots)
    falling = sorted(loads, reverse=True)
    sums = [0.0, *accumulate(falling)]
    beside = len(loads) - (num_devices - 1) * slots - 1
    crowd = max(0, (len(loads) - 1) // num_devices)
    return max(
        sums[-1] / num_devices,
        falling[0] + (fsum(falling[-beside:]) if beside > 0 else 0.0),
        *(fsum(falling[k * (num_devices - 1) : k * num_devices + 1]) for k in range(1, crowd + 1)),
    )
