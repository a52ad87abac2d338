"""The schedule that ``"adaptive"`` would choose for a pipeline that is predicted, with one stage a device or two.

Candidates are the tuner's, but for orders that are made for measured costs. Unless splitting a backward was measured,
half of one, without what it recomputes, counts as gradients of weights; what these need counts as all that the
micro-batch kept before or, where it is recomputed, as the factors of its products. What a device sends at a time shares
its rate: activations one way and gradients the other, and with two stages a device those of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite

from ..schedules.costs import Costs
from ..schedules.families import ZBV, v_route
from ..schedules.schedule import Schedule
from ..schedules.simulate import peak_bytes
from ..schedules.split_families import SPLIT_FAMILIES
from .candidates import FEW, IN_V, SLACKS, SPLIT_IN_LINE, Candidate, candidates, that_fit
from .choose import Planner, Prediction
from .cluster import Cluster
from .gradient_costs import GradientCosts
from .memory import ItemMemory, StageMemory, again_bytes, stage_memory
from .strategy import MEMORY, NEAR, Dropped, Plan, Ranking, faster_cut, in_slices, may_share_head, plan_of
from .strategy_costs import (
    SIMULATED_ACTIONS,
    TERMS,
    compute_terms,
    pipeline_costs,
    rooms_of,
    times_of_stages,
    with_again,
    with_bubble,
)
from .strategy_memory import even_boundaries, fewest_recomputed, live_micro_batches, memory_of_devices, share_of
from .strategy_shape import ONE_F_ONE_B, PipelineSchedule, Strategy
from .strategy_times import ItemTime, item_times
from .workload import Workload

ADAPTIVE = "adaptive"
TWO_CHUNKS = PipelineSchedule(ADAPTIVE, chunks=2)


def with_best_schedule(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Plan, str]:
    """The plan with the fastest schedule of one stage a device that ``"adaptive"`` may choose, and that one's name.

    A pipeline of too many actions to be simulated keeps 1F1B, as has one that is not flushed its own order.
    """
    strategy, count = plan.strategy, plan.micro_batches
    stages, size = strategy.pipeline, workload.micro_batch_size
    if stages == 1 or _is_long(stages, count) or plan.schedule != ONE_F_ONE_B:
        return plan, plan.schedule.type
    times = item_times(strategy, workload, cluster)
    weights_s = _weights_s(workload, times)
    held = times_of_stages(workload, times, plan.boundaries)
    live = live_micro_batches(stages, count)
    each = [need.activations / number for need, number in zip(plan.memory, live, strict=True)]
    share = share_of(strategy, workload)
    costs = replace(
        pipeline_costs(strategy, workload, cluster, plan.boundaries, held),
        weight_s=_by_stage(weights_s, plan.boundaries),
        split_factor=workload.stage.split_factor,
        activation_bytes=tuple(each),
        deferred_bytes=_deferred(share.items, plan.boundaries, each),
    )
    rooms, own = rooms_of(plan.memory, cluster.memory_bytes), [[stage] for stage in range(stages)]
    costs = with_again(costs, strategy, workload, share, times, plan.boundaries, rooms, own)
    costs = _sharing_what_is_sent(costs, range(stages))
    room = _room(plan.memory, cluster)
    slacks = SLACKS if stages * count <= FEW else (0.0, 1.0)
    samples = count * size
    known = candidates(stages, samples, [size], {size: each}, room, configured=size, slacks=slacks)
    known = (*known, *that_fit(SPLIT_IN_LINE, stages, samples, {size: costs}, room))
    best = _fastest(known, stages, samples, costs)
    terms = with_bubble(plan.terms, best.step_s)
    if best.candidate.family:
        gradients = GradientCosts(strategy, workload, cluster, share_of(strategy, workload))
        after = gradients.terms_of_split(weights_s, plan.boundaries, [(stage,) for stage in range(stages)])
        terms |= dict(zip(TERMS[5:], after, strict=True))
    order = best.candidate.schedule(stages, samples)
    assert isinstance(order, Schedule)
    kept = peak_bytes(order, replace(costs, fixed_bytes=()))
    memory = tuple(replace(need, activations=own) for need, own in zip(plan.memory, kept, strict=True))
    return replace(plan, terms=terms, memory=memory, schedule=PipelineSchedule(ADAPTIVE)), _name(best)


def with_two_chunks(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    *,
    micro_batches: int,
    within_s: float = inf,
    recomputed: Callable[[], Workload] | None = None,
) -> tuple[Plan, str] | Dropped | None:
    """A pipeline whose devices hold two stages each, along the devices and back, with the fastest of its schedules.

    Args:
        within_s: a step that certainly takes longer is not simulated.
        recomputed: as in :func:`~paceline.planning.strategy.search`.

    Returns:
        The plan and the name of its schedule; why it cannot be; or None: it takes longer than ``within_s``, or is too
        long to be simulated.
    """
    stages, size = strategy.pipeline, workload.micro_batch_size
    if not may_have_two_chunks(workload, stages) or _is_long(stages, micro_batches):
        return None
    route, in_v = v_route(stages), SPLIT_FAMILIES[ZBV](stages, micro_batches)
    share, times = share_of(strategy, workload, TWO_CHUNKS), item_times(strategy, workload, cluster)
    boundaries = even_boundaries(times, route, workload.work)
    if recomputed is not None and strategy.tensor == 1:
        again = fewest_recomputed(share, boundaries, in_v, cluster.memory_bytes)
        if again:
            workload = workload.with_recomputed(recomputed(), again)
            share, times = share_of(strategy, workload, TWO_CHUNKS), item_times(strategy, workload, cluster)
    weights_s = _weights_s(workload, times, head_is_tied=bool(workload.tied_parameters))
    stage_times = times_of_stages(workload, times, boundaries)
    held = [(rank, 2 * stages - 1 - rank) for rank in range(stages)]
    computed = [[time for stage in own for time in stage_times[stage]] for own in held]
    terms = compute_terms(max(computed, key=lambda items: sum(item.total_s for item in items)), micro_batches)
    gradients = GradientCosts(strategy, workload, cluster, share)
    after = dict(zip(TERMS[5:], gradients.terms_of_split(weights_s, boundaries, held), strict=True))
    each = [stage_memory(share.items, boundaries, stage, share.dense, 1).activations for stage in range(2 * stages)]
    costs = pipeline_costs(strategy, workload, cluster, boundaries, stage_times, route)
    weight_s, factor = _by_stage(weights_s, boundaries), workload.stage.split_factor
    deferred = _deferred(share.items, boundaries, each)
    costs = replace(
        costs, weight_s=weight_s, split_factor=factor, activation_bytes=tuple(each), deferred_bytes=deferred
    )
    costs = with_again(costs, strategy, workload, share, times, boundaries, [inf] * stages, held)
    if _least_s(costs, stages, micro_batches) + sum(after.values()) >= within_s:
        return None
    first = memory_of_devices(share, boundaries, in_v)
    number, most = max(enumerate(first), key=lambda entry: entry[1].total)
    if most.total > cluster.memory_bytes:
        text = f"rank {number} needs {most.total / 2**30:.4g} GiB of {cluster.memory_bytes / 2**30:.4g} GiB"
        return Dropped(strategy, MEMORY, text, TWO_CHUNKS)
    rooms = rooms_of(first, cluster.memory_bytes)
    costs = with_again(costs, strategy, workload, share, times, boundaries, rooms, held)
    samples = micro_batches * size
    known = that_fit(IN_V, stages, samples, {size: costs}, _room(first, cluster))
    best = _fastest(known, stages, samples, _sharing_what_is_sent(costs, route))
    order = best.candidate.schedule(stages, samples)
    assert isinstance(order, Schedule)
    memory = first if best.candidate.family == ZBV else memory_of_devices(share, boundaries, order)
    terms = with_bubble(terms, best.step_s)
    plan = Plan(
        *(strategy, boundaries, micro_batches, memory, terms | after, True, TWO_CHUNKS),
        *(workload.recomputed, workload.blocks_per_layer),
    )
    return plan, _name(best)


def may_have_two_chunks(workload: Workload, stages: int) -> bool:
    """Whether so many devices may hold two stages each: each stage has a layer."""
    return 1 < stages <= workload.num_layers // 2


def with_best_schedules(
    ranking: Ranking,
    workload: Workload,
    cluster: Cluster,
    recomputed: Callable[[], Workload] | None = None,
    sliced: Workload | None = None,
) -> Ranking:
    """The ranking of all plans :func:`with_best_schedule`, with the head in slices or whole as is faster then, and of
    pipelines :func:`with_two_chunks` that are clearly faster than with one stage a device.

    Args:
        recomputed: as in :func:`~paceline.planning.strategy.search`.
        sliced: likewise.
    """

    def of(plan: Plan) -> Workload:
        if sliced is not None and plan.head_slices > 1:
            return sliced
        if recomputed is None or not plan.recomputes:
            return workload
        return workload.with_recomputed(recomputed(), plan.recomputed)

    def best(plan: Plan | Dropped) -> Plan | Dropped:
        return plan if isinstance(plan, Dropped) else with_best_schedule(plan, of(plan), cluster)[0]

    def best_cut(plan: Plan) -> Plan:
        """With its fastest schedule another cut of the head may be the faster one."""
        found = best(plan)
        if sliced is not None and may_share_head(plan.strategy, plan.schedule):
            if plan.head_slices > 1:
                found = faster_cut(best(plan_of(plan.strategy, workload, cluster, recomputed=recomputed)), found)
            else:
                found = faster_cut(found, best(in_slices(plan.strategy, workload, sliced, cluster)))
        assert isinstance(found, Plan), "one of both is the plan"
        return found

    found = [best_cut(plan) for plan in ranking.plans]
    for plan in tuple(found):
        if plan.schedule.flushes:
            within_s, count = (1 - NEAR) * plan.step_s, plan.micro_batches
            more = with_two_chunks(
                plan.strategy, workload, cluster, micro_batches=count, within_s=within_s, recomputed=recomputed
            )
            if more is not None and not isinstance(more, Dropped) and more[0].step_s < within_s:
                found.append(more[0])
    return replace(ranking, plans=tuple(sorted(found, key=lambda plan: (plan.step_s, plan.strategy, plan.schedule))))


def _is_long(stages: int, micro_batches: int) -> bool:
    return 2 * stages * micro_batches > SIMULATED_ACTIONS


def _fastest(known: Sequence[Candidate], stages: int, samples: int, costs: Costs) -> Prediction:
    """The fastest; among equals the first. Where messages share what a device sends, no step gets shorter by it: the
    simulation without, which takes a third of the time, tells which need not be looked at."""
    planner = Planner(known, stages, samples)
    alone = replace(costs, hosts=(), egress_bytes_per_s=())
    found = sorted((planner.predict(candidate, alone) for candidate in known), key=lambda each: each.step_s)
    if not costs.hosts:
        return found[0]
    best = planner.predict(found[0].candidate, costs)
    for bound in found[1:]:
        if bound.step_s >= best.step_s:
            break
        best = min(best, planner.predict(bound.candidate, costs), key=lambda each: each.step_s)
    return best


def _least_s(costs: Costs, stages: int, micro_batches: int) -> float:
    """Seconds that no order in V goes below: a device begins when a micro-batch has come to it, and has its work, with
    no activations that are computed again."""
    filled_s = least_s = 0.0
    again_s = (0.0,) * len(costs.forward_s) if costs.again is None else costs.again.seconds
    for rank in range(stages):
        own = (rank, 2 * stages - 1 - rank)
        work_s = sum(costs.forward_s[stage] + costs.backward_s[stage] - again_s[stage] for stage in own)
        least_s = max(least_s, filled_s + micro_batches * work_s)
        link = costs.down[rank]
        filled_s += costs.forward_s[rank] + costs.message_bytes[rank] / link.bytes_per_s + link.latency_s
    return least_s


def _sharing_what_is_sent(costs: Costs, route: Sequence[int]) -> Costs:
    """Costs where all that a device sends at a time shares the rate of its fastest link."""
    rates: dict[int, float] = {}
    for stage, (here, there) in enumerate(pairwise(route)):
        if here != there:
            for rank, link in ((here, costs.down[stage]), (there, costs.up[stage])):
                rates[rank] = max(rates.get(rank, 0.0), link.bytes_per_s)
    if len(route) < 3 or not any(map(isfinite, rates.values())):
        return costs  # each device sends to one, or nothing takes time
    ranks = range(max(route) + 1)
    return replace(costs, hosts=tuple(ranks), egress_bytes_per_s=tuple(rates[rank] for rank in ranks))


def _weights_s(workload: Workload, times: Sequence[ItemTime], *, head_is_tied: bool = False) -> list[float]:
    """Seconds of each item's gradients of weights. A head that is tied to an embedding of its device has them with
    those of inputs; a backward that recomputes has a forward besides."""
    share, again = workload.stage.weight_share * workload.states.trained, set(workload.recomputed)
    found = []
    for index, time in enumerate(times):
        forward_s, backward_s = (dense + experts for dense, experts in zip(time.dense, time.experts, strict=True))
        found.append(share * max(backward_s - forward_s * (index in again), 0.0))
    return [*found[:-1], 0.0 if head_is_tied else found[-1]]


def _deferred(items: Sequence[ItemMemory], boundaries: Sequence[int], kept: Sequence[float]) -> tuple[float, ...]:
    """Bytes that a micro-batch leaves for later on each stage.

    Args:
        kept: before.
    """
    return tuple(own + again_bytes(items, boundaries, stage) for stage, own in enumerate(kept))


def _by_stage(seconds: Sequence[float], boundaries: Sequence[int]) -> tuple[float, ...]:
    return tuple(sum(seconds[first:end]) for first, end in pairwise(boundaries))


def _room(memory: Sequence[StageMemory], cluster: Cluster) -> list[float]:
    """Bytes for activations on each device."""
    return [cluster.memory_bytes - (need.total - need.activations) for need in memory]


def _name(best: Prediction) -> str:
    return best.candidate.name.partition(",")[0]
