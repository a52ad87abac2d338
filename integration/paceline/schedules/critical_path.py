"""The chain of actions and messages that determined how long a replayed step took."""

from __future__ import annotations

from array import array

from .costs import Costs
from .events import Replay, Visits
from .schedule import BACKWARD_WEIGHT, RECOMPUTE, Schedule
from .timeline import Span, Transfer


def critical_path_of(schedule: Schedule, costs: Costs, visits: Visits, replay: Replay) -> tuple[Span | Transfer, ...]:
    """From time 0 to the end of the step, each part beginning when the one before it ends.

    A message that stood in its link's line appears from when the link was free for it, and the one before it in the
    line ends there, without its latency. Where two chains are equally long, this one stays on the rank.

    Args:
        schedule: that was replayed.
        costs: of it.
        visits: of both.
        replay: what came out.
    """
    num_micro_batches = schedule.num_micro_batches
    # By visit and micro-batch: where its rank's order has the action, and the micro-batch that made the same visit
    # before it (−1: none). By rank and position in its order: the end of the action.
    positions = visits.table("q", -1, num_micro_batches)
    line_before = visits.table("q", -1, num_micro_batches)
    ended_s = [array("d") for _ in schedule.orders]

    def ahead_s(kind: str, rank: int, chunk: int) -> float:
        return visits.ahead[kind][rank][chunk] if visits.ahead else 0.0

    last_of_visit = [-1] * len(visits.rank)
    for rank, order in enumerate(schedule.orders):
        now = 0.0
        for position, (kind, micro_batch, chunk) in enumerate(order):
            now += (ahead := ahead_s(kind, rank, chunk))
            if kind != BACKWARD_WEIGHT:
                visit = visits.of[kind][rank][chunk]
                now = max(now, replay.arrived_s[visit][micro_batch])
                positions[visit][micro_batch] = position
                line_before[visit][micro_batch] = last_of_visit[visit]
                last_of_visit[visit] = micro_batch
            now += visits.seconds[kind][rank][chunk] - ahead
            ended_s[rank].append(now)

    ranks = range(schedule.num_ranks)
    latest_s = max(ends[-1] for ends in ended_s if ends)
    rank = next(rank for rank in ranks if ended_s[rank] and ended_s[rank][-1] == latest_s)
    position = len(ended_s[rank]) - 1
    path: list[Span | Transfer] = []
    if costs.step_s:
        path.append(Span(rank, "step", -1, 0, latest_s, latest_s + costs.step_s))
    while True:
        kind, micro_batch, chunk = schedule.orders[rank][position]
        before = ended_s[rank][position - 1] if position else 0.0
        free = before + ahead_s(kind, rank, chunk)
        visit = -1 if kind == BACKWARD_WEIGHT else visits.of[kind][rank][chunk]
        arrival = 0.0 if visit < 0 else replay.arrived_s[visit][micro_batch]
        path.append(Span(rank, kind, micro_batch, chunk, max(free, arrival), ended_s[rank][position]))
        if position and free >= arrival:
            if free > before:
                path.append(Span(rank, RECOMPUTE, micro_batch, chunk, before, free))
            position -= 1
            continue
        if visit % visits.num_of_direction == 0:
            return tuple(reversed(path))
        visit -= 1
        end, waited = arrival, True
        link, rank = visits.link[visit], visits.rank[visit]
        assert link is not None  # on one rank, what comes before has ended before
        while waited:
            position, other = positions[visit][micro_batch], line_before[visit][micro_batch]
            ready = ended_s[rank][position]
            link_free = replay.arrived_s[visit + 1][other] - link.latency_s if other >= 0 else 0.0
            waited = link_free > ready
            path.append(
                Transfer(
                    "activation" if visits.is_forward(visit) else "gradient",
                    rank,
                    visits.rank[visit + 1],
                    micro_batch,
                    visits.chunk[visit],
                    max(ready, link_free),
                    end,
                    visits.num_bytes[visit],
                )
            )
            if waited:
                micro_batch, end = other, link_free
