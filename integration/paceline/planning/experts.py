"""Placements of experts: which device holds which experts, in which slot, and the cost of a given placement.

The device that *owns* an expert keeps its optimizer state; what other devices hold of it are copies, which take part of
its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import fsum, inf
from typing import Any


@dataclass(frozen=True)
class Placement:
    """Which experts each device holds, in slot order: first those that it owns, then copies of others.

    Args:
        devices: of each device, the experts of its slots in order. An expert may be on several devices, and once on
            one. A device may hold none.
        owned: of each device, how many of its first experts it owns. Each expert has one owner. Left out, an expert
            that is on several devices belongs to the one that has it in the earliest slot, of several the first.

    Raises:
        ValueError: an expert is missing, is twice on a device, or has not one owner.

    Example:
        >>> Placement(devices=((0, 1, 2), (2, 3)))
        Placement(devices=((0, 1, 2), (2, 3)), owned=(2, 2))
    """

    devices: tuple[tuple[int, ...], ...]
    owned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(map(tuple, self.devices)))
        _check_devices(self.devices)
        object.__setattr__(self, "owned", tuple(self.owned) or _first_holders(self.devices))
        _check_owned(self.devices, self.owned)

    @classmethod
    def contiguous(cls, num_experts: int, num_devices: int) -> Placement:
        """Blocks of neighbouring experts; their sizes differ by at most one, and earlier devices have the larger ones.

        Raises:
            ValueError: there is no expert or no device.
        """
        for name, number in (("num_experts", num_experts), ("num_devices", num_devices)):
            if number < 1:
                raise ValueError(f"{name} is {number}: give 1 or more.")
        size, larger = divmod(num_experts, num_devices)
        starts = [device * size + min(device, larger) for device in range(num_devices + 1)]
        return cls(tuple(tuple(range(starts[device], starts[device + 1])) for device in range(num_devices)))

    @classmethod
    def from_json(cls, value: Any) -> Placement:
        """The placement that :meth:`to_json` gave; rows alone, as files once had them, are of devices that own alike.

        Raises:
            ValueError: it is none.
        """
        if isinstance(value, Mapping):
            return cls(tuple(map(tuple, value.get("placement", ()))), tuple(value.get("owned", ())))
        devices = tuple(map(tuple, value))
        num_experts = len({expert for held in devices for expert in held})
        return cls(devices, (num_experts // max(1, len(devices)),) * len(devices))

    def to_json(self) -> dict[str, list[Any]]:
        """``placement``, a row of experts for each device, and ``owned``, how many of a row, the first, are its own."""
        return {"placement": [list(held) for held in self.devices], "owned": list(self.owned)}

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def own_experts(self, device: int) -> tuple[int, ...]:
        """Experts that a device owns, in the order of its slots."""
        return self.devices[device][: self.owned[device]]

    @cached_property
    def num_experts(self) -> int:
        return sum(self.owned)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The device that owns each expert."""
        owner_of = {
            expert: device
            for device, (experts, owned) in enumerate(zip(self.devices, self.owned, strict=True))
            for expert in experts[:owned]
        }
        return tuple(owner_of[expert] for expert in range(len(owner_of)))

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The devices that hold each expert: its owner, then the others by number."""
        holders: list[list[int]] = [[owner] for owner in self.owners]
        for device, (experts, owned) in enumerate(zip(self.devices, self.owned, strict=True)):
            for expert in experts[owned:]:
                holders[expert].append(device)
        return tuple(map(tuple, holders))


def device_loads(
    placement: Placement,
    loads: Sequence[float],
    shares: Sequence[Sequence[float]] | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The load of each device: where devices differ, over its speed, so that they compare.

    Args:
        loads: of each expert.
        shares: of each expert, the part of its load on each of ``placement.copies``; None: even.
        speeds: of each device, in any unit; None: equal.

    Raises:
        ValueError: the numbers of loads, shares or speeds are not those of the placement, or a load or a speed is none.
    """
    slowness = slowness_of(speeds, placement.num_devices)
    loads = checked_loads(loads, placement.num_experts)
    on_device: list[list[float]] = [[] for _ in placement.devices]
    if shares is None:
        for load, holders in zip(loads, placement.copies, strict=True):
            for device in holders:
                on_device[device].append(load / len(holders))
    else:
        if list(map(len, shares)) != list(map(len, placement.copies)):
            raise ValueError("shares do not fit the placement: give one number for each copy of each expert.")
        for load, holders, parts in zip(loads, placement.copies, shares, strict=True):
            for device, part in zip(holders, parts, strict=True):
                on_device[device].append(load * part)
    return tuple(fsum(each) * slow for each, slow in zip(on_device, slowness, strict=True))


