"""Split the tokens of experts over their copies, so that the largest device load is least."""

from __future__ import annotations

from collections.abc import Sequence

from .experts import Placement, checked_loads, slowness_of

ROUNDING = 1e-9
"""The smallest tolerance: what is closer to the best split may be rounding."""


def split(
    placement: Placement,
    loads: Sequence[float],
    *,
    tolerance: float = 1e-3,
    speeds: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Shares of each expert's load that its ``placement.copies`` take; they sum to 1.

    Load flows from devices above a target to devices below it, from copy to copy, along shortest paths. Where it
    cannot, the devices that can be reached hold nothing that could be elsewhere: no split gives the most loaded of
    them less than their mean, which becomes the target. The first target is the mean of all devices, so that the last
    one is the smallest maximum there is.

    Args:
        loads: of each expert, in any unit.
        tolerance: how far the most loaded device may be above the smallest maximum, relatively.
        speeds: of each device, in any unit, by which its load is divided; None: equal.

    Raises:
        ValueError: the number of loads is not that of the experts, or one is none.
    """
    loads = checked_loads(loads, placement.num_experts)
    if peak := max(
        loads
    ):  # in parts of the largest: nothing is too small to be divided, and what is next to it is none
        loads = [load / peak if load > peak * 1e-200 else 0.0 for load in loads]
    copies = placement.copies
    parts = [[load / len(holders)] * len(holders) for load, holders in zip(loads, copies, strict=True)]
    slowness = slowness_of(speeds, placement.num_devices)
    total = [0.0] * placement.num_devices
    # By device: the experts that can give part of their load to other devices, with their place in copies.
    shared: list[list[tuple[int, int]]] = [[] for _ in total]
    for expert, (amounts, holders) in enumerate(zip(parts, copies, strict=True)):
        for place, device in enumerate(holders):
            total[device] += amounts[place] * slowness[device]
            if len(holders) > 1 and loads[expert]:
                shared[device].append((expert, place))
    target = sum(loads) / len(total)
    least = target * 1e-12  # what is less is rounding
    while total[hottest := max(range(len(total)), key=total.__getitem__)] > target * (1 + max(tolerance, ROUNDING)):
        came, sink = _path(hottest, copies, shared, parts, total, target - least, least)
        if sink is None:
            target = sum(total[device] / slowness[device] for device in came) / sum(1 / slowness[d] for d in came)
            continue
        steps = []
        device = sink
        while (step := came[device]) is not None:
            steps.append(step)
            device = copies[step[0]][step[1]]
        most = min((total[hottest] - target) / slowness[hottest], (target - total[sink]) / slowness[sink])
        flow = min(most, *(parts[expert][place] for expert, place, _ in steps))
        for expert, place, other in steps:
            parts[expert][place] -= flow
            parts[expert][other] += flow
        total[hottest] -= flow * slowness[hottest]
        total[sink] += flow * slowness[sink]
    return tuple(
        tuple(amount / load for amount in amounts) if load else (1 / len(amounts),) * len(amounts)
        for load, amounts in zip(loads, parts, strict=True)
    )


def _path(
    start: int,
    copies: Sequence[Sequence[int]],
    shared: Sequence[Sequence[tuple[int, int]]],
    parts: Sequence[Sequence[float]],
    total: Sequence[float],
    below: float,
    least: float,
) -> tuple[dict[int, tuple[int, int, int] | None], int | None]:
    """The nearest device with less than ``below`` that load of ``start`` can be passed on to; None: there is none.

    With it, of each device that was reached, by what step: of which expert, from which and to which of its copies.
    """
    came: dict[int, tuple[int, int, int] | None] = {start: None}
    queue = [start]
    for device in queue:
        for expert, place in shared[device]:
            if parts[expert][place] <= least:
                continue
            for other, holder in enumerate(copies[expert]):
                if holder not in came:
                    came[holder] = (expert, place, other)
                    if total[holder] < below:
                        return came, holder
                    queue.append(holder)
    return came, None
