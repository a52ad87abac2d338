"""Event replay of a schedule: when the input of every action arrives.

A micro-batch goes down through the forwards of all S stages and up through their backwards: 2S visits, of which each
hands on to the next. Visit v < S is the forward of stage v, the others are the backward of stage 2S−1−v.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from math import inf, isfinite
from typing import NamedTuple

from .costs import Costs, Link
from .dependencies import unit_starts
from .egress import Egress
from .schedule import FORWARD, Schedule


class Visits:
    """What things cost along the way of a micro-batch, one value a visit.

    ``rank`` and ``duration_s`` of the action; ``num_bytes`` and ``link`` of the message after it, whose link is None
    where it stays on its rank.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        down = [schedule.rank(stage) for stage in range(schedule.num_stages)]
        self.rank = down + down[::-1]
        self.last = len(self.rank) - 1
        self.duration_s = [*costs.forward_s, *reversed(costs.backward_s)]
        sizes = costs.message_bytes or (0.0,) * (len(down) - 1)
        free = (Link(),) * len(sizes)
        self.num_bytes = [*sizes, 0.0, *reversed(sizes), 0.0]
        links = [*(costs.down or free), None, *reversed(costs.up or free), None]
        self.link: list[Link | None] = links if schedule.num_ranks > 1 else [None] * len(links)


class Replay(NamedTuple):
    """When the input of each action arrived, by visit and micro-batch (negative: there is no such action), and when
    the last action ended.
    """

    arrived_s: list[array[float]]
    end_s: float


def replay(schedule: Schedule, costs: Costs, visits: Visits) -> Replay:
    """Run every rank's actions in order, each as soon as its input is there; sends never hold up compute.

    That is one event an action, and one or two more for a message that shares a host's sending side.

    Args:
        schedule: a complete one.
        costs: that fit it.
        visits: of both.

    Raises:
        ValueError: the schedule cannot be executed.
    """
    num_ranks, num_micro_batches = schedule.num_ranks, schedule.num_micro_batches
    last, rank_of, duration_s, num_bytes = visits.last, visits.rank, visits.duration_s, visits.num_bytes
    occupied_s = [size / link.bytes_per_s if link else 0.0 for size, link in zip(num_bytes, visits.link, strict=True)]
    latency_s = [link.latency_s if link else 0.0 for link in visits.link]
    link_free_s = [0.0] * len(rank_of)
    sides, side_of = _sending_sides(costs, visits)
    # Arrays: what millions of actions need stays small and close together.
    arrived_s = [array("d", [0.0 if visit == 0 else -1.0]) * num_micro_batches for visit in range(len(rank_of))]
    # visit · num_micro_batches + micro_batch whose input a rank waits for; −1 while it runs and when it is done.
    waits_for = [-1] * num_ranks
    remaining = [iter(order) for order in schedule.orders]
    # The end of an action: (time, rank, visit, micro-batch). A message that has left a host: (time, num_ranks + host,
    # version, 0). Every rank begins as if it had just ended something that nobody waits for.
    events = [(0.0, rank, last, 0) for rank in range(num_ranks)]
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
        elif visit != last:
            host = side_of[visit]
            if host < 0:
                arrival = link_free_s[visit]
                if arrival < now:
                    arrival = now
                link_free_s[visit] = arrival = arrival + occupied_s[visit]
                arrival += latency_s[visit]
            elif sides[host].send(now, visit, micro_batch, num_bytes[visit]):
                heappush(events, (sides[host].done_s, num_ranks + host, sides[host].version, 0))
        if arrival >= 0:
            visit += 1
            arrived_s[visit][micro_batch] = arrival
            target = rank_of[visit]
            if waits_for[target] == visit * num_micro_batches + micro_batch:
                waits_for[target] = -1
                heappush(events, (arrival + duration_s[visit], target, visit, micro_batch))
        if rank < num_ranks:
            end_s = now
            for kind, micro_batch, chunk in remaining[rank]:
                stage = chunk * num_ranks + rank
                visit = stage if kind == FORWARD else last - stage
                ready = arrived_s[visit][micro_batch]
                if ready < 0:
                    waits_for[rank] = visit * num_micro_batches + micro_batch
                else:
                    heappush(events, ((now if now > ready else ready) + duration_s[visit], rank, visit, micro_batch))
                break  # one action at a time; the iterator keeps the place
    if max(waits_for) >= 0:
        unit_starts(schedule)  # tells which rank waits at which action for whom
        raise AssertionError("the replay of dependencies ends and the replay of events does not")
    return Replay(arrived_s, end_s)


def _sending_sides(costs: Costs, visits: Visits) -> tuple[list[Egress], list[int]]:
    """The hosts' sending sides, and for each visit the one that its message goes through; −1 for none."""
    through = [-1] * len(visits.rank)
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
