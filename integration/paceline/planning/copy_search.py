"""The search behind :func:`~paceline.planning.replicas.replicated`: packing, then moves off the most loaded device."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from .copy_state import CopyState

BETTER = 1e-3
"""Relative decrease of the largest device load from which the search counts a placement as better."""

WORSE = 0.2
"""Relative excess over the largest device load that a move may cause on the way to a better placement."""

PATIENCE = 10
"""Moves without anything better after which the search ends."""

TENURE = 5
"""Moves for which an expert that came to a device stays there, and one that left stays away."""

SHORT_LIST = 12
"""Moves that are looked at more closely before all are."""


class Move(NamedTuple):
    """``gives`` leaves ``device`` and ``takes`` comes to it (None: nothing); ``other``, if any, does the reverse."""

    device: int
    gives: int | None
    takes: int | None
    other: int | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """Each expert with each device on which it is not both before and after."""
        devices = [device for device in (self.device, self.other) if device is not None]
        experts = [expert for expert in (self.gives, self.takes) if expert is not None]
        return [(expert, device) for expert in experts for device in devices]


class CopySearch(CopyState):
    """Packing and moves consider loads only.

    A move that leaves an expert without an owner comes with an exchange that finds it one, or is not made.
    """

    def is_even(self, tolerance: float) -> bool:
        """Whether the most loaded device is within ``tolerance`` of the mean, relatively."""
        return max(self.total) <= self._enough(tolerance)

    def _enough(self, tolerance: float) -> float:
        return sum(self.loads) / sum(1 / slow for slow in self.slowness) * (1 + tolerance)

    def pack(self) -> None:
        """Start with copies of the experts that have the most load a copy; all go, by that load, where there is least.

        :meth:`match` finds the owners.
        """
        devices = range(len(self.held))
        wanted = _wanted_copies(self.loads, len(devices), len(devices) * self.replicas)
        share = [load / number for load, number in zip(self.loads, wanted, strict=True)]
        total = [
            sum(share[expert] for expert in experts) * slow
            for experts, slow in zip(self.held, self.slowness, strict=True)
        ]
        for expert in sorted(range(len(share)), key=lambda expert: -share[expert]):
            while len(self.holders[expert]) < wanted[expert]:
                room = [d for d in devices if self._has_room(d) and d not in self.holders[expert]]
                if not room:
                    break
                device = self._soonest(room, total, share[expert])
                self._add(expert, device)
                total[device] += share[expert] * self.slowness[device]

    def pack_owners(self) -> None:
        """Start with the same copies, and owners first: all owners by falling load a copy, then the copies likewise."""
        devices = range(len(self.held))
        wanted = _wanted_copies(self.loads, len(devices), len(devices) * self.replicas)
        share = [load / number for load, number in zip(self.loads, wanted, strict=True)]
        total = [
            sum(share[expert] for expert in experts) * slow
            for experts, slow in zip(self.held, self.slowness, strict=True)
        ]
        order = sorted(range(len(share)), key=lambda expert: -share[expert])
        for expert in order:
            if self.owner[expert] is None:
                device = self._soonest(self._with_room_to_own(), total, share[expert])
                self._add(expert, device)
                self._own(expert, device)
                total[device] += share[expert] * self.slowness[device]
        for expert in order:
            for _ in range(wanted[expert] - 1):
                room = [d for d in devices if self._num_copies(d) < self.replicas and d not in self.holders[expert]]
                if not room:
                    break
                device = self._soonest(room, total, share[expert])
                self._add(expert, device)
                total[device] += share[expert] * self.slowness[device]

    def deal(self) -> None:
        """Start without copies: experts by falling load, each to the device with the least, as ``greedy`` does."""
        for expert in sorted(range(len(self.loads)), key=lambda expert: -self.loads[expert]):
            if self.owner[expert] is None:
                device = self._soonest(self._with_room_to_own(), self.total, self.loads[expert])
                self._add(expert, device)
                self._own(expert, device)

    def improve(self, tolerance: float) -> None:
        """Tabu search: unload the most loaded device by the best move, again and again, and go back to the best state.

        It ends when the devices are even within ``tolerance``, or nothing better is found.

        The best move may be one that loads another device more, which is then the next to be unloaded: chains of moves
        go where single ones do not. What was moved stays where it is for some moves, so that the chain goes on.
        """
        most, best = max(self.total), self._saved()
        tabu: dict[tuple[int, int], int] = {}
        step = last = 0
        while step - last < PATIENCE and most > self._enough(tolerance):
            step += 1
            now_tabu = {place for place, until in tabu.items() if until >= step}
            if not any(
                self._make(value, move)
                for length in (SHORT_LIST, len(self.loads) * len(self.held))
                for value, move in self._best_moves(length, now_tabu)
            ):
                break
            tabu.update(((expert, device), step + TENURE) for expert, device, _ in self._changes)
            if max(self.total) < most * (1 - BETTER):
                most, best, last = max(self.total), self._saved(), step
        self.held, self.holders, self.owner, self.num_owned, self.total, self.share = best

    def _best_moves(self, length: int, tabu: set[tuple[int, int]]) -> list[tuple[float, Move]]:
        """Moves that unload the most loaded device, the best first.

        The value of a move is the load of the most loaded of the devices that it loads or unloads.
        """
        hot = max(range(len(self.total)), key=self.total.__getitem__)
        others = sorted((device for device in range(len(self.total)) if device != hot), key=self.total.__getitem__)
        best = _ShortList(length, self.total[hot] * (1 + WORSE), tabu)
        self._exchanges(hot, others, best)
        if self.replicas:
            self._new_copies(hot, others, best)
            self._drops(hot, best)
        return best.sorted()

    def _exchanges(self, hot: int, others: Sequence[int], best: _ShortList) -> None:
        """An expert of ``hot`` against one of another device, or against nothing."""
        share, total, slow = self.share, self.total, self.slowness
        here = [expert for expert in self.held[hot] if self._may_leave(expert, hot)]
        for other in others:
            # No exchange makes both of them lighter than their mean; others come by rising load.
            if self.are_equal and (total[hot] + total[other]) / 2 >= best.limit:
                break
            against: list[int | None] = [
                expert for expert in self.held[other] - self.held[hot] if self._may_leave(expert, other)
            ]
            if self._has_room(other):
                against.append(None)
            for gives in here:
                if gives in self.held[other]:
                    continue
                for takes in against:
                    passed = share[gives] - (0.0 if takes is None else share[takes])
                    value = max(total[hot] - passed * slow[hot], total[other] + passed * slow[other])
                    if passed > 0 and value < best.limit:
                        best.offer(value, Move(hot, gives, takes, other))

    def _new_copies(self, hot: int, others: Sequence[int], best: _ShortList) -> None:
        """A copy of an expert of ``hot`` on another device, in a free place or that of one which has other holders."""
        share, total, holders, slow = self.share, self.total, self.holders, self.slowness
        places: list[tuple[int, list[int], float]] = []
        for device in others:
            spare = [
                expert for expert in self.held[device] if len(holders[expert]) > 1 and self._may_leave(expert, device)
            ]
            if spare or self._has_room(device):
                most = max((share[expert] for expert in spare), default=0.0)
                places.append((device, spare, total[device] - most * slow[device]))
        for takes in self.held[hot]:
            new_share = self.loads[takes] / (len(holders[takes]) + 1)
            relief = share[takes] - new_share
            left = total[hot] - relief * slow[hot]
            if left >= best.limit:
                continue
            for device, spare, least in places:
                if least + new_share * slow[device] >= best.limit or device in holders[takes]:
                    continue
                raised = total[device] + new_share * slow[device]
                if raised < best.limit and self._has_room(device):
                    best.offer(max(left, raised), Move(device, None, takes))
                for gives in spare:
                    value = max(left, raised - share[gives] * slow[device])
                    if value >= best.limit:
                        continue
                    more = self.loads[gives] / (len(holders[gives]) - 1) - share[gives]
                    for holder in holders[gives]:
                        if holder != device:
                            change = more - (relief if holder in holders[takes] else 0.0)
                            value = max(value, total[holder] + change * slow[holder])
                    best.offer(value, Move(device, gives, takes))

    def _drops(self, hot: int, best: _ShortList) -> None:
        """An expert of ``hot`` that has other holders, away."""
        for gives in self.held[hot]:
            rest = [holder for holder in self.holders[gives] if holder != hot]
            if rest and self._may_leave(gives, hot):
                more = self.loads[gives] / len(rest) - self.share[gives]
                value = max(
                    self.total[hot] - self.share[gives] * self.slowness[hot],
                    *(self.total[holder] + more * self.slowness[holder] for holder in rest),
                )
                best.offer(value, Move(hot, gives, None))

    def _make(self, value: float, move: Move) -> bool:
        """Whether the move could be made and owners be found; if not, nothing has changed."""
        before = list(self.owner), list(self.num_owned), list(self.total)
        hot = max(range(len(self.total)), key=self.total.__getitem__)
        limit = max(value, self.total[hot]) * (1 + 1e-9)
        self._changes.clear()
        self._step(move.device, move.gives, move.takes)
        if move.other is not None:
            self._step(move.other, move.takes, move.gives)
        orphans = [expert for expert in (move.gives, move.takes) if expert is not None and self.owner[expert] is None]
        if (
            all(self._find_owner(expert) or self._exchange_for_owner(expert) for expert in orphans)
            and all(self._num_copies(device) <= self.replicas for device in range(len(self.held)))
            and self.total[hot] < before[2][hot]
            and max(self.total) <= limit
        ):
            return True
        for expert, device, added in reversed(tuple(self._changes)):
            (self._remove if added else self._add)(expert, device)
        self.owner, self.num_owned, self.total = before
        return False


class _ShortList:
    """The best moves so far, at least ``length`` of them if there are so many.

    Attributes:
        limit: moves with this value or a larger one are of no interest.
    """

    def __init__(self, length: int, limit: float, tabu: set[tuple[int, int]]) -> None:
        self.length, self.limit, self.tabu = length, limit, tabu
        self._moves: list[tuple[float, Move]] = []

    def offer(self, value: float, move: Move) -> None:
        if value < self.limit and self.tabu.isdisjoint(move.places):
            self._moves.append((value, move))
            if len(self._moves) == 2 * self.length:
                self._moves = self.sorted()[: self.length]
                self.limit = self._moves[-1][0]

    def sorted(self) -> list[tuple[float, Move]]:
        return sorted(self._moves, key=lambda found: found[0])


def _wanted_copies(loads: Sequence[float], num_devices: int, num_copies: int) -> list[int]:
    """Number of copies of each expert if each further copy goes to the expert with the most load a copy."""
    wanted = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads) if load]
    heapify(heap)
    while num_copies and heap:
        expert = heap[0][1]
        if wanted[expert] == num_devices:
            heappop(heap)
            continue
        wanted[expert] += 1
        num_copies -= 1
        heapreplace(heap, (-loads[expert] / wanted[expert], expert))
    return wanted
