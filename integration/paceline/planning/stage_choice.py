"""Number of pipeline stages for a cluster that was measured: the ranks beyond them are replicas.

All options train on the same samples a step, so the choice changes how long a step takes and nothing of what it learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from .candidates import FEW, SLACKS, Candidate, candidates
from .choose import Planner
from .cluster import Cluster
from .strategy import Dropped, Plan, Ranking, plan_of
from .strategy_costs import SIMULATED_ACTIONS, pipeline_costs
from .strategy_memory import live_micro_batches
from .strategy_shape import ONE_F_ONE_B, PipelineSchedule, Strategy
from .strategy_times import item_times
from .workload import Workload

NEAR = 0.03
"""Share of a step by which an option must be faster than the usual one: two measurements differ by as much."""

ADAPTIVE = "adaptive"


class Option(NamedTuple):
    """Stages times replicas, and what is predicted of them.

    Args:
        step_s: seconds of a step.
        order: name of the schedule that was predicted.
        memory_bytes: of the fullest device.
        why_not: it cannot be; empty: it can.
    """

    stages: int
    data_parallel: int
    micro_batch_size: int
    micro_batches: int
    step_s: float = inf
    order: str = ""
    memory_bytes: float = inf
    why_not: str = ""

    @property
    def text(self) -> str:
        """A line for people."""
        shape = f"{self.stages} stage{'s' * (self.stages > 1)}"
        shape += f" x {self.data_parallel} replicas" if self.data_parallel > 1 else ""
        if self.why_not:
            return f"{shape}: {self.why_not}"
        order = f", {self.order}" if self.stages > 1 else ""
        batches = f"{self.micro_batches} micro-batches of {self.micro_batch_size}"
        return f"{shape}: {self.step_s:.4g} s a step of {batches}{order}, {self.memory_bytes / 2**30:.3g} GiB"


def predicted(option: Option, workload: Workload, cluster: Cluster, *, expert: int = 1, tuned: bool = False) -> Option:
    """The option with its step time and memory, or the reason why it cannot be.

    Args:
        workload: with the option's micro-batches.
        expert: devices among which experts are spread.
        tuned: the schedule is chosen; otherwise it is 1F1B.
    """
    if option.data_parallel % expert:
        why = f"its {option.data_parallel} replicas cannot share experts among {expert}"
        return option._replace(why_not=why)
    plan = plan_of(Strategy(1, option.stages, option.data_parallel, expert), workload, cluster)
    if isinstance(plan, Dropped):
        return option._replace(why_not=plan.text)
    order = ONE_F_ONE_B.type
    if tuned:
        plan, order = with_best_schedule(plan, workload, cluster)
    fullest = max(stage.total for stage in plan.memory)
    return option._replace(step_s=plan.step_s, order=order, memory_bytes=fullest)


def with_best_schedule(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Plan, str]:
    """The plan with the fastest schedule that ``"adaptive"`` may begin to choose from, and the name of that one.

    A pipeline of too many actions to be simulated keeps 1F1B, as has one that is not flushed its own order.
    """
    strategy, count = plan.strategy, plan.micro_batches
    stages, size = strategy.pipeline, workload.micro_batch_size
    is_long = 2 * stages * count > SIMULATED_ACTIONS
    if stages == 1 or is_long or plan.schedule != ONE_F_ONE_B:
        return plan, plan.schedule.type
    times = item_times(strategy, workload, cluster)
    held = [times[first:end] for first, end in pairwise(plan.boundaries)]
    costs = pipeline_costs(strategy, workload, cluster, plan.boundaries, held)
    live = live_micro_batches(stages, count)
    each = [need.activations / number for need, number in zip(plan.memory, live, strict=True)]
    room = [cluster.memory_bytes - (need.total - need.activations) for need in plan.memory]
    slacks = SLACKS if stages * count <= FEW else (0.0, 1.0)
    known = candidates(stages, count * size, [size], {size: each}, room, configured=size, slacks=slacks)
    planner = Planner(known, stages, count * size)
    first_s = planner.predict(Candidate(size), costs).step_s
    best = min((planner.predict(candidate, costs) for candidate in known), key=lambda found: found.step_s)
    terms: Mapping[str, float] = {**plan.terms, "bubble": max(plan.terms["bubble"] + best.step_s - first_s, 0.0)}
    peaks = best.candidate.peak_activations(stages, count * size)
    memory = tuple(
        replace(need, activations=own * peak) for need, own, peak in zip(plan.memory, each, peaks, strict=True)
    )
    name = best.candidate.name.partition(",")[0]
    return replace(plan, terms=terms, memory=memory, schedule=PipelineSchedule(ADAPTIVE)), name


def with_best_schedules(ranking: Ranking, workload: Workload, cluster: Cluster) -> Ranking:
    """The ranking of all plans :func:`with_best_schedule`."""
    found = [with_best_schedule(plan, workload, cluster)[0] for plan in ranking.plans]
    return replace(ranking, plans=tuple(sorted(found, key=lambda plan: (plan.step_s, plan.strategy, plan.schedule))))


def choose(options: Sequence[Option], usual: int) -> Option | None:
    """The fastest; of those that are nearly as fast the one with the ``usual`` number of stages, else with the fewest.

    None: none of them can be.
    """
    possible = [option for option in options if not option.why_not]
    if not possible:
        return None
    limit = min(option.step_s for option in possible) * (1 + NEAR)
    near = [option for option in possible if option.step_s <= limit]
    return min(near, key=lambda option: (option.stages != usual, option.stages))


def slowdown(seconds: Sequence[float], stages: int, *, follows_speed: bool, shares_by_speed: bool = False) -> float:
    """Seconds of a pipeline's layers by their mean over all ranks, where ranks are not equally fast.

    Args:
        seconds: that each rank takes for the same layers; the ranks of a stage are neighbours.
        follows_speed: stages get layers by the speed of their slowest device; otherwise all get as many.
        shares_by_speed: replicas get micro-batches by their speed; otherwise all wait for the slowest.
    """
    replicas, mean = len(seconds) // stages, sum(seconds) / len(seconds)
    of_stages = [seconds[first : first + replicas] for first in range(0, len(seconds), replicas)]
    layers = [1 / max(own) if follows_speed else 1.0 for own in of_stages]
    each = stages / sum(layers)
    bottlenecks = [
        max(each * part * own[replica] for part, own in zip(layers, of_stages, strict=True))
        for replica in range(replicas)
    ]
    if not shares_by_speed:
        return max(bottlenecks) / mean
    return replicas / sum(mean / seconds for seconds in bottlenecks)


def scaled(workload: Workload, factor: float) -> Workload:
    """The workload on devices that take ``factor`` times as long."""
    items = tuple(
        item._replace(
            forward_s=item.forward_s * factor,
            backward_s=item.backward_s * factor,
            expert_s=(item.expert_s[0] * factor, item.expert_s[1] * factor),
        )
        for item in workload.items
    )
    return replace(workload, items=items)
