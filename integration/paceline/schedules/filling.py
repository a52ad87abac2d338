"""Split backwards whose weights' half runs where a rank would idle, found by simulating the step while it is made up.

Two ways to the forwards and the backwards of the inputs: the order of a schedule that is given (:func:`filled`), or
whatever can run (:func:`composed`). The backwards of the weights come between them, in the order in which their inputs'
did, while a rank waits for a message, and where there would be no room for what comes next. (arXiv 2401.10241, section
3, fills idle time by such rules; 2405.15362 shows what they come to with two chunks a rank.)
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol, TypeAlias

from .costs import Costs
from .events import Visits
from .schedule import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    backward_input,
    backward_weight,
    forward,
)

PATIENCE = 0.5
"""Share of a backward of weights for which a rank rather waits than delays what is about to arrive."""

_ROUNDING = 1 + 1e-9
_MAKE: dict[str, Callable[[int, int], Action]] = {
    FORWARD: forward, BACKWARD_INPUT: backward_input, BACKWARD_WEIGHT: backward_weight
}  # fmt: skip


Wanted: TypeAlias = tuple[str, int, int, float, bool]
"""A forward, or a backward of inputs, that a rank would run next: kind, micro-batch, chunk; from when on it may run,
infinite where that is not known yet; and whether what it keeps fits into memory.
"""


class Desk:
    """State of a step under construction, by rank: memory, deferred backwards, and arrivals of inputs by visit."""

    def __init__(self, shape: Schedule, costs: Costs, room_bytes: Sequence[float]) -> None:
        self.shape, self.visits = shape, Visits(shape, costs)
        self.room_bytes = [room * _ROUNDING for room in room_bytes]
        self.held_bytes = [0.0] * shape.num_ranks
        self.deferred: list[deque[tuple[int, int]]] = [deque() for _ in shape.orders]
        self.arrived_s: list[array[Any]] = self.visits.table("d", inf, shape.num_micro_batches)
        self.arrived_s[0][:] = array("d", bytes(8 * shape.num_micro_batches))
        # By kind, rank and chunk: bytes that are kept more, or less, afterwards.
        self.change_bytes = {
            kind: [[of_stage[stage] for stage in stages] for stages in shape.stages]
            for kind, of_stage in costs.kept_bytes.items()
        }

    def begins_s(self, kind: str, rank: int, chunk: int, micro_batch: int) -> float:
        """When an action may begin, if its rank is free: when its input is there, or as much before as needs none."""
        ahead = self.visits.ahead
        arrival_s = self.arrived_s[self.visits.of[kind][rank][chunk]][micro_batch]
        return float(arrival_s - ahead[kind][rank][chunk] if ahead else arrival_s)


class Wishes(Protocol):
    """Where forwards and backwards of inputs come from."""

    def wanted(self, rank: int, now_s: float) -> Wanted | None:
        """What a rank that is free would run; None: all of them have run."""

    def ran(self, rank: int, kind: str, chunk: int) -> None:
        """What was wanted is running now."""


class _Given:
    """The order that another schedule has."""

    def __init__(self, desk: Desk, orders: Sequence[Sequence[Action]]) -> None:
        self._desk = desk
        self._orders = [
            [(FORWARD if kind == FORWARD else BACKWARD_INPUT, m, c) for kind, m, c in order if kind != BACKWARD_WEIGHT]
            for order in orders
        ]
        self._done = [0] * len(orders)

    def wanted(self, rank: int, now_s: float) -> Wanted | None:
        desk, order, done = self._desk, self._orders[rank], self._done[rank]
        if done == len(order):
            return None
        kind, micro_batch, chunk = order[done]
        begins_s = desk.begins_s(kind, rank, chunk, micro_batch)
        has_room = desk.held_bytes[rank] + desk.change_bytes[kind][rank][chunk] <= desk.room_bytes[rank]
        return kind, micro_batch, chunk, begins_s, has_room

    def ran(self, rank: int, kind: str, chunk: int) -> None:
        self._done[rank] += 1


class _Ready:
    """Whatever has arrived: backwards of inputs before forwards, and of each what is nearest to the micro-batch's end.

    A forward leaves room for one of each later chunk of its rank, without which it could not go on.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        num_chunks = desk.shape.num_chunks
        kinds = [(BACKWARD_INPUT, chunk) for chunk in range(num_chunks)]
        kinds += [(FORWARD, chunk) for chunk in reversed(range(num_chunks))]
        # By rank: kind, chunk, and the room that it takes.
        self._ways = [
            [(kind, chunk, self._room(rank, kind, chunk), number) for number, (kind, chunk) in enumerate(kinds)]
            for rank in range(desk.shape.num_ranks)
        ]
        self._ran = [[0] * len(kinds) for _ in self._ways]
        self._left = [len(kinds) * desk.shape.num_micro_batches] * len(self._ways)
        self._number = {key: number for number, key in enumerate(kinds)}

    def _room(self, rank: int, kind: str, chunk: int) -> float:
        change = self._desk.change_bytes[kind][rank]
        return change[chunk] if kind == BACKWARD_INPUT else sum(change[chunk:])

    def wanted(self, rank: int, now_s: float) -> Wanted | None:
        if not self._left[rank]:
            return None
        desk, ran = self._desk, self._ran[rank]
        free_bytes = desk.room_bytes[rank] - desk.held_bytes[rank]
        num_micro_batches = desk.shape.num_micro_batches
        blocked = None
        next_one: Wanted = (FORWARD, -1, 0, inf, True)
        soonest_s = inf
        for kind, chunk, room_bytes, number in self._ways[rank]:
            micro_batch = ran[number]
            if micro_batch == num_micro_batches:
                continue
            begins_s = desk.begins_s(kind, rank, chunk, micro_batch)
            if begins_s > now_s:
                if begins_s < soonest_s:
                    soonest_s = begins_s
                    next_one = kind, micro_batch, chunk, begins_s, True
            elif room_bytes <= free_bytes:
                return kind, micro_batch, chunk, begins_s, True
            elif blocked is None:
                blocked = kind, micro_batch, chunk, begins_s, False
        return blocked if blocked is not None and desk.deferred[rank] else next_one

    def ran(self, rank: int, kind: str, chunk: int) -> None:
        self._ran[rank][self._number[kind, chunk]] += 1
        self._left[rank] -= 1


