"""The schedule for stages, links and memory as they are, found by simulating many: families, and orders filled anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from .costs import Costs
from .families import dualpipev, eager, gpipe, interleaved, kfkb, one_f_one_b, v_route
from .filling import PATIENCE, composed, filled
from .schedule import Schedule
from .simulate import simulate
from .split_families import dualpipev_split, vhalf, vmin, zbh1, zbh2, zbv

GENERATED = "generated"
_PATIENCES = (0.0, 2 * PATIENCE)
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Found:
    schedule: Schedule
    costs: Costs
    makespan_s: float
    most_bytes: float
    fits: bool

    def is_better(self, other: _Found | None) -> bool:
        """It fits into memory, and is faster, or as fast in less memory."""
        if not self.fits or other is None:
            return self.fits
        if abs(self.makespan_s - other.makespan_s) <= _ROUNDING * other.makespan_s:
            return self.most_bytes < other.most_bytes
        return self.makespan_s < other.makespan_s


class _Search:
    """The best schedule so far, of those that fit into memory.

    Args:
        room_bytes: by rank.
    """

    def __init__(self, room_bytes: Sequence[float]) -> None:
        self.best: _Found | None = None
        self.least_bytes = inf
        self._room_bytes = room_bytes

    def simulated(self, schedule: Schedule, costs: Costs) -> _Found:
        """How good a schedule is; it is kept if there was none as good."""
        step = simulate(schedule, replace(costs, fixed_bytes=()))
        fits = all(peak <= room * (1 + _ROUNDING) for peak, room in zip(step.peak_bytes, self._room_bytes, strict=True))
        found = _Found(schedule, costs, step.makespan_s, max(step.peak_bytes), fits)
        self.least_bytes = min(self.least_bytes, found.most_bytes)
        if found.is_better(self.best):
            self.best = found
        return found

    def composed(self, route: Sequence[int], num_micro_batches: int, costs: Costs, levels: Sequence[float]) -> None:
        """Try an order in which every rank runs what it can, within so many bytes."""
        schedule = composed(route, num_micro_batches, costs, levels)
        if schedule is not None:
            self.simulated(replace(schedule, name=GENERATED), costs)

    def refilled(self, schedule: Schedule, costs: Costs, patience: float = PATIENCE) -> None:
        """Try the order of a schedule with other places for its backwards of weights."""
        name = schedule.name if schedule.name.startswith(GENERATED) else f"{GENERATED} from {schedule.name}"
        self.simulated(replace(filled(schedule, costs, self._room_bytes, patience), name=name), costs)


def generated(
    costs_of: Mapping[tuple[int, ...], Costs], num_micro_batches: int, room_bytes: Sequence[float] | None = None
) -> Schedule:
    """The fastest schedule that is found for these costs, no slower than any family that fits into memory.

    Tried are the families of the routes, the fastest of each with its backwards of weights placed anew, and orders in
    which every rank runs what it can; all are simulated. Of equally fast ones it is the one that needs least memory.

    Args:
        costs_of: by route (rank of each stage) that may be chosen: costs of its stages. Without ``activation_bytes``
            all stages of a route count alike.
        num_micro_batches: M.
        room_bytes: by rank, what may be kept of micro-batches, live and deferred; None: as much as there is use for.

    Raises:
        ValueError: none fits into memory.
    """
    num_ranks = max(next(iter(costs_of))) + 1
    rooms = (inf,) * num_ranks if room_bytes is None else tuple(room_bytes)
    search = _Search(rooms)
    for route, given in costs_of.items():
        costs = given
        if not (given.activation_bytes or given.deferred_bytes):
            costs = replace(given, activation_bytes=(num_ranks / len(route),) * len(route))
        families = [search.simulated(schedule, costs) for schedule in _families(route, num_micro_batches)]
        fitting = [found for found in families if found.fits]
        fastest = {id(found): found for each in (families, fitting) for found in sorted(each, key=_makespan_s)[:1]}
        for found in fastest.values():
            search.refilled(found.schedule, costs)
        for levels in _levels(route, costs, rooms, (num_ranks, 2 * num_ranks)):
            search.composed(route, num_micro_batches, costs, levels)
        if search.best is None:
            for levels in _levels(route, costs, (inf,) * num_ranks, (1,)):
                search.composed(route, num_micro_batches, costs, levels)
    best = search.best
    if best is None:
        raise ValueError(
            f"no schedule of {num_micro_batches} micro-batches on {num_ranks} ranks fits into memory: the one that "
            f"needs least keeps {search.least_bytes:.4g} bytes on a rank; give as much, or smaller micro-batches."
        )
    for patience in _PATIENCES:
        search.refilled(best.schedule, best.costs, patience)
    assert search.best is not None
    schedule = search.best.schedule
    is_named = schedule.name.startswith(GENERATED)
    return schedule if is_named else replace(schedule, name=f"{GENERATED} as {schedule.name}")


def _families(route: tuple[int, ...], num_micro_batches: int) -> Iterator[Schedule]:
    """Those of a route, as far as they have an order of so many micro-batches."""
    num_ranks = max(route) + 1
    num_chunks = len(route) // num_ranks
    makers: list[Callable[[int, int], Schedule]] = []
    if num_chunks == 1:
        makers += [one_f_one_b, zbh1, zbh2, gpipe]
        makers += [partial(eager, slack=slack) for slack in (1.0, 2.0)]
        makers += [partial(kfkb, k=2**power) for power in range(1, (num_micro_batches - 1).bit_length())]
    elif route == v_route(num_ranks):
        makers += [zbv, vhalf, vmin, dualpipev, dualpipev_split]
    if num_chunks > 1 and route == tuple(range(num_ranks)) * num_chunks:
        makers.append(partial(interleaved, num_chunks=num_chunks))
    for make in makers:
        try:
            yield make(num_ranks, num_micro_batches)
        except ValueError:
            continue


def _levels(
    route: Sequence[int], costs: Costs, rooms: Sequence[float], counts: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """By rank, how much to keep: whole micro-batches of so many numbers, as far as there is room."""
    sizes = zip(costs.activation_bytes, costs.deferred_bytes or costs.activation_bytes, strict=True)
    of_rank = [0.0] * len(rooms)
    for rank, both in zip(route, sizes, strict=True):
        of_rank[rank] += max(both)
    levels = (tuple(min(room, n * size) for room, size in zip(rooms, of_rank, strict=True)) for n in counts)
    yield from dict.fromkeys(levels)


def _makespan_s(found: _Found) -> float:
    return found.makespan_s
