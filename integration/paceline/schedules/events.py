"""Event replay of a schedule: when the input of every action arrives.

A micro-batch goes down through the forwards of all S stages and up through their backwards: 2S visits, of which each
hands on to the next. Visit v < S is the forward of stage v, the others are the backward of stage 2S−1−v. Every
direction has visits of its own: those of direction j are 2S·j + v. Where a backward is split, its visit is that of the
inputs; that of the weights is no visit: its input is there when its turn comes, and nobody waits for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import chain
from math import inf, isfinite
from typing import Any, NamedTuple

from .costs import Costs, Link
from .dependencies import unit_starts
from .egress import Egress
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule

# Instead of a host's sending side: a message that has only its own link to wait for, and none at all.
_LINK, _NOWHERE = -1, -2


class Visits:
    """What things cost along the way of a micro-batch, one value a visit.

    ``rank`` and ``chunk`` of the action; ``num_bytes`` and ``link`` of the message after it, whose link is None where
    it stays on its rank or where there is none.

    ``of``: by kind of action, rank and chunk: its visit (none for the backward of the weights). ``seconds``: as ``of``:
    what the action takes. ``ahead``: as ``of``: the part of it that runs before the action's input is there; empty:
    none. ``num_of_direction``: visits that one direction has, the last of which hands on nothing.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        num_stages, num_directions = schedule.num_stages, schedule.num_directions
        self.num_of_direction = 2 * num_stages
        self.rank: list[int] = []
        self.chunk: list[int] = []
        for first in range(0, len(schedule.places), num_stages):
            down = schedule.places[first : first + num_stages]
            for rank, chunk in chain(down, reversed(down)):
                self.rank.append(rank)
                self.chunk.append(chunk)
        forward: list[list[int]] = [[-1] * schedule.num_chunks for _ in schedule.orders]
        backward: list[list[int]] = [[-1] * schedule.num_chunks for _ in schedule.orders]
        for visit, (rank, chunk) in enumerate(zip(self.rank, self.chunk, strict=True)):
            (forward if self.is_forward(visit) else backward)[rank][chunk] = visit
        self.of: dict[str, list[list[int]]] = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: backward}
        self.seconds = _on_ranks(costs.seconds, schedule, costs)
        self.ahead = _on_ranks(costs.seconds_ahead, schedule, costs) if any(costs.ahead_s) else {}
        sizes = costs.message_bytes or (0.0,) * (num_stages - 1)
        free = (Link(),) * len(sizes)
        back = [costs.gradient_share * size for size in reversed(sizes)]
        self.num_bytes = [*sizes, 0.0, *back, 0.0] * num_directions
        links = [*(costs.down or free), None, *reversed(costs.up or free), None] * num_directions
        here_and_next = zip(self.rank, [*self.rank[1:], -1], strict=True)
        self.link = [None if here == there else link for link, (here, there) in zip(links, here_and_next, strict=True)]

    def is_forward(self, visit: int) -> bool:
        return visit % self.num_of_direction < self.num_of_direction // 2

    def table(self, typecode: str, value: float, num_micro_batches: int) -> list[array[Any]]:
        """An array of micro-batches for each visit, for what millions of actions need. Directions share theirs: a
        micro-batch takes only one of them.
        """
        rows = [array(typecode, [value]) * num_micro_batches for _ in range(self.num_of_direction)]
        return rows * (len(self.rank) // len(rows))


def _on_ranks(
    seconds: Mapping[str, tuple[float, ...]], schedule: Schedule, costs: Costs
) -> dict[str, list[list[float]]]:
    """By kind, rank and chunk, from what is by kind and stage."""
    return {
        kind: [
            [of_stage[stage] / (costs.speeds[rank] if costs.speeds else 1.0) for stage in stages]
            for rank, stages in enumerate(schedule.stages)
        ]
        for kind, of_stage in seconds.items()
    }


class Replay(NamedTuple):
    """When the input of each action arrived, by visit and micro-batch (negative: there is no such action), and when
    the last action ended.
    """

    arrived_s: list[array[float]]
    end_s: float


def replay(schedule: Schedule, costs: Costs, visits: Visits, phase: float | None = None) -> Replay:
    """Run every rank's actions in order, each as soon as its input is there; sends never hold up compute. What needs no
    input runs before.

    That is one event an action, and one or two more for a message that shares a host's sending side.

    Args:
        schedule: a complete one.
        costs: that fit it.
        visits: of both.
        phase: where in the links' variation the step begins, from 0 to 1, the same for all links: successive messages
            take successive times of it, from the beginning again after its end. None: all take the same.

    Raises:
        ValueError: the schedule cannot be executed.
    """
    num_ranks, num_micro_batches = schedule.num_ranks, schedule.num_micro_batches
    visit_of, seconds_of, ahead_of = visits.of, visits.seconds, visits.ahead
    rank_of, num_bytes = visits.rank, visits.num_bytes
    occupied_s = [size / link.bytes_per_s if link else 0.0 for size, link in zip(num_bytes, visits.link, strict=True)]
    latency_s = [link.latency_s if link else 0.0 for link in visits.link]
    multiples = _multiples(visits, num_micro_batches, phase)
    link_free_s = [0.0] * len(rank_of)
    sides, side_of = _sending_sides(costs, visits)
    arrived_s = visits.table("d", -1.0, num_micro_batches)
    arrived_s[0][:] = array("d", bytes(8 * num_micro_batches))
    # visit · num_micro_batches + micro_batch whose input a rank waits for; −1 while it runs and when it is done.
    waits_for = [-1] * num_ranks
    # When such a rank is free, and what the action takes.
    free_s, needs_s = [0.0] * num_ranks, [0.0] * num_ranks
    remaining = [iter(order) for order in schedule.orders]
    # The end of an action: (time, rank, visit, micro-batch). A message that has left a host: (time, num_ranks + host,
    # version, 0). Every rank begins as if it had just ended something that nobody waits for.
    events = [(0.0, rank, len(rank_of) - 1, 0) for rank in range(num_ranks)]
    end_s = 0.0
    while events:
        now, rank, visit, micro_batch = heappop(events)
        arrival = -1.0
        if rank >= num_ranks:
            side = sides[rank - num_ranks]
            if side.version != visit:
                continue
            visit, micro_batch = side.pop()
            arrival = now + latency_s[visit]
            if side.done_s < inf:
                heappush(events, (side.done_s, rank, side.version, 0))
        else:
            host = side_of[visit]
            if host == _LINK:
                arrival = link_free_s[visit]
                if arrival < now:
                    arrival = now
                taken_s = occupied_s[visit]
                if multiples and multiples[visit]:
                    taken_s *= multiples[visit][micro_batch]
                link_free_s[visit] = arrival = arrival + taken_s
                arrival += latency_s[visit]
            elif host >= 0:
                size = num_bytes[visit]
                if multiples and multiples[visit]:
                    size *= multiples[visit][micro_batch]
                if sides[host].send(now, visit, micro_batch, size):
                    heappush(events, (sides[host].done_s, num_ranks + host, sides[host].version, 0))
        if arrival >= 0:
            visit += 1
            arrived_s[visit][micro_batch] = arrival
            target = rank_of[visit]
            if waits_for[target] == visit * num_micro_batches + micro_batch:
                waits_for[target] = -1
                free = free_s[target]
                heappush(events, ((arrival if arrival > free else free) + needs_s[target], target, visit, micro_batch))
        if rank < num_ranks:
            for kind, micro_batch, chunk in remaining[rank]:
                seconds = seconds_of[kind][rank][chunk]
                if kind == BACKWARD_WEIGHT:
                    now += seconds
                    continue
                if ahead_of:
                    ahead = ahead_of[kind][rank][chunk]
                    now += ahead
                    seconds -= ahead
                visit = visit_of[kind][rank][chunk]
                ready = arrived_s[visit][micro_batch]
                if ready < 0:
                    waits_for[rank] = visit * num_micro_batches + micro_batch
                    free_s[rank], needs_s[rank] = now, seconds
                else:
                    heappush(events, ((now if now > ready else ready) + seconds, rank, visit, micro_batch))
                break  # one action at a time; the iterator keeps the place
            if now > end_s:
                end_s = now
    if max(waits_for) >= 0:
        unit_starts(schedule)  # tells which rank waits at which action for whom
        raise AssertionError("the replay of dependencies ends and the replay of events does not")
    return Replay(arrived_s, end_s)


def _multiples(visits: Visits, num_micro_batches: int, phase: float | None) -> list[list[float]]:
    """Multiples of its time that each visit's message takes, by micro-batch. Empty where none varies."""
    if phase is None:
        return []
    found = []
    for link in visits.link:
        known = link.variation if link else ()
        first = int(phase * len(known))
        found.append([known[(first + number) % len(known)] for number in range(num_micro_batches)] if known else [])
    return found


def _sending_sides(costs: Costs, visits: Visits) -> tuple[list[Egress], list[int]]:
    """The hosts' sending sides, and for each visit the one that its message goes through, or what it does instead."""
    through = [_LINK] * len(visits.rank)
    for last in range(visits.num_of_direction - 1, len(through), visits.num_of_direction):
        through[last] = _NOWHERE
    leaving: list[dict[int, float]] = [{} for _ in costs.egress_bytes_per_s]
    if costs.hosts and leaving:
        for visit, link in enumerate(visits.link):
            if link is None:
                continue
            host = costs.hosts[visits.rank[visit]]
            if host != costs.hosts[visits.rank[visit + 1]] and isfinite(costs.egress_bytes_per_s[host]):
                leaving[host][visit] = link.bytes_per_s
                through[visit] = host
    sides = [Egress(rate, links) for rate, links in zip(costs.egress_bytes_per_s, leaving, strict=True)]
    return sides, through