def filled(schedule: Schedule, costs: Costs, room_bytes: Sequence[float], patience: float = PATIENCE) -> Schedule:
    """The schedule with all backwards split, and those of the weights placed anew.

    Args:
        schedule: any of one direction that can be executed.
        costs: that fit it. Hosts that share what they send are taken for links of their own.
        room_bytes: by rank, what may be kept of micro-batches. Where even weights' backwards at once keep more, that
            stays so.
        patience: see :data:`PATIENCE`.
    """
    shape = _shape(schedule.routes[0] if schedule.routes else (), schedule)
    desk = Desk(shape, costs, room_bytes)
    orders = _run(desk, _Given(desk, schedule.orders), patience)
    assert orders is not None, "a given order can always go on"
    return _with(shape, orders)


def composed(
    route: Sequence[int], num_micro_batches: int, costs: Costs, room_bytes: Sequence[float], patience: float = PATIENCE
) -> Schedule | None:
    """A schedule that runs at every moment what can run; None if there is not enough room to come to an end.

    Args:
        route: rank of each stage.
        num_micro_batches: M.
        costs: of these stages.
        room_bytes: by rank, what may be kept of micro-batches.
        patience: see :data:`PATIENCE`.
    """
    num_ranks = max(route) + 1
    empty = Schedule(((),) * num_ranks, num_micro_batches, len(route) // num_ranks)
    desk = Desk(_shape(route, empty), costs, room_bytes)
    orders = _run(desk, _Ready(desk), patience)
    return None if orders is None else _with(desk.shape, orders)


def _shape(route: Sequence[int], like: Schedule) -> Schedule:
    assert like.num_directions == 1, "directions have no order between their micro-batches"
    return Schedule(
        ((),) * like.num_ranks, like.num_micro_batches, like.num_chunks, routes=(tuple(route),) * bool(route)
    )


def _with(shape: Schedule, orders: list[list[Action]]) -> Schedule:
    plain = tuple(range(shape.num_ranks)) * shape.num_chunks
    routes = () if shape.routes == (plain,) else shape.routes
    return Schedule(tuple(map(tuple, orders)), shape.num_micro_batches, shape.num_chunks, routes=routes)


def _run(desk: Desk, wishes: Wishes, patience: float) -> list[list[Action]] | None:
    """By rank: all actions; None if the ranks wait for each other."""
    visits, arrived_s = desk.visits, desk.arrived_s
    num_ranks, last_visit = desk.shape.num_ranks, visits.num_of_direction - 1
    occupied_s = [s / link.bytes_per_s if link else 0.0 for s, link in zip(visits.num_bytes, visits.link, strict=True)]
    latency_s = [link.latency_s if link else 0.0 for link in visits.link]
    link_free_s = [0.0] * len(visits.rank)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    free_s = [0.0] * num_ranks
    waits = [False] * num_ranks
    is_done = [False] * num_ranks
    events = [(0.0, rank) for rank in range(num_ranks)]
    while events:
        now, rank = heappop(events)
        if now < free_s[rank] or is_done[rank]:
            continue
        deferred, order = desk.deferred[rank], orders[rank]
        wanted = wishes.wanted(rank, now)
        if wanted is None:
            order.extend(backward_weight(*each) for each in deferred)
            is_done[rank] = True
            continue
        kind, micro_batch, chunk, begins_s, has_room = wanted
        if deferred:
            weight_s = visits.seconds[BACKWARD_WEIGHT][rank][deferred[0][1]]
            if not has_room or (begins_s > now and begins_s - now >= patience * weight_s):
                kind, (micro_batch, chunk), begins_s = BACKWARD_WEIGHT, deferred.popleft(), now
        waits[rank] = begins_s > now
        if begins_s > now:
            if begins_s < inf:
                heappush(events, (begins_s, rank))
            continue
        end_s = now + visits.seconds[kind][rank][chunk]
        order.append(_MAKE[kind](micro_batch, chunk))
        desk.held_bytes[rank] += desk.change_bytes[kind][rank][chunk]
        free_s[rank] = end_s
        heappush(events, (end_s, rank))
        if kind == BACKWARD_WEIGHT:
            continue
        wishes.ran(rank, kind, chunk)
        if kind == BACKWARD_INPUT:
            deferred.append((micro_batch, chunk))
        visit = visits.of[kind][rank][chunk]
        if visit < last_visit:
            free = link_free_s[visit]
            link_free_s[visit] = sent_s = (end_s if end_s > free else free) + occupied_s[visit]
            visit += 1
            arrived_s[visit][micro_batch] = sent_s + latency_s[visit - 1]
            target = visits.rank[visit]
            if waits[target]:
                there = FORWARD if visits.is_forward(visit) else BACKWARD_INPUT
                begins_s = desk.begins_s(there, target, visits.chunk[visit], micro_batch)
                heappush(events, (begins_s if begins_s > now else now, target))
    return orders if all(is_done) else None
