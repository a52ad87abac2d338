"""Which items of a model each stage gets, from what they cost and need: partition, then refinement by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, log

from ..schedules.costs import Costs
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from ..schedules.verify import verify
from .blocks import Block, Device, DoesNotFit
from .memory import ItemMemory, StageMemory, States, stage_memory
from .order import search_order
from .partition import partition
from .refine import refine, stage_costs
from .shared_devices import budget_of, held_by, loads_s, routes_of, step_s, whole_schedule

BETTER = 0.05
"""Another order of the devices is worth a word if it makes the bottleneck smaller by this share."""


@dataclass(frozen=True)
class StagePlan:
    """A partition of items, predicted.

    Args:
        boundaries: over items, ``[0, …, len(items)]``.
        step_s: of the schedule, by simulation.
        costs: of each stage, as they were simulated.
        memory: of each stage; of each device, where one holds several.
        held: stages of each device, by chunk; empty: stage s is on device s.
        better: another order of the devices that would be better, if there is one, and by how much its bottleneck is
            smaller (0 to 1); links are not known for it and count as infinitely fast.
    """

    boundaries: tuple[int, ...]
    step_s: float
    costs: Costs
    memory: tuple[StageMemory, ...]
    held: tuple[tuple[int, ...], ...] = ()
    better: tuple[tuple[int, ...], float] | None = None


def plan_stages(
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float] = (),
    *,
    owners: str | None = None,
    budget: int | None = None,
) -> StagePlan:
    """The boundaries under which a step of ``schedule`` is shortest, of those that fit. A stage may be a head alone.

    Where a device holds several stages, in one direction or several, their sum is balanced by the search; then
    :attr:`memory` is by device, and the slowest of the links counts for all.

    Args:
        items: embedding, decoder layers in order, head with loss.
        seconds: forward and backward of each item, on a device of speed 1.
        devices: in the order of the stages.
        links: bytes a second between neighbouring stages; empty: infinitely fast.
        owners: with several directions, who holds the optimizer states: ``optimizer_owners`` of a config.
        budget: how often each local search may simulate; None: some seconds.

    Raises:
        DoesNotFit: nothing fits in memory; names the stage, its need and its limit.
        ValueError: there are more devices than items, or numbers that cannot be.
    """
    whole = whole_schedule(schedule)
    budget = budget_of(schedule) if budget is None else budget
    if whole.num_chunks > 1:
        return _Shared(items, seconds, devices, states, schedule, links, owners).search(budget)
    proof = verify(whole, paired=False)
    live, deferred = proof.peak_held, proof.peak_deferred
    blocks, forward = _blocks(items, seconds, states)
    beside = [_beside_blocks(items, stage, live) for stage in range(len(devices))]
    limited = [
        device._replace(memory_bytes=max(device.memory_bytes - own, 0.0))
        for device, own in zip(devices, beside, strict=True)
    ]

    def costs(cuts: Sequence[int]) -> Costs:
        return stage_costs(cuts, blocks, devices, links, forward=forward)

    def memory(cuts: Sequence[int]) -> tuple[StageMemory, ...]:
        each = enumerate(zip(live, deferred, strict=True))
        return tuple(stage_memory(items, cuts, stage, states, *counts) for stage, counts in each)

    def fits(cuts: Sequence[int]) -> bool:
        return all(need.total <= device.memory_bytes for need, device in zip(memory(cuts), devices, strict=True))

    start = _start(blocks, devices, limited, links, live, fits, beside)
    cuts, seconds_ = refine(start, lambda tried: step_s(schedule, costs(tried)), fits=fits, budget=budget)
    better = _better_order(blocks, _roomy(devices, items, live), live)
    return StagePlan(tuple(cuts), seconds_, costs(cuts), memory(cuts), better=better)


def plan_of_boundaries(
    boundaries: Sequence[int],
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float] = (),
    *,
    owners: str | None = None,
    compare_orders: bool,
) -> StagePlan:
    """The plan of given ``boundaries`` over items, whether they fit or not. Other arguments as of :func:`plan_stages`.

    Args:
        compare_orders: whether a better order of the devices is searched, where each has one stage.
    """
    whole = whole_schedule(schedule)
    if whole.num_chunks > 1:
        shared = _Shared(items, seconds, devices, states, schedule, links, owners)
        return shared.plan(boundaries)
    proof = verify(whole, paired=False)
    live = proof.peak_held
    blocks, forward = _blocks(items, seconds, states)
    costs = stage_costs(boundaries, blocks, devices, links, forward=forward)
    counts = enumerate(zip(live, proof.peak_deferred, strict=True))
    memory = tuple(stage_memory(items, boundaries, stage, states, *each) for stage, each in counts)
    better = _better_order(blocks, _roomy(devices, items, live), live) if compare_orders else None
    return StagePlan(tuple(boundaries), step_s(schedule, costs), costs, memory, better=better)


class _Shared:
    """A model in stages of which devices hold several. Arguments as of :func:`plan_stages`."""

    def __init__(
        self,
        items: Sequence[ItemMemory],
        seconds: Sequence[tuple[float, float]],
        devices: Sequence[Device],
        states: States,
        order: Schedule | Stream,
        links: Sequence[float],
        owners: str | None,
    ) -> None:
        whole = whole_schedule(order)
        self._items, self._states, self._devices, self._order = items, states, devices, order
        self._held = held_by(whole, owners)
        self._routes = routes_of(whole)
        self._blocks, self._forward = _blocks(items, seconds, states)
        # Not one a device; what each of them does, costs say.
        self._alike = [Device()] * whole.num_stages
        self._slowest = [min(links)] * (whole.num_stages - 1) if links else ()

    def costs(self, cuts: Sequence[int]) -> Costs:
        own = stage_costs(cuts, self._blocks, self._alike, self._slowest, forward=self._forward)
        return replace(own, fixed_bytes=(), speeds=tuple(device.speed for device in self._devices))

    def memory(self, cuts: Sequence[int]) -> tuple[StageMemory, ...]:
        return tuple(one.memory(self._items, cuts, self._states) for one in self._held)

    def step_s(self, cuts: Sequence[int]) -> float:
        return step_s(self._order, self.costs(cuts))

    def plan(self, cuts: Sequence[int], found_s: float | None = None) -> StagePlan:
        """The plan of these cuts; ``found_s``: of a step, if that is known."""
        found_s = self.step_s(cuts) if found_s is None else found_s
        held = tuple(one.stages for one in self._held)
        return StagePlan(tuple(cuts), found_s, self.costs(cuts), self.memory(cuts), held)

    def search(self, budget: int) -> StagePlan:
        """The best of local searches from the split with the smallest bottleneck, and from one whose devices have sums
        that are as small as that search finds.

        Raises:
            DoesNotFit: nothing fits.
        """
        devices = self._devices
        start = partition(self._blocks, self._alike, self._slowest).boundaries
        if not self._fits(start):
            start, _ = refine(start, self._over)
        if not self._fits(start):
            needs = self.memory(start)
            worst = max(range(len(devices)), key=lambda number: needs[number].total - devices[number].memory_bytes)
            why = "its stages' states and live activations, and what it computes and sends with"
            raise DoesNotFit(worst, worst, needs[worst].total, devices[worst].memory_bytes, why)
        even, _ = refine(start, self._load_s)
        if not self._fits(even):  # asked of the result first: to ask of all that is tried takes most of the time
            even, _ = refine(start, self._load_s, fits=self._fits)
        reached = [refine(cuts, self.step_s, fits=self._fits, budget=budget) for cuts in dict.fromkeys((start, even))]
        return self.plan(*min(reached, key=lambda one: one[1]))

    def _over(self, cuts: Sequence[int]) -> float:
        """Bytes of the device with least room for them that it lacks; 0 if all have enough."""
        needs = zip(self.memory(cuts), self._devices, strict=True)
        return max(0.0, *(need.total - device.memory_bytes for need, device in needs))

    def _fits(self, cuts: Sequence[int]) -> bool:
        return not self._over(cuts)

    def _load_s(self, cuts: Sequence[int]) -> float:
        return max(loads_s(cuts, self._blocks, self._devices, self._routes))


def within_memory(
    boundaries: Sequence[int],
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule,
) -> tuple[int, ...]:
    """``boundaries`` over items if every stage fits, otherwise the best that do. Arguments as of :func:`plan_stages`.

    Raises:
        DoesNotFit: nothing fits.
    """
    proof = verify(schedule, paired=False)
    counts = enumerate(zip(proof.peak_held, proof.peak_deferred, strict=True))
    needs = (stage_memory(items, boundaries, stage, states, *each).total for stage, each in counts)
    if all(need <= device.memory_bytes for need, device in zip(needs, devices, strict=True)):
        return tuple(boundaries)
    return plan_stages(items, seconds, devices, states, schedule).boundaries


def _start(
    blocks: Sequence[Block],
    devices: Sequence[Device],
    limited: Sequence[Device],
    links: Sequence[float],
    live: Sequence[int],
    fits: Callable[[Sequence[int]], bool],
    beside: Sequence[float],
) -> tuple[int, ...]:
    """Boundaries to begin with: by what certainly fits, or if that is nothing, by what may and does.

    Args:
        limited: devices without what the largest layer needs beside its states.
        beside: how much that is.
    """
    try:
        return partition(blocks, limited, links, live=live).boundaries
    except DoesNotFit as short:
        # What a stage computes and sends with depends on its layers: without it, too much may seem to fit.
        with suppress(DoesNotFit):
            found = partition(blocks, devices, links, live=live).boundaries
            if fits(found):
                return found
        why = "its items' states and live activations, and room to compute any layer and to send"
        need = short.need_bytes + beside[short.stage]
        raise DoesNotFit(short.stage, short.stage, need, devices[short.stage].memory_bytes, why) from None


def over_items(cuts: Sequence[int]) -> tuple[int, ...]:
    """Boundaries over items from boundaries over decoder layers: the embedding goes with the first, the head with the
    last."""
    return (0, *(cut + 1 for cut in cuts[1:-1]), cuts[-1] + 2)


def _blocks(
    items: Sequence[ItemMemory], seconds: Sequence[tuple[float, float]], states: States
) -> tuple[list[Block], list[float]]:
    """One block an item, and each one's forward seconds."""
    blocks = [
        Block(
            work=sum(own),
            activation_bytes=item.output_bytes,
            # A stage computes its slices of the head at once: each adds to what it needs, as its states do.
            memory_bytes=sum(states.of(*item.counts)) + (item.working_bytes if item.is_slice else 0.0),
            live_bytes=item.saved_bytes,
        )
        for item, own in zip(items, seconds, strict=True)
    ]
    return blocks, [forward for forward, _ in seconds]


