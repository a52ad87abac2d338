"""The choice of a partition for a run that was measured, with the schedule that suits it best: a function of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..schedules.schedule import Schedule
from ..schedules.steady import drained_s
from ..schedules.stream import Stream
from ..schedules.variation import varies
from .candidates import Candidate, schedule_of
from .choose import TIE
from .repartition import Layout
from .schedule_search import Found, Measured, Options, made_orders, with_weights
from .shared_devices import Live, actions_of, live_of, step_s, whole_schedule
from .switching import Decision, SwitchRule

LEAST_GAIN = 0.025
"""Layers stay where they are for less than this part of a step: predictions are off by as much."""

Parts = tuple[int, ...]


@dataclass(frozen=True)
class Schedules:
    """Schedules that a partition may run with.

    Args:
        running: what the layers are to run with as they lie.
        order: of the pipeline, where there are no candidates, and it stays.
        candidates: of the last choice of a schedule.
        num_made: orders that were made in the run so far.
    """

    running: Candidate
    order: Schedule | Stream
    candidates: tuple[Candidate, ...] = ()
    num_made: int = 0

    def after(self, found: Found | None) -> Schedules:
        """The same after a choice of a schedule, if there was one."""
        if found is None:
            return self
        return Schedules(found.choice.next, self.order, found.planner.candidates, found.num_made)


class FoundPartition(NamedTuple):
    """The best partition that was found; what runs, if no other is better.

    Args:
        candidate: the schedule to go with ``parts``.
        most_bytes: that any device would send.
        rule: with what it remembers now.
        num_made: orders that were made in the run so far.
        over: the first device that takes more than it may, as layers lie, what it takes and what it may, in bytes.
    """

    before: Parts
    parts: Parts
    candidate: Candidate
    decision: Decision
    most_bytes: float
    rule: SwitchRule
    num_made: int
    over: tuple[int, float, float] | None


class PartitionArguments(NamedTuple):
    """The arguments of :func:`search_partition`, but for the choice of a schedule before it.

    Args:
        follows_schedules: whether a partition may bring another schedule with it.
        refused: boundaries that are not tried.
        rule: is changed.
        rebuild_s: seconds of a move besides sending.
        sent_per_s: bytes a second of the last move; None: not known.
        steps: done since the last choice.
    """

    layout: Layout
    measured: Measured
    options: Options
    schedules: Schedules
    follows_schedules: bool
    refused: frozenset[Parts]
    rule: SwitchRule
    rebuild_s: float
    sent_per_s: float | None
    steps: int


def search_partition(arguments: PartitionArguments, found: Found | None = None) -> FoundPartition | None:
    """Find the best partition, and decide whether moving layers pays.

    Args:
        found: the choice of a schedule in the same planning.

    Returns:
        None if the schedule's micro-batches were not measured.
    """
    schedules = arguments.schedules.after(found)
    if schedules.running.micro_batch_size not in arguments.measured.costs:
        return None
    return _Search(arguments, schedules).found()


class _Search:
    """One search.

    Args:
        schedules: after the choice of one.
    """

    def __init__(self, arguments: PartitionArguments, schedules: Schedules) -> None:
        self._asked, self._schedules, self._layout = arguments, schedules, arguments.layout
        self._num_made = schedules.num_made

    def found(self) -> FoundPartition:
        asked, layout, running = self._asked, self._layout, self._schedules.running
        now_s = self._step_s(running)(layout.parts)
        best_s, parts, best = min((self._best_from(start) for start in self._starts()), key=lambda found: found[0])
        # Another schedule for the layers as they lie is a matter of the other rule.
        if parts == layout.parts or best_s > now_s * (1 - LEAST_GAIN):
            parts, best, best_s = layout.parts, running, now_s
        decision = asked.rule.consider(now_s, best_s, self._switch_s(parts, now_s), asked.steps)
        most_bytes = max(layout.sent_bytes(parts))
        return FoundPartition(
            *(layout.parts, parts, best, decision, most_bytes, asked.rule, self._num_made, self._over())
        )

    def _starts(self) -> list[Candidate]:
        """Schedules to begin a search with: an order made for the layers as they lie suits no other partition."""
        running, parts = self._schedules.running, self._layout.parts
        if running.made is None or not self._may_choose_schedules(running):
            return [running]
        others = self._that_fit(parts, makes=False)
        tried = [(self._step_s(other)(parts), other) for other in others if other.made is None]
        return [running, *(other for _, other in sorted(tried, key=_by_seconds)[:1])]

    def _may_choose_schedules(self, candidate: Candidate) -> bool:
        """Where messages vary the schedule is chosen over replays, and no other by a single one here."""
        return self._asked.follows_schedules and not varies(self._asked.measured.costs[candidate.micro_batch_size])

    def _best_from(self, start: Candidate) -> tuple[float, Parts, Candidate]:
        """Seconds of a step, boundaries and schedule that a search comes to."""
        best = start
        parts, best_s = self._search(start)
        # Another partition may suit another schedule, and that one another partition.
        while self._may_choose_schedules(start):
            tried = [(self._step_s(other)(parts), other) for other in self._that_fit(parts)]
            seconds, other = min(tried, default=(best_s, best), key=_by_seconds)
            if seconds > best_s * (1 - TIE):
                break
            best = other
            parts, best_s = self._search(best, parts)
        return best_s, parts, best

    def _that_fit(self, parts: Parts, *, makes: bool = True) -> Iterator[Candidate]:
        """Candidates that were measured and fit with other boundaries, in the format that runs.

        Args:
            makes: whether an order that is made for those is among them.
        """
        asked, boundary = self._asked, self._schedules.running.boundary
        if not self._schedules.candidates:
            return
        costs = {size: self._layout.costs(each, parts) for size, each in asked.measured.costs.items()}
        made: list[Candidate] = []
        if makes:
            split = with_weights(costs, asked.measured.saved_bytes)
            made = made_orders(asked.measured, asked.options, self._schedules.running, split, self._num_made)
            self._num_made += len(made)
        for other in (*self._schedules.candidates, *(each._replace(boundary=boundary) for each in made)):
            if other.micro_batch_size in costs and other.boundary == boundary:
                measured = asked.measured.costs[other.micro_batch_size]
                if self._layout.fits(measured, parts, self._live(other)):
                    yield other

    def _switch_s(self, parts: Parts, now_s: float) -> float:
        """Seconds of moving layers, by what the last moves took; without a flush, also of finishing the steps that are
        under way and of filling the pipeline again."""
        asked, running = self._asked, self._schedules.running
        costs = asked.measured.costs[running.micro_batch_size]
        order = self._order(running)
        drain_s = drained_s(order, costs) if isinstance(order, Stream) else 0.0
        num_micro_batches = whole_schedule(order).num_micro_batches
        links = zip(costs.message_bytes, costs.down, costs.up, strict=True)
        busy_s = max((num_micro_batches * (n / d.bytes_per_s + n / u.bytes_per_s) for n, d, u in links), default=0.0)
        idle_s = max(0.0, now_s - busy_s)
        return drain_s + self._layout.migration_s(costs, parts, asked.rebuild_s, asked.sent_per_s, idle_s)

    def _search(self, candidate: Candidate, known: Parts | None = None) -> tuple[Parts, float]:
        num_actions = actions_of(self._order(candidate))
        costs = self._asked.measured.costs[candidate.micro_batch_size]
        live, seconds = self._live(candidate), self._step_s(candidate)
        return self._layout.best(costs, live, seconds, num_actions, known, self._asked.refused)

    def _live(self, candidate: Candidate) -> list[Live]:
        """Live micro-batches of each device."""
        whole = whole_schedule(self._order(candidate))
        return [live_of(whole, device) for device in range(whole.num_ranks)]

    def _step_s(self, candidate: Candidate) -> Callable[[Parts], float]:
        """Seconds of a step by its boundaries."""
        order, costs = self._order(candidate), self._asked.measured.costs[candidate.micro_batch_size]
        return lambda parts: step_s(order, self._layout.costs(costs, parts))

    def _order(self, candidate: Candidate) -> Schedule | Stream:
        if not self._schedules.candidates:
            return self._schedules.order
        return schedule_of(candidate, self._asked.measured.num_stages, self._asked.measured.samples)

    def _over(self) -> tuple[int, float, float] | None:
        layout, running = self._layout, self._schedules.running
        costs = self._asked.measured.costs[running.micro_batch_size]
        needed = layout.need_bytes(costs, layout.parts, self._live(running))
        pairs = enumerate(zip(needed, layout.limit_bytes, strict=True))
        return next(((device, need, limit) for device, (need, limit) in pairs if need > limit), None)


def _by_seconds(found: tuple[float, Candidate]) -> tuple[float, tuple[int, int, float, bool, str, str]]:
    return found[0], found[1].key
