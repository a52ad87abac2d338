"""Devices that hold several stages: what their memory needs, and how fast a cut of the model is there.

What a device has to do is the sum of its stages: where one takes longer than the others, what else is held beside it
can be less. With several directions that is so on every device that has the stage. Sums that are alike are a good
start; how well the static order fits unequal stages, a simulation tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import fsum

from ..schedules.costs import Costs
from ..schedules.directions import mirror_groups, stages_of
from ..schedules.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from ..schedules.simulate import simulate
from ..schedules.stream import Stream
from .blocks import Block, Device
from .memory import ItemMemory, StageMemory, States, again_bytes, stage_memory

MIRROR = "mirror"
_BEGUN, _MEASURED = 2, 2
"""Steps of a stream after which its rhythm is taken to be there, and steps after those that are timed."""
_LEAST, _MOST, _SEARCHED_ACTIONS = 60, 500, 300_000
"""Times that a search may simulate, and actions altogether."""


Live = tuple[tuple[int, ...], ...]
"""Numbers of live micro-batches by chunk that a device comes to, none of which is within another. Where backwards are
split those of deferred ones come behind them.
"""


@dataclass(frozen=True)
class Held:
    """The stages of one device.

    Args:
        stages: by chunk.
        live: micro-batches.
        owned: of each stage, the share of its optimizer states that is there, data-parallel replicas left aside; None
            with one direction, where nobody else has the stage.
    """

    stages: tuple[int, ...]
    live: Live
    owned: tuple[float | None, ...]

    @property
    def peak(self) -> int:
        """Most live micro-batches, of all chunks together."""
        return max(map(sum, self.live))

    def memory(self, items: Sequence[ItemMemory], boundaries: Sequence[int], states: States) -> StageMemory:
        """Bytes of the device; states that it owns are spread over its data-parallel replicas.

        Args:
            items: of the whole model.
            boundaries: over items, ``[0, …, len(items)]``.
        """
        has_first = 0 in self.stages and None in self.owned
        each = [
            stage_memory(
                *(items, boundaries, stage, states if share is None else _owning(states, share), 1),
                beside_first=has_first,
            )
            for stage, share in zip(self.stages, self.owned, strict=True)
        ]
        return self.together(each, [again_bytes(items, boundaries, stage) for stage in self.stages])

    def together(self, each: Sequence[StageMemory], again: Sequence[float] = ()) -> StageMemory:
        """Bytes of the device, from those of its stages with one live micro-batch, by chunk.

        How much of what a micro-batch keeps is left for later, nobody has measured: all of it, recomputed or not.

        Args:
            again: of each stage, as :func:`~paceline.planning.memory.again_bytes` says; empty: nothing.
        """
        sums = {field.name: fsum(getattr(stage, field.name) for stage in each) for field in fields(StageMemory)}
        sums["working"] = max(stage.working for stage in each)
        saved = [stage.activations for stage in each]
        deferred = [size + more for size, more in zip(saved, again, strict=True)] if again else saved
        sums["activations"] = max(
            fsum(n * size for n, size in zip(live, saved + deferred, strict=False)) for live in self.live
        )
        return StageMemory(**sums)


def held_by(schedule: Schedule, owners: str | None) -> tuple[Held, ...]:
    """Stages, live micro-batches and shares of optimizer states that each device holds.

    Args:
        schedule: with several stages a device; it tells how many micro-batches are alive.
        owners: of optimizer states, as ``optimizer_owners`` of a config.
    """
    if schedule.num_directions == 1:
        chunks = (None,) * schedule.num_chunks
        return tuple(Held(held, live_of(schedule, device), chunks) for device, held in enumerate(schedule.stages))
    routes = schedule.routes
    alike = {device: len(group) for group in mirror_groups(routes) for device in group}
    found = []
    for device in range(schedule.num_ranks):
        stages = stages_of(device, routes)
        in_first = [float(direction == 0) for direction in range(len(routes))]
        owned = [1 / alike[device]] * len(routes) if owners == MIRROR else in_first
        found.append(Held(stages, live_of(schedule, device), tuple(owned)))
    return tuple(found)


def _owning(states: States, share: float) -> States:
    return replace(states, shard=True, owned=share)


def live_of(schedule: Schedule, rank: int) -> Live:
    """Live micro-batches of a device, and deferred ones where backwards are split."""
    now = [0] * schedule.num_chunks * (2 if schedule.is_split else 1)
    seen: set[tuple[int, ...]] = set()
    for kind, _, chunk in schedule.orders[rank]:
        if kind == BACKWARD_WEIGHT:
            now[schedule.num_chunks + chunk] -= 1
        else:
            now[chunk] += 1 if kind == FORWARD else -1
        if kind == BACKWARD_INPUT:
            now[schedule.num_chunks + chunk] += 1
        seen.add(tuple(now))
    return tuple(
        sorted(
            one
            for one in seen
            if not any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in seen)
        )
    )


def one_a_device(peaks: Sequence[int]) -> tuple[Live, ...]:
    """Live micro-batches of devices with one stage each, from the most that each keeps."""
    return tuple(((peak,),) for peak in peaks)


def routes_of(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Device of each stage, one route a direction, also of a schedule that does not name them."""
    return schedule.routes or (tuple(rank for rank, _ in schedule.places),)


def loads_s(
    boundaries: Sequence[int],
    blocks: Sequence[Block],
    devices: Sequence[Device],
    routes: Sequence[Sequence[int]],
) -> list[float]:
    """Seconds of a micro-batch a direction, by device: the sum of its stages."""
    work = [fsum(block.work for block in blocks[first:end]) for first, end in pairwise(boundaries)]
    sums = [0.0] * len(devices)
    for route in routes:
        for stage, device in enumerate(route):
            sums[device] += work[stage] / devices[device].speed
    return sums


def step_s(order: Schedule | Stream, costs: Costs) -> float:
    """Seconds of a step: of a stream, one of the steady state, as nearly as a search needs it."""
    if isinstance(order, Schedule):
        return simulate(order, costs).makespan_s
    begun, costs = order.most_lag + _BEGUN, costs.without_ahead()
    long, short = (simulate(order.unrolled(steps), costs).makespan_s for steps in (begun + _MEASURED, begun))
    return (long - short) / _MEASURED + costs.step_s


def actions_of(order: Schedule | Stream) -> int:
    """Forwards and backwards that one call of :func:`step_s` simulates."""
    schedules = [order] if isinstance(order, Schedule) else [order.unrolled(1)] * (2 * (order.most_lag + _BEGUN) + 2)
    return sum(sum(map(len, one.orders)) for one in schedules)


def budget_of(order: Schedule | Stream) -> int:
    """Number of calls of :func:`step_s` that a search may make: some seconds."""
    return max(_LEAST, min(_MOST, _SEARCHED_ACTIONS // actions_of(order)))


def whole_schedule(order: Schedule | Stream) -> Schedule:
    """The schedule of as many steps as may be under way at a time, with as many micro-batches alive as in a run."""
    return order if isinstance(order, Schedule) else order.unrolled(order.most_lag + 1)