def _beside_blocks(items: Sequence[ItemMemory], stage: int, live: Sequence[int]) -> float:
    """Memory that a stage needs whatever blocks it has, by the largest layer (:func:`stage_memory` is exact)."""
    is_last = stage == len(live) - 1
    message = max(item.output_bytes for item in items)
    working = max(item.working_bytes for item in (items if is_last else items[:-1]) if not item.is_slice)
    first = live[stage] * max(item.first_bytes for item in items) if stage else 0.0
    return working + first + (2 * message if stage else 0.0) + (0.0 if is_last else (1 + live[stage]) * message)


def _roomy(devices: Sequence[Device], items: Sequence[ItemMemory], live: Sequence[int]) -> list[Device]:
    """The devices with the room that blocks have on each wherever in the pipeline it is."""
    most = max(_beside_blocks(items, stage, live) for stage in range(len(devices)))
    return [device._replace(memory_bytes=max(device.memory_bytes - most, 0.0)) for device in devices]


def _better_order(
    blocks: Sequence[Block], devices: Sequence[Device], live: Sequence[int]
) -> tuple[tuple[int, ...], float] | None:
    # Devices that are all but equal count as equal, or the search would be among as many kinds as devices.
    alike = [Device(_rounded(device.speed), _rounded(device.memory_bytes)) for device in devices]
    if len({device.speed for device in alike}) == 1:
        return None
    try:
        given = partition(blocks, devices, live=live)
        order = search_order(blocks, alike, live=live).order
        found = partition(blocks, [devices[index] for index in order], live=live)
    except DoesNotFit:
        return None
    gain = 1 - found.bottleneck_s / given.bottleneck_s if given.bottleneck_s else 0.0
    return (order, gain) if gain >= BETTER else None


def _rounded(value: float) -> float:
    """Round to steps of about a twentieth."""
    return value if value in (0.0, inf) else 1.05 ** round(log(value, 1.05))
