"""Predicted time of a training step of a strategy, by what it is spent on.

Stages compute and exchange as :mod:`~paceline.planning.strategy_times` says; a pipeline of few actions is simulated, a
longer one follows a formula; without a flush a step is one of the steady state, by simulation. Then gradients are
summed and states stepped, as :mod:`~paceline.planning.gradient_costs` says. That this may be hidden behind the next
step where there is no flush is not modelled.

Legend: t, p, d, ep, edp of :class:`~paceline.planning.strategy_shape.Strategy`; M micro-batches of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ..schedules.costs import Costs, Link
from ..schedules.directions import stages_of
from ..schedules.families import one_f_one_b
from ..schedules.simulate import simulate
from ..schedules.steady import period
from ..schedules.stream import Stream
from .cluster import Cluster, Fabric
from .gradient_costs import GradientCosts
from .kept_activations import of_one_stage_a_rank
from .memory import StageMemory
from .recomputation import again_of
from .strategy_memory import Share, live_micro_batches, memory_of
from .strategy_shape import Strategy
from .strategy_times import ItemTime
from .workload import Workload

SIMULATED_ACTIONS = 2048
"""Forwards and backwards of a pipeline that is simulated; more follow the formula."""

UNEVEN = 2.0
"""How many times as much room as at first a rank has for what it keeps where experts may be busier later."""

TERMS = ("dense", "experts", "all_to_all", "tensor", "bubble", "gradients", "expert_gradients", "optimizer")
"""Terms that a step is made of."""


def step_terms(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    share: Share,
    times: Sequence[ItemTime],
    boundaries: Sequence[int],
    micro_batches: int,
    stream: Stream | None = None,
) -> tuple[dict[str, float], bool]:
    """Seconds by :data:`TERMS`, and whether the pipeline was simulated.

    Args:
        stream: of a pipeline without a flush; with fewer micro-batches a step, it repeats as often. None: 1F1B.
    """
    stages = times_of_stages(workload, times, boundaries)
    costs = pipeline_costs(strategy, workload, cluster, boundaries, stages)
    if stream is None and workload.recomputed:
        memory, live = memory_of(share, boundaries, micro_batches), live_micro_batches(len(stages), micro_batches)
        each = tuple(need.activations / number for need, number in zip(memory, live, strict=True))
        rooms, own = rooms_of(memory, cluster.memory_bytes), [[stage] for stage in range(len(stages))]
        costs = with_again(
            replace(costs, activation_bytes=each), strategy, workload, share, times, boundaries, rooms, own
        )
        costs = of_one_stage_a_rank(costs, live)
    simulated = stream is not None or 2 * strategy.pipeline * micro_batches <= SIMULATED_ACTIONS
    if stream is not None:
        pipeline_s = period(stream, _of_slowest_link(costs, stream)) * micro_batches / stream.num_micro_batches
    elif simulated:
        pipeline_s = simulate(one_f_one_b(strategy.pipeline, micro_batches), costs).makespan_s
    else:
        pipeline_s = one_f_one_b_s(costs, micro_batches)
    routes = (tuple(range(strategy.pipeline)),) if stream is None else stream.routes
    held = [stages_of(device, routes) for device in range(strategy.pipeline)]
    computed = [[item for stage in own for item in stages[stage]] for own in held]
    slowest = max(computed, key=lambda items: sum(item.total_s for item in items))
    terms = compute_terms(slowest, micro_batches // len(routes))
    is_alone = len(stages) == 1 and costs.again is None
    terms = {**terms, "bubble": 0.0} if is_alone else with_bubble(terms, pipeline_s)
    gradients = GradientCosts(strategy, workload, cluster, share)
    after = gradients.terms(times, boundaries, held, costs, flushes=stream is None)
    return terms | dict(zip(TERMS[5:], after, strict=True)), simulated


def times_of_stages(
    workload: Workload, times: Sequence[ItemTime], boundaries: Sequence[int]
) -> list[Sequence[ItemTime]]:
    """Times of the items of each stage, and behind them what it takes beside them."""
    beside = ItemTime((workload.stage.forward_s, workload.stage.backward_s), (0.0, 0.0), 0.0, 0.0)
    return [(*times[first:end], beside) for first, end in pairwise(boundaries)]


def compute_terms(items: Sequence[ItemTime], micro_batches: int) -> dict[str, float]:
    """Seconds in which a device with these items is busy with so many micro-batches, by the first of :data:`TERMS`."""
    return {
        "dense": micro_batches * sum(sum(item.dense) for item in items),
        "experts": micro_batches * sum(sum(item.experts) for item in items),
        "all_to_all": micro_batches * sum(item.all_to_all for item in items),
        "tensor": micro_batches * sum(item.tensor for item in items),
    }


def _of_slowest_link(costs: Costs, stream: Stream) -> Costs:
    """Links of the pipeline. With several directions the slowest link counts for all boundaries."""
    if len(stream.routes) == 1:
        return costs
    size = max(costs.message_bytes)
    slowest = (max(costs.down, key=lambda link: size / link.bytes_per_s + link.latency_s),) * len(costs.down)
    return replace(costs, down=slowest, up=slowest)


def with_bubble(terms: Mapping[str, float], pipeline_s: float) -> dict[str, float]:
    """The first of :data:`TERMS`, and what the pipeline takes beyond them. It takes less where the slowest device keeps
    what its backwards would compute again.
    """
    rest_s = pipeline_s - sum(terms[name] for name in TERMS[:4])
    return {**terms, "dense": terms["dense"] + min(rest_s, 0.0), "bubble": max(rest_s, 0.0)}


def pipeline_costs(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    boundaries: Sequence[int],
    stages: Sequence[Sequence[ItemTime]],
    route: Sequence[int] = (),
) -> Costs:
    """Costs for the simulator. Each tensor-parallel rank sends the whole activation to its peer of the next stage.

    Args:
        route: place of each stage in the pipeline; neighbours or the same. Empty: one stage each.
    """
    width = strategy.tensor * strategy.data
    fabrics = [cluster.link(place * width, (place + 2) * width - 1) for place in range(strategy.pipeline - 1)]
    hops = pairwise(route or range(strategy.pipeline))
    links = tuple(Link() if here == there else _link(fabrics[min(here, there)]) for here, there in hops)
    return Costs(
        forward_s=tuple(sum(item.forward_s for item in stage) for stage in stages),
        backward_s=tuple(sum(item.backward_s for item in stage) for stage in stages),
        message_bytes=tuple(workload.items[end - 1].memory.output_bytes for end in boundaries[1:-1]),
        down=links,
        up=links,
    )


def with_again(
    costs: Costs,
    strategy: Strategy,
    workload: Workload,
    share: Share,
    times: Sequence[ItemTime],
    boundaries: Sequence[int],
    rooms: Sequence[float],
    stages: Sequence[Sequence[int]],
) -> Costs:
    """Costs of pipelines that keep what has room, and compute the rest again while they wait for a gradient.

    Without a pipeline, tensor parallelism is DeepSpeed's own engine's, and nothing changes.

    Args:
        rooms: bytes of each device for what is alive.
        stages: of each device.
    """
    if not workload.recomputed or strategy.tensor > 1 == strategy.pipeline:
        return costs
    is_collective = strategy.expert > 1 or strategy.tensor > 1
    again = again_of(
        share.items,
        [time.dense[0] + time.experts[0] for time in times],
        workload.recomputed,
        boundaries,
        [room / UNEVEN for room in rooms] if is_collective else rooms,
        stages,
        is_collective=is_collective,
    )
    return replace(costs, again=again)


def rooms_of(memory: Sequence[StageMemory], memory_bytes: float) -> list[float]:
    """Bytes of each device for what is alive."""
    return [memory_bytes - need.total + need.activations for need in memory]


def _link(fabric: Fabric) -> Link:
    return Link(fabric.bytes_per_s, fabric.latency_s)


def one_f_one_b_s(costs: Costs, micro_batches: int) -> float:
    """Seconds of a step of 1F1B without simulating it; exact where stages are alike and messages take no time.

    With stages that need ``f_s + b_s``, messages of ``c_s`` each way over boundary s, and n_s = min(M, p − s)
    micro-batches in flight from stage s on, a micro-batch leaves the pipeline every

        T = max over s of max{ f_s + b_s, (Σ_{r≥s} (f_r + b_r) + 2 Σ_{r≥s} c_r) / n_s }

    seconds (no more than n_s of them fit into the round trip from stage s to the end and back), and the first one
    takes the whole round trip: ``(M − 1) · T + Σ (f_s + b_s) + 2 Σ c_s``.
    What runs before its gradient is there does not count on round trips, but for the last stage's.
    """
    times = [forward + backward for forward, backward in zip(costs.forward_s, costs.backward_s, strict=True)]
    sent = [
        size / link.bytes_per_s + link.latency_s for size, link in zip(costs.message_bytes, costs.down, strict=True)
    ]
    stages = len(times)
    period = max(times)
    round_trip = 0.0
    for stage in range(stages - 1, -1, -1):
        round_trip += times[stage]
        if stage < stages - 1:
            round_trip += 2 * sent[stage] - (costs.ahead_s[stage] if costs.ahead_s else 0.0)
        if micro_batches > stages - stage:
            period = max(period, round_trip / (stages - stage))
    return (micro_batches - 1) * period + round_trip