def imbalance(
    placement: Placement,
    loads: Sequence[float],
    shares: Sequence[Sequence[float]] | None = None,
    speeds: Sequence[float] | None = None,
) -> float:
    """The load of the most loaded device over what each would have if all had the same; 1.0 if there is no load.

    Args and errors as of :func:`device_loads`.
    """
    on_device = device_loads(placement, loads, shares, speeds)
    mean = fsum(on_device if speeds is None else loads) / len(on_device)
    return max(on_device) / mean if mean else 1.0


def moved(old: Placement, new: Placement) -> int:
    """Number of experts that come to a device that did not hold them.

    Raises:
        ValueError: the placements are not of the same experts.
    """
    if old.num_experts != new.num_experts:
        raise ValueError(
            f"the placements are of {old.num_experts} and {new.num_experts} experts: give two of the same experts."
        )
    return sum(not set(after) <= set(before) for before, after in zip(old.copies, new.copies, strict=True))


def slowness_of(speeds: Sequence[float] | None, num_devices: int) -> list[float]:
    """How many times as long as on a device of mean speed a token takes on each; 1.0 where all are equal.

    Raises:
        ValueError: there are not ``num_devices`` speeds, or one is not a finite number above 0.
    """
    if speeds is None:
        return [1.0] * num_devices
    if len(speeds) != num_devices:
        raise ValueError(f"there are {len(speeds)} speeds for {num_devices} devices: give one for each.")
    for device, speed in enumerate(speeds):
        if not 0 < speed < inf:
            raise ValueError(f"the speed of device {device} is {speed}: give a finite number above 0.")
    mean = fsum(speeds) / num_devices
    return [mean / speed for speed in speeds]


def checked_loads(loads: Sequence[float], num_experts: int | None = None) -> list[float]:
    """``loads`` as floats.

    Raises:
        ValueError: there are none, or not ``num_experts``, or one (or their sum) is not a finite number from 0 upwards.
    """
    if not len(loads):
        raise ValueError("there are no loads: give one for each expert, one expert at least.")
    if num_experts is not None and len(loads) != num_experts:
        raise ValueError(f"there are {len(loads)} loads for {num_experts} experts: give one for each.")
    values = []
    for expert, load in enumerate(loads):
        try:
            value = float(load)
        except OverflowError:
            value = inf
        if not 0 <= value < inf:
            raise ValueError(f"the load of expert {expert} is {value}: give a finite number from 0 upwards.")
        values.append(value)
    if not sum(values) < inf:
        raise ValueError("the sum of the loads is not finite: give them in a larger unit.")
    return values


def _check_devices(devices: tuple[tuple[int, ...], ...]) -> None:
    if not devices:
        raise ValueError("the placement has no devices: give one at least.")
    held: set[int] = set()
    for device, experts in enumerate(devices):
        here: set[int] = set()
        for expert in experts:
            if isinstance(expert, bool) or not isinstance(expert, int) or expert < 0:
                raise ValueError(f"device {device} holds {expert!r}: experts are whole numbers from 0.")
            if expert in here:
                raise ValueError(f"device {device} holds expert {expert} twice: one copy there does the same.")
            here.add(expert)
        held |= here
    if not held:
        raise ValueError("the placement has no experts: give one at least.")
    missing = next(expert for expert in count() if expert not in held)
    if missing != len(held):
        raise ValueError(f"no device holds expert {missing}: experts are numbered from 0 without gaps, to {max(held)}.")


def _first_holders(devices: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Number of experts that each device owns: those that no other device has in an earlier slot, or in the same
    slot with a lower number."""
    first: dict[int, tuple[int, int]] = {}
    for device, experts in enumerate(devices):
        for slot, expert in enumerate(experts):
            first[expert] = min((slot, device), first.get(expert, (slot, device)))
    owners = [device for _, device in first.values()]
    return tuple(map(owners.count, range(len(devices))))


def _check_owned(devices: tuple[tuple[int, ...], ...], owned: tuple[int, ...]) -> None:
    if len(owned) != len(devices):
        raise ValueError(f"owned has {len(owned)} numbers for {len(devices)} devices: give one for each.")
    owner_of: dict[int, int] = {}
    for device, (experts, number) in enumerate(zip(devices, owned, strict=True)):
        if not 0 <= number <= len(experts):
            raise ValueError(f"owned[{device}] is {number}: device {device} holds {len(experts)} experts.")
        for expert in experts[:number]:
            if expert in owner_of:
                raise ValueError(
                    f"expert {expert} belongs to device {owner_of[expert]} and to device {device}: on each device put "
                    "the experts that it owns first, each with one owner, and copies of others after them."
                )
            owner_of[expert] = device
    orphan = next((expert for experts in devices for expert in experts if expert not in owner_of), None)
    if orphan is not None:
        raise ValueError(
            f"expert {orphan} belongs to no device: on each device put the experts that it owns first, each with one "
            "owner, and copies of others after them."
        )
