"""The fastest stages where layers may be recomputed: boundaries and recomputed layers, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from .blocks import Device, DoesNotFit
from .memory import ItemMemory, States
from .recomputation import Recomputable, recomputed, recomputed_s
from .refine import refine
from .shared_devices import budget_of, whole_schedule
from .stages import StagePlan, over_items, over_layers, plan_of_boundaries, plan_stages


class RecomputedStages(NamedTuple):
    """Stages, and the items that are recomputed, in order."""

    plan: StagePlan
    again: tuple[int, ...]


def fastest_stages(
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float] = (),
    *,
    owners: str | None,
    may_recompute: bool,
) -> RecomputedStages:
    """The fastest stages, and the fewest layers of each that must be recomputed for it. Arguments as of
    :func:`plan_stages`; with ``may_recompute``, one stage a device.

    Raises:
        DoesNotFit: nothing fits.
    """
    plans: list[RecomputedStages] = []
    try:
        plan = plan_stages(items, seconds, devices, states, schedule, links, owners=owners)
        plans.append(RecomputedStages(plan, ()))
    except DoesNotFit:
        if not may_recompute:
            raise
    if may_recompute:
        model = Recomputable.of(items, seconds, states, whole_schedule(schedule))
        with suppress(DoesNotFit) if plans else nullcontext():
            found = model.partition(devices)
            if found.items:
                plans.append(_refined(model, found.boundaries, items, seconds, devices, states, schedule, links))
    return min(plans, key=lambda each: each.plan.step_s)


def _refined(
    model: Recomputable,
    start: Sequence[int],
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float],
) -> RecomputedStages:
    """The fastest stages, found from the boundaries ``start``: others have other layers that must be recomputed."""
    limits = [device.memory_bytes for device in devices]

    def fits(cuts: Sequence[int]) -> bool:
        try:
            model.fewest(over_items(cuts), limits)
        except DoesNotFit:
            return False
        return True

    def plan_of(cuts: Sequence[int], *, compare_orders: bool) -> RecomputedStages:
        boundaries, again = model.fewest(over_items(cuts), limits)
        costs = recomputed(items, again), recomputed_s(seconds, again)
        plan = plan_of_boundaries(boundaries, *costs, devices, states, schedule, links, compare_orders=compare_orders)
        return RecomputedStages(plan, again)

    def step_s(cuts: Sequence[int]) -> float:
        return plan_of(cuts, compare_orders=False).plan.step_s

    cuts, _ = refine(over_layers(start), step_s, fits=fits, budget=budget_of(schedule))
    return plan_of(cuts, compare_orders=True)
