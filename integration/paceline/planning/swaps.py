"""Fewer moves: experts change places from where they are, until no exchange makes the most loaded device lighter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .experts import Placement, checked_loads, slowness_of
from .slots import check_current, checked_shape, in_slots

GOOD_ENOUGH = 0.002
"""Exchanges that gain less of the largest load together than this are not worth their moves."""


class _Exchange(NamedTuple):
    """An expert of the most loaded device for one of another device, or for a free slot there (-1)."""

    largest: float
    expert: int
    device: int
    other: int


def swapped(
    loads: Sequence[float],
    current: Placement,
    slots: int | None = None,
    *,
    nodes: int = 1,
    speeds: Sequence[float] | None = None,
) -> Placement:
    """Exchange experts of the most loaded device for lighter ones, the best exchange first, as long as that helps.

    Of all states on the way the earliest is taken that is nearly as even as the last. Copies are not looked at.

    Args:
        loads: of each expert, in any unit.
        slots: experts that a device has room for; None: as few as hold all.
        nodes: groups of neighbouring devices, of equal size: experts stay in theirs.
        speeds: of each device, in any unit; None: equal.

    Raises:
        ValueError: no placement is possible, or ``current`` or ``speeds`` is not of these experts and devices.
    """
    loads = checked_loads(loads)
    num_devices = current.num_devices
    check_current(current, len(loads), num_devices)
    slots = checked_shape(len(loads), num_devices, slots, nodes)
    owned = [list(experts[:count]) for experts, count in zip(current.devices, current.owned, strict=True)]
    slowness = slowness_of(speeds, num_devices)
    total = [sum(loads[expert] for expert in own) * slow for own, slow in zip(owned, slowness, strict=True)]
    states = [(max(total), [tuple(own) for own in owned])]
    for _ in range(len(loads)):
        device = max(range(num_devices), key=total.__getitem__)
        best = min(_exchanges(loads, owned, total, slowness, device, slots, num_devices // nodes), default=None)
        if best is None:
            break
        owned[device].remove(best.expert)
        owned[best.device].append(best.expert)
        change = loads[best.expert]
        if best.other >= 0:
            owned[best.device].remove(best.other)
            owned[device].append(best.other)
            change -= loads[best.other]
        total[device] -= change * slowness[device]
        total[best.device] += change * slowness[best.device]
        states.append((max(total), [tuple(own) for own in owned]))
    least = min(largest for largest, _ in states)
    found = next(own for largest, own in states if largest <= least * (1 + GOOD_ENOUGH))
    return in_slots(found, [()] * num_devices, current)


def _exchanges(
    loads: Sequence[float],
    owned: Sequence[Sequence[int]],
    total: Sequence[float],
    slowness: Sequence[float],
    device: int,
    slots: int,
    per_node: int,
) -> Iterator[_Exchange]:
    """Exchanges after which ``device`` has less, and the other device less than ``device`` had."""
    first = device // per_node * per_node
    for other in range(first, first + per_node):
        if other == device:
            continue
        partners = [*owned[other], *([-1] if len(owned[other]) < slots else [])]
        for expert in owned[device]:
            for partner in partners:
                change = loads[expert] - (loads[partner] if partner >= 0 else 0.0)
                largest = max(total[device] - change * slowness[device], total[other] + change * slowness[other])
                if change > 0 and largest < total[device]:
                    yield _Exchange(largest, expert, other, partner)
