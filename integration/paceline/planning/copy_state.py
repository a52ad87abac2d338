"""The experts of each device, owned and copied, and its load under even splitting.

What a search changes; the search itself is in ``copy_search.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

Saved = tuple[list[set[int]], list[set[int]], list[int | None], list[int], list[float], list[float]]


class CopyState:
    """Which devices hold each expert, which of them owns it, and each device's load under even splitting.

    Owners follow from who holds what: experts and devices are matched along augmenting paths.

    Args:
        loads: of each expert.
        slots: experts that a device may own.
        replicas: other experts that it may hold.
        owners: of each expert, if they may not change; None: they may.
        slowness: of each device, by which its load counts (:func:`~paceline.planning.experts.slowness_of`).
    """

    def __init__(
        self,
        loads: Sequence[float],
        slowness: Sequence[float],
        slots: int,
        replicas: int,
        owners: Sequence[int] | None = None,
    ) -> None:
        num_devices = len(slowness)
        self.slowness, self.are_equal = slowness, len(set(slowness)) == 1
        self.loads, self.slots, self.replicas = loads, slots, replicas
        self.fixed = owners is not None
        self.held: list[set[int]] = [set() for _ in range(num_devices)]
        self.holders: list[set[int]] = [set() for _ in loads]
        self.owner: list[int | None] = [None] * len(loads)
        self.num_owned = [0] * num_devices
        self.total = [0.0] * num_devices
        self.share = list(loads)
        self._changes: list[tuple[int, int, bool]] = []
        for expert, device in enumerate(owners or ()):
            self._add(expert, device)
            self._own(expert, device)

    def load(self, held: Sequence[Sequence[int]], owners: Sequence[int | None]) -> None:
        """Start from a placement, as far as there is room for it; :meth:`match` does the rest."""
        for expert, owner in enumerate(owners):
            if owner is not None and self.owner[expert] is None and self.num_owned[owner] < self.slots:
                self._add(expert, owner)
                self._own(expert, owner)
        for device, experts in enumerate(held):
            for expert in experts:
                if device not in self.holders[expert] and self._num_copies(device) < self.replicas:
                    self._add(expert, device)

    def match(self) -> None:
        """Find every expert an owner: as things are, else by an exchange, else in the place of a copy."""
        orphans = [expert for expert, owner in enumerate(self.owner) if owner is None]
        orphans = [expert for expert in orphans if not self._find_owner(expert)]
        for expert in orphans:
            if not self._find_owner(expert) and not self._exchange_for_owner(expert):
                device = self._soonest(self._with_room_to_own(), self.total, self.loads[expert])
                if not self._has_room(device):
                    self._remove(self._least_copy(device), device)
                self._add(expert, device)
                self._own(expert, device)
        for device in range(len(self.held)):
            while self._num_copies(device) > self.replicas:
                self._remove(self._least_copy(device), device)

    def fill(self) -> None:
        """Use the places that are left, for the experts with the most load a copy, unless the most loaded gets more."""
        most = max(self.total)
        for device in sorted(range(len(self.total)), key=self.total.__getitem__):
            while self._num_copies(device) < self.replicas:
                fitting = [
                    expert
                    for expert, holders in enumerate(self.holders)
                    if self.loads[expert]
                    and device not in holders
                    and self.total[device] + self.loads[expert] / (len(holders) + 1) * self.slowness[device] <= most
                ]
                if not fitting:
                    break
                self._add(max(fitting, key=self.share.__getitem__), device)

    def renumber(self, numbers: Sequence[int]) -> None:
        """Give each device another number."""
        back = sorted(range(len(numbers)), key=numbers.__getitem__)
        self.held = [self.held[device] for device in back]
        self.num_owned = [self.num_owned[device] for device in back]
        self.total = [self.total[device] for device in back]
        self.holders = [{numbers[device] for device in holders} for holders in self.holders]
        self.owner = [None if device is None else numbers[device] for device in self.owner]

    def prefer(self, owners: Sequence[int | None]) -> None:
        """Let experts belong to ``owners`` as far as these hold them, every expert finds an owner, and copies fit."""
        before = self.owner, self.num_owned
        self.owner, self.num_owned = [None] * len(self.owner), [0] * len(self.num_owned)
        for expert, device in enumerate(owners):
            if device is not None and device in self.holders[expert] and self.num_owned[device] < self.slots:
                self._own(expert, device)
        found = all(owner is not None or self._find_owner(expert) for expert, owner in enumerate(list(self.owner)))
        if not found or any(self._num_copies(device) > self.replicas for device in range(len(self.held))):
            self.owner, self.num_owned = before

    def _saved(self) -> Saved:
        return (
            [set(experts) for experts in self.held],
            [set(devices) for devices in self.holders],
            list(self.owner),
            list(self.num_owned),
            list(self.total),
            list(self.share),
        )

    def _step(self, device: int, gives: int | None, takes: int | None) -> None:
        if gives is not None:
            self._remove(gives, device)
        if takes is not None:
            self._add(takes, device)

    def _add(self, expert: int, device: int) -> None:
        old, holders = self.share[expert], self.holders[expert]
        new = self.loads[expert] / (len(holders) + 1)
        for holder in holders:
            self.total[holder] += (new - old) * self.slowness[holder]
        self.total[device] += new * self.slowness[device]
        self._changes.append((expert, device, True))
        holders.add(device)
        self.held[device].add(expert)
        self.share[expert] = new

    def _remove(self, expert: int, device: int) -> None:
        """The owner may be none afterwards."""
        old, holders = self.share[expert], self.holders[expert]
        self._changes.append((expert, device, False))
        holders.remove(device)
        self.held[device].remove(expert)
        new = self.loads[expert] / max(1, len(holders))
        for holder in holders:
            self.total[holder] += (new - old) * self.slowness[holder]
        self.total[device] -= old * self.slowness[device]
        self.share[expert] = new
        if self.owner[expert] == device:
            self.owner[expert] = None
            self.num_owned[device] -= 1

    def _own(self, expert: int, device: int) -> None:
        self.owner[expert] = device
        self.num_owned[device] += 1

    def _find_owner(self, expert: int) -> bool:
        """An owner for an expert that has none, if need be by passing others on to their other holders."""
        came, last = self._chain(expert)
        if last is None:
            return False
        self.num_owned[last] += 1
        step: int | None = last
        while step is not None:
            previous, passed = came[step]
            self.owner[passed] = step
            step = previous
        return True

    def _chain(self, expert: int) -> tuple[dict[int, tuple[int | None, int]], int | None]:
        """The nearest device that may own one more, from a holder of the expert on; None: there is none.

        With it, of each device that was reached, which one comes before it and what that one would pass on to it.
        """
        came: dict[int, tuple[int | None, int]] = dict.fromkeys(sorted(self.holders[expert]), (None, expert))
        queue = list(came)
        for device in queue:
            if self.num_owned[device] < self.slots:
                return came, device
            for passed in self.held[device]:
                if self.owner[passed] == device:
                    for holder in self.holders[passed] - came.keys():
                        came[holder] = (device, passed)
                        queue.append(holder)
        return came, None

    def _exchange_for_owner(self, expert: int) -> bool:
        """An owner for an expert that finds none, by an exchange of experts between two devices, if there is such.

        One comes from a device that would own too much, to one that may own it and gives a copy for it.
        """
        full = self._chain(expert)[0]
        best: tuple[float, int, int, int, int] | None = None
        for device in self._with_room_to_own():
            copies = [copy for copy in self.held[device] if self.owner[copy] not in (device, None)]
            for other in full:
                for passed in self.held[other] - self.held[device]:
                    if self.owner[passed] != other:
                        continue
                    for copy in copies:
                        if copy in self.held[other]:
                            continue
                        more = self.share[passed] - self.share[copy]
                        value = max(
                            self.total[device] + more * self.slowness[device],
                            self.total[other] - more * self.slowness[other],
                        )
                        if best is None or value < best[0]:
                            best = value, device, other, passed, copy
        if best is None:
            return False
        _, device, other, passed, copy = best
        self._step(other, passed, copy)
        self._step(device, copy, passed)
        self._own(passed, device)
        return self._find_owner(expert)

    def _soonest(self, devices: Sequence[int], total: Sequence[float], load: float) -> int:
        """The device with the least of ``total``; where they differ in speed, with ``load`` in addition."""
        if self.are_equal:
            return min(devices, key=total.__getitem__)
        return min(devices, key=lambda device: total[device] + load * self.slowness[device])

    def _with_room_to_own(self) -> list[int]:
        return [device for device, number in enumerate(self.num_owned) if number < self.slots]

    def _may_leave(self, expert: int, device: int) -> bool:
        return not self.fixed or self.owner[expert] != device

    def _has_room(self, device: int) -> bool:
        owned = self.num_owned[device] if self.fixed else self.slots
        return len(self.held[device]) < owned + self.replicas

    def _num_copies(self, device: int) -> int:
        return len(self.held[device]) - self.num_owned[device]

    def _least_copy(self, device: int) -> int:
        copies = (expert for expert in sorted(self.held[device]) if self.owner[expert] not in (device, None))
        return min(copies, key=self.share.__getitem__)
