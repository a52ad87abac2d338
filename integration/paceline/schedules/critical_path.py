"""The chain of actions and messages that determined how long a replayed step took."""

from __future__ import annotations

from .costs import Costs
from .events import Replay, Visits
from .schedule import BACKWARD, FORWARD, Schedule
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
    # By visit and micro-batch: the end of the action; the action before it on its rank (visit · num_micro_batches +
    # micro-batch); the micro-batch that made the same visit before it. −1: none.
    ended_s = visits.table("d", 0.0, num_micro_batches)
    rank_before = visits.table("q", -1, num_micro_batches)
    line_before = visits.table("q", -1, num_micro_batches)
    last_of_visit = [-1] * len(visits.rank)
    latest_s, final = -1.0, -1
    for rank, order in enumerate(schedule.orders):
        now, previous = 0.0, -1
        for kind, micro_batch, chunk in order:
            visit = (visits.forward if kind == FORWARD else visits.backward)[rank][chunk]
            now = max(now, replay.arrived_s[visit][micro_batch]) + visits.duration_s[visit]
            ended_s[visit][micro_batch] = now
            rank_before[visit][micro_batch] = previous
            line_before[visit][micro_batch] = last_of_visit[visit]
            last_of_visit[visit] = micro_batch
            previous = visit * num_micro_batches + micro_batch
        if now > latest_s:
            latest_s, final = now, previous

    path: list[Span | Transfer] = []
    visit, micro_batch = divmod(final, num_micro_batches)
    if costs.step_s:
        path.append(Span(visits.rank[visit], "step", -1, 0, latest_s, latest_s + costs.step_s))
    while True:
        kind = FORWARD if visits.is_forward(visit) else BACKWARD
        previous = rank_before[visit][micro_batch]
        free = ended_s[previous // num_micro_batches][previous % num_micro_batches] if previous >= 0 else 0.0
        arrival = replay.arrived_s[visit][micro_batch]
        end = ended_s[visit][micro_batch]
        path.append(Span(visits.rank[visit], kind, micro_batch, visits.chunk[visit], max(free, arrival), end))
        if previous >= 0 and free >= arrival:
            visit, micro_batch = divmod(previous, num_micro_batches)
            continue
        if visit % visits.num_of_direction == 0:
            return tuple(reversed(path))
        visit -= 1
        end, waited = arrival, True
        link = visits.link[visit]
        assert link is not None  # on one rank, what comes before has ended before
        while waited:
            ready, other = ended_s[visit][micro_batch], line_before[visit][micro_batch]
            link_free = replay.arrived_s[visit + 1][other] - link.latency_s if other >= 0 else 0.0
            waited = link_free > ready
            path.append(
                Transfer(
                    "activation" if visits.is_forward(visit) else "gradient",
                    visits.rank[visit],
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
