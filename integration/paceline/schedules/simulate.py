"""How long a step of a schedule takes, and why: predicted from what its parts cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .costs import Costs, Link
from .critical_path import critical_path_of
from .dependencies import check_actions
from .events import Replay, Visits, replay
from .lower import is_forward_only
from .schedule import BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Schedule
from .timeline import Span, Timeline, Transfer
from .verify import Peaks, peaks

__all__ = ["Costs", "Link", "Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """A predicted step.

    Attributes:
        makespan_s: of the step, ``step_s`` of the costs included.
        busy_s: by rank, what it computes, ``step_s`` included.
        peaks: by rank, the most micro-batches (of all its chunks) that are live, deferred and either; see
            :class:`~paceline.schedules.verify.Proof`.
        peak_bytes: by rank, most memory at a time.
        critical_path: what determined the makespan, in time without gaps; empty unless asked for.
        timeline: all that happens; None unless asked for.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    peaks: tuple[Peaks, ...]
    peak_bytes: tuple[float, ...]
    critical_path: tuple[Span | Transfer, ...] = ()
    timeline: Timeline | None = None

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """By rank, most micro-batches (of all its chunks) whose forward has begun and whose backward (that of the
        inputs, where it is split) has not ended; 0 if there are no backwards: nothing stays.
        """
        return tuple(peak.live for peak in self.peaks)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """By rank, the rest of the makespan."""
        return tuple(max(0.0, self.makespan_s - busy) for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time."""
        return sum(self.idle_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0

    @property
    def critical_s(self) -> dict[str, float]:
        """The critical path in sums: seconds of ``"compute"``, ``"transfer"`` and ``"step"``."""
        sums = {"compute": 0.0, "transfer": 0.0, "step": 0.0}
        for part in self.critical_path:
            kind = "transfer" if isinstance(part, Transfer) else part.kind
            sums[kind if kind in sums else "compute"] += part.end_s - part.start_s
        return sums


def simulate(schedule: Schedule, costs: Costs, *, timeline: bool = False, critical_path: bool = False) -> Simulation:
    """Replay one step: asynchronous sends, links that carry one message at a time, hosts that share what they send.

    An action starts when its rank has ended the one before it and its input has arrived; the part of a backward that
    needs no gradient does not wait for one. Seconds are proportional to
    the number of actions. What is not modelled: the burst that a rate limiter lets through, and compute that slows down
    while messages move.

    Args:
        schedule: any that is complete.
        costs: one value a stage of the schedule; every direction has the same.
        timeline: also return every action and message.
        critical_path: also return what determined the makespan.

    Raises:
        ValueError: costs and schedule do not fit, the schedule is not complete, or it cannot be executed; names rank
            and action.
    """
    check_actions(schedule, forward_only=is_forward_only(schedule))
    _check_fit(schedule, costs)
    visits = Visits(schedule, costs)
    ranks = range(schedule.num_ranks)
    replayed = replay(schedule, costs, visits)
    return Simulation(
        replayed.end_s + costs.step_s,
        tuple(_busy_s(schedule, costs, visits, rank) for rank in ranks),
        tuple(peaks(order) for order in schedule.orders),
        peak_bytes(schedule, costs),
        critical_path_of(schedule, costs, visits, replayed) if critical_path else (),
        _timeline(schedule, costs, visits, replayed) if timeline else None,
    )


def _check_fit(schedule: Schedule, costs: Costs) -> None:
    if len(costs.forward_s) != schedule.num_stages:
        raise ValueError(
            f"the costs are of {len(costs.forward_s)} stages and the schedule has {schedule.num_stages}: give one value"
            " a stage."
        )
    for name in ("hosts", "fixed_bytes", "speeds"):
        given = len(getattr(costs, name))
        if given not in (0, schedule.num_ranks):
            raise ValueError(f"{name} has {given} values and there are {schedule.num_ranks} ranks: give one a rank.")


def _busy_s(schedule: Schedule, costs: Costs, visits: Visits, rank: int) -> float:
    counts = Counter((action.kind, action.chunk) for action in schedule.orders[rank])
    return costs.step_s + sum(visits.seconds[kind][rank][chunk] * count for (kind, chunk), count in counts.items())


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Bytes of each rank at their peak: live micro-batches, deferred ones, and all else. No times are looked at."""
    return tuple(_peak_bytes(schedule, costs, rank) for rank in range(schedule.num_ranks))


def _peak_bytes(schedule: Schedule, costs: Costs, rank: int) -> float:
    fixed = costs.fixed_bytes[rank] if costs.fixed_bytes else 0.0
    if not costs.activation_bytes and not costs.deferred_bytes:
        return fixed
    kept = costs.kept_bytes
    changes = {kind: [kept[kind][stage] for stage in schedule.stages[rank]] for kind in kept}
    held = peak = 0.0
    for kind, _, chunk in schedule.orders[rank]:
        held += changes[kind][chunk]
        if held > peak:
            peak = held
    return fixed + (0.0 if is_forward_only(schedule) else peak)


def _timeline(schedule: Schedule, costs: Costs, visits: Visits, replayed: Replay) -> Timeline:
    spans: list[Span] = []
    transfers: list[Transfer] = []
    for rank, order in enumerate(schedule.orders):
        now = 0.0
        for kind, micro_batch, chunk in order:
            seconds = visits.seconds[kind][rank][chunk]
            if kind == BACKWARD_WEIGHT:
                spans.append(Span(rank, kind, micro_batch, chunk, now, now + seconds))
                now += seconds
                continue
            visit = visits.of[kind][rank][chunk]
            if visits.ahead and (ahead := visits.ahead[kind][rank][chunk]):
                spans.append(Span(rank, RECOMPUTE, micro_batch, chunk, now, now + ahead))
                now += ahead
                seconds -= ahead
            start = max(now, replayed.arrived_s[visit][micro_batch])
            now = start + seconds
            spans.append(Span(rank, kind, micro_batch, chunk, start, now))
            if visits.link[visit] is not None:
                what = "activation" if kind == FORWARD else "gradient"
                target, end = visits.rank[visit + 1], replayed.arrived_s[visit + 1][micro_batch]
                size = visits.num_bytes[visit]
                transfers.append(Transfer(what, rank, target, micro_batch, chunk, now, end, size))
        if costs.step_s:
            spans.append(Span(rank, "step", -1, 0, replayed.end_s, replayed.end_s + costs.step_s))
    return Timeline(schedule.num_ranks, tuple(spans), tuple(transfers), schedule.name, schedule.stages)
