"""Copies of experts: which ones, and on which devices, so that the most loaded device has little load.

A placement without copies is never better than its hottest expert; with copies it is. Each device owns up to ``slots``
experts and holds up to ``replicas`` copies of experts that others own. The load of an expert is split evenly over its
owner and its copies here; ``splitting.py`` splits the load of a given placement better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .copy_search import CopySearch
from .experts import Placement, checked_loads, slowness_of
from .slots import check_current, checked_shape, in_slots

TOLERANCE = 0.01
"""Placements whose most loaded devices differ by less are equally good: loads change by more between rebalancings."""

ROUNDING = 1e-12
"""Loads this close (relatively) are equal."""

BOTH_IMPROVED = 1 << 16
"""Most experts times devices with which the two best starts are improved; beyond, only the best one (a minute)."""


def replicated(
    loads: Sequence[float],
    num_devices: int,
    slots: int | None,
    replicas: int,
    current: Placement | None = None,
    *,
    keep_owners: bool = False,
    nodes: int = 1,
    speeds: Sequence[float] | None = None,
    tolerance: float = TOLERANCE,
) -> Placement:
    """A placement with copies whose most loaded device has little load under even splitting: a good one, not the best.

    It starts with copies of the experts that have the most load a copy, packed by falling load, once owners and copies
    together and once owners first; with greedy's placement, without copies; and with ``current``. It takes the best
    that local search makes of them. Among devices that could change their roles, each keeps what it has.

    A place for a copy stays empty where a copy would be of no use: no expert with load is elsewhere and light enough.

    Args:
        loads: of each expert, in any unit.
        slots: experts that a device has room to own; None: as few as hold all.
        replicas: copies of others' experts that a device has room for.
        current: what the devices hold now; experts that stay keep their slots.
        keep_owners: only copies change, which is cheap, since the optimizer's state stays where it is.
        nodes: groups of neighbouring devices, of equal size: experts are dealt to them first, then to the devices of
            each, and copies stay in the node of their owner.
        speeds: of each device, in any unit; None: equal.
        tolerance: the search ends when the most loaded device is so close to the mean, relatively, and a placement that
            has nothing to do with ``current`` must be better than it by this; 0: look for the best whatever moves.

    Raises:
        ValueError: no placement is possible, or ``current`` or ``speeds`` is not of these experts and devices.
    """
    loads = checked_loads(loads)
    slowness = slowness_of(speeds, num_devices)
    slots = checked_shape(len(loads), num_devices, slots, nodes)
    check_current(current, len(loads), num_devices)
    if replicas < 0:
        raise ValueError(f"replicas is {replicas}: give 0 or more places for copies.")
    if keep_owners and (current is None or max(current.owned) > slots):
        raise ValueError(f"keep_owners needs a current placement whose devices own at most {slots} experts: give one.")
    per_node = num_devices // nodes
    homes: list[int | None] = [None] * len(loads) if current is None else list(current.owners)
    node_of = [None if device is None else device // per_node for device in homes]
    if nodes > 1 and not keep_owners:
        held = [[expert for expert, node in enumerate(node_of) if node == number] for number in range(nodes)]
        of_nodes = [slowness[first : first + per_node] for first in range(0, num_devices, per_node)]
        slow_nodes = [per_node / sum(1 / slow for slow in own) for own in of_nodes]
        node_of = _searched(loads, slow_nodes, slots * per_node, 0, held, node_of, False, tolerance).owner
    owned: list[list[int]] = []
    copied: list[list[int]] = []
    for node in range(nodes):
        members = [expert for expert in range(len(loads)) if nodes == 1 or node_of[expert] == node]
        local = {expert: index for index, expert in enumerate(members)}
        devices = range(node * per_node, (node + 1) * per_node)
        held = [
            [local[expert] for expert in ([] if current is None else current.devices[device]) if expert in local]
            for device in devices
        ]
        places = {device: index for index, device in enumerate(devices)}
        home = [None if (device := homes[expert]) is None else places.get(device) for expert in members]
        slow = [slowness[device] for device in devices]
        found = _searched([loads[e] for e in members], slow, slots, replicas, held, home, keep_owners, tolerance)
        for device, experts in enumerate(found.held):
            owned.append([members[index] for index in experts if found.owner[index] == device])
            copies = [members[index] for index in experts if found.owner[index] != device]
            # Where all loads are 0, packing has nothing else to fill places with.
            copied.append([expert for expert in copies if loads[expert] or current is not None])
    return in_slots(owned, copied, current)


def _searched(
    loads: Sequence[float],
    slowness: Sequence[float],
    slots: int,
    replicas: int,
    held: Sequence[Sequence[int]],
    homes: Sequence[int | None],
    keep_owners: bool,
    tolerance: float,
) -> CopySearch:
    """Experts and devices by number; ``homes`` are the owners now, None where they are not one of the devices."""
    fixed = [device for device in homes if device is not None] if keep_owners else None
    found = None
    if any(held):
        found = CopySearch(loads, slowness, slots, replicas, fixed)
        found.load(held, homes)
        found.match()
        found.improve(tolerance)
    if found is None or not found.is_even(tolerance):
        fresh = _searched_anew(loads, slowness, slots, replicas, fixed, tolerance)
        if found is None or max(fresh.total) < max(found.total) * (1 - max(tolerance, ROUNDING)):
            found = fresh
            if not keep_owners and found.are_equal:  # none can stand in for one of another speed
                found.renumber(_numbers(found, held, homes))
    found.fill()
    if not keep_owners:
        found.prefer(homes)
    return found


def _searched_anew(
    loads: Sequence[float],
    slowness: Sequence[float],
    slots: int,
    replicas: int,
    fixed: Sequence[int] | None,
    tolerance: float,
) -> CopySearch:
    """The best that comes of several starts: none of them is better than it."""
    starts = []
    for start in (CopySearch.pack, CopySearch.pack_owners, CopySearch.deal):
        search = CopySearch(loads, slowness, slots, replicas, fixed)
        start(search)
        search.match()
        starts.append(search)
    starts.sort(key=lambda search: max(search.total))
    for search in starts[: 2 if len(loads) * len(slowness) <= BOTH_IMPROVED else 1]:
        search.improve(tolerance)
        if search.is_even(tolerance):
            return search
    return min(starts, key=lambda search: max(search.total))


def _numbers(found: CopySearch, held: Sequence[Sequence[int]], homes: Sequence[int | None]) -> list[int]:
    """The number of the device that already has most of what each device of ``found`` needs, in bytes; those first.

    What an owner has is 14 bytes a parameter (value, master, two moments), a copy 2.
    """
    bytes_kept: Counter[tuple[int, int]] = Counter()
    for now, experts in enumerate(held):
        for expert in experts:
            for device in found.holders[expert]:
                bytes_kept[device, now] += 14 if found.owner[expert] == device and homes[expert] == now else 2
    numbers: dict[int, int] = {}
    free = dict.fromkeys(range(len(held)))
    for device, now in sorted(bytes_kept, key=lambda pair: (-bytes_kept[pair], pair)):
        if device not in numbers and now in free:
            numbers[device] = now
            del free[now]
    rest = iter(free)
    return [numbers[device] if device in numbers else next(rest) for device in range(len(held))]
