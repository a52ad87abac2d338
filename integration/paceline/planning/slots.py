"""Slots of devices: how many experts have room, which devices are one node, and which slot an expert gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .experts import Placement


def checked_shape(num_experts: int, num_devices: int, slots: int | None, nodes: int = 1) -> int:
    """``slots``, by default the fewest that hold all experts.

    Raises:
        ValueError: there is too little room, or the devices are not ``nodes`` groups of the same size.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices is {num_devices}: give 1 or more.")
    fewest = -(-num_experts // num_devices)
    slots = fewest if slots is None else slots
    if slots < fewest:
        raise ValueError(
            f"{num_devices} devices with {slots} slots each have no room for {num_experts} experts: give {fewest} "
            "slots or more, or more devices."
        )
    if nodes < 1 or num_devices % nodes:
        raise ValueError(f"{num_devices} devices are not {nodes} nodes of the same size: give a divisor of them.")
    return slots


def check_current(current: Placement | None, num_experts: int, num_devices: int) -> None:
    """Raises ValueError unless ``current`` is None or of so many experts and devices."""
    if current is not None and (current.num_experts, current.num_devices) != (num_experts, num_devices):
        raise ValueError(
            f"the current placement is of {current.num_experts} experts on {current.num_devices} devices, and asked "
            f"for are {num_experts} on {num_devices}: give the one that these devices run, or none."
        )


def in_slots(
    owned: Sequence[Collection[int]], copied: Sequence[Collection[int]], current: Placement | None
) -> Placement:
    """The placement in which an expert that ``current`` has on a device in the same role keeps its slot.

    Those that arrive fill the free slots by number. Only if fewer experts are left do some move up to fill holes.

    Args:
        owned, copied: of each device, the experts that it owns and the others that it holds, in any order.
    """
    devices, numbers = [], []
    for device, (own, others) in enumerate(zip(owned, copied, strict=True)):
        before = () if current is None else current.devices[device]
        border = 0 if current is None else current.owned[device]
        devices.append((*_kept(before[:border], own), *_kept(before[border:], others)))
        numbers.append(len(own))
    return Placement(tuple(devices), tuple(numbers))


def _kept(before: Sequence[int], now: Collection[int]) -> list[int]:
    """``now``, what was ``before`` in its slot as far as there are so many."""
    stay = set(now).intersection(before)
    kept = {slot: expert for slot, expert in enumerate(before[: len(now)]) if expert in stay}
    pushed = [expert for expert in before[len(now) :] if expert in stay]
    rest = iter([*pushed, *sorted(set(now) - stay)])
    return [kept[slot] if slot in kept else next(rest) for slot in range(len(now))]
