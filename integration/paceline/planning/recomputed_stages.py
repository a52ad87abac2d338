"""The fastest stages where layers may be recomputed: boundaries and recomputed layers, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from math import inf
from typing import NamedTuple

from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from .blocks import Device, DoesNotFit
from .memory import ItemMemory, States
from .recomputation import Recomputable, Recomputation, recomputed, recomputed_s
from .refine import refine
from .shared_devices import budget_of, held_by, whole_schedule
from .shared_recomputation import SharedRecomputable
from .stages import StagePlan, plan_of_boundaries, plan_stages


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
    :func:`plan_stages`.

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
        whole = whole_schedule(schedule)
        model = SharedRecomputable(items, states, held_by(whole, owners))
        with suppress(DoesNotFit) if plans else nullcontext():
            if whole.num_chunks > 1:
                found = _with_most_again(model, items, seconds, devices, states, schedule, links, owners)
            else:
                found = Recomputable.of(items, seconds, states, whole).partition(devices)
            if found.items:
                refined = _refined(
                    model, found.boundaries, items, seconds, devices, states, schedule, links, owners=owners
                )
                plans.append(refined)
    return min(plans, key=lambda each: each.plan.step_s)


def _with_most_again(
    model: SharedRecomputable,
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float],
    owners: str | None,
) -> Recomputation:
    """The boundaries that are fastest with all layers recomputed, and the fewest that must be.

    Where backwards are split, all may need more than some of them: then the boundaries are those without recomputation.
    """
    again, limits = range(1, len(items) - 1), [device.memory_bytes for device in devices]
    try:
        costs = recomputed(items, again), recomputed_s(seconds, again)
        plan = plan_stages(*costs, devices, states, schedule, links, owners=owners)
    except DoesNotFit as short:
        unlimited = [device._replace(memory_bytes=inf) for device in devices]
        with suppress(DoesNotFit):
            plan = plan_stages(items, seconds, unlimited, states, schedule, links, owners=owners)
            return model.fewest(plan.boundaries, limits)
        why = "with all its layers recomputed"
        raise DoesNotFit(short.stage, short.stage, short.need_bytes, short.limit_bytes, why) from None
    return model.fewest(plan.boundaries, limits)


def _refined(
    model: SharedRecomputable,
    start: Sequence[int],
    items: Sequence[ItemMemory],
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float],
    *,
    owners: str | None,
) -> RecomputedStages:
    """The fastest stages, found from the boundaries ``start``: others have other layers that must be recomputed."""
    limits = [device.memory_bytes for device in devices]

    def fits(cuts: Sequence[int]) -> bool:
        try:
            model.fewest(cuts, limits)
        except DoesNotFit:
            return False
        return True

    def plan_of(cuts: Sequence[int], *, compare_orders: bool) -> RecomputedStages:
        boundaries, again = model.fewest(cuts, limits)
        costs = recomputed(items, again), recomputed_s(seconds, again)
        plan = plan_of_boundaries(
            boundaries, *costs, devices, states, schedule, links, owners=owners, compare_orders=compare_orders
        )
        return RecomputedStages(plan, again)

    def step_s(cuts: Sequence[int]) -> float:
        return plan_of(cuts, compare_orders=False).plan.step_s

    cuts, _ = refine(start, step_s, fits=fits, budget=budget_of(schedule))
    return plan_of(cuts, compare_orders=True)
