"""The search over parallel strategies: all ways to use N devices, those that fit, and how long a step of each takes.

Source: ``expert placement``, claims 1 and 2 of the seed system: permute tensor, data, pipeline and expert parallelism
over the devices, predict each by what the gate permits or what its load is, and keep the best. Within one strategy
every device has room for a fixed number of experts; which ones they are is the placement's business, and may change
while training goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from ..schedules.asynchronous import MULTIDIRECTION
from .blocks import DoesNotFit
from .cluster import Cluster
from .divisors import divisors
from .memory import StageMemory
from .strategy_costs import step_terms
from .strategy_memory import boundaries_of, memory_of, share_of, stages_without_flush
from .strategy_shape import ONE_F_ONE_B, PipelineSchedule, Strategy, late_schedules
from .strategy_times import item_times
from .workload import Workload

BATCH, MEMORY = "batch", "memory"
"""Reasons for which a strategy is dropped."""


class Dropped(NamedTuple):
    """A strategy that cannot be, and why.

    Args:
        reason: :data:`BATCH` or :data:`MEMORY`.
        text: the same with its numbers.
    """

    strategy: Strategy
    reason: str
    text: str
    schedule: PipelineSchedule = ONE_F_ONE_B

    @property
    def name(self) -> str:
        """The name, as :attr:`Plan.name`."""
        return self.strategy.name + self.schedule.suffix


@dataclass(frozen=True)
class Plan:
    """One strategy, predicted.

    Args:
        boundaries: of the stages, over items.
        micro_batches: M of a pipeline.
        memory: of each stage; of each device, where it holds several.
        terms: seconds by :data:`~paceline.planning.strategy_costs.TERMS`; they add up to the step. The first four are
            of the slowest device; bubble is what the pipeline takes beyond that, messages between stages among it.
        simulated: whether the pipeline was; else by formula.
        schedule: of the pipeline; without a flush the step is one of the steady state.
        recomputes: backwards compute the layers' activations anew.
    """

    strategy: Strategy
    boundaries: tuple[int, ...]
    micro_batches: int
    memory: tuple[StageMemory, ...]
    terms: Mapping[str, float]
    simulated: bool
    schedule: PipelineSchedule = ONE_F_ONE_B
    recomputes: bool = False

    @property
    def name(self) -> str:
        """``tp1_pp2_dp2_ep2``, and behind it a schedule other than 1F1B: ``tp1_pp4_dp1_ep1_multidirection2``."""
        return self.strategy.name + self.schedule.suffix

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Ranking:
    """All strategies of a cluster, the fastest first, and those that were dropped."""

    plans: tuple[Plan, ...]
    dropped: tuple[Dropped, ...]

    @property
    def num_dropped(self) -> dict[str, int]:
        """Number of dropped strategies by reason."""
        return dict(Counter(dropped.reason for dropped in self.dropped))


def strategies(
    num_devices: int, *, num_layers: int, num_heads: int = 1, num_kv_heads: int = 1, num_experts: int = 0
) -> Iterator[Strategy]:
    """Every (t, p, d, ep, edp) with t·p·d = N, ep·edp = d, ep ≤ E, t | heads, t | kv heads, p ≤ layers; once.

    Raises:
        ValueError: a number that must be at least 1 is not.
    """
    for name, value in (("num_devices", num_devices), ("num_layers", num_layers), ("num_heads", num_heads)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give a whole number from 1 upwards.")
    for tensor in divisors(num_devices):
        if num_heads % tensor or num_kv_heads % tensor:
            continue
        for pipeline in divisors(num_devices // tensor):
            if pipeline > num_layers:
                continue
            data = num_devices // tensor // pipeline
            for expert in divisors(data):
                if expert <= max(1, num_experts):
                    yield Strategy(tensor, pipeline, data, expert)


def search(
    workload: Workload,
    cluster: Cluster,
    late: Collection[str] = (),
    recomputed: Callable[[], Workload] | None = None,
) -> Ranking:
    """All strategies, predicted. Among equally fast ones those with fewer kinds of parallelism come first.

    Args:
        late: types of schedule without a flush that are tried beside 1F1B.
        recomputed: the same workload with layers that are recomputed, for strategies that do not fit otherwise. Models
            with experts have no schedule without a flush then.

    Raises:
        ValueError: a step takes longer than a number can say.
    """
    plans: list[Plan] = []
    dropped: list[Dropped] = []
    found = strategies(
        cluster.num_devices,
        num_layers=workload.num_layers,
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
        num_experts=workload.num_experts,
    )
    late = () if workload.recomputes and workload.num_experts else late
    for strategy in found:
        for schedule in (ONE_F_ONE_B, *late_schedules(strategy, late)):
            plan = plan_of(strategy, workload, cluster, schedule)
            may_recompute = recomputed is not None and (schedule.flushes or not workload.num_experts)
            if recomputed is not None and may_recompute and isinstance(plan, Dropped) and plan.reason == MEMORY:
                plan = plan_of(strategy, recomputed(), cluster, schedule)
            if isinstance(plan, Dropped):
                dropped.append(plan)
            else:
                plans.append(plan)
    plans.sort(key=lambda plan: (plan.step_s, plan.strategy, plan.schedule))
    return Ranking(tuple(plans), tuple(dropped))


def plan_of(
    strategy: Strategy, workload: Workload, cluster: Cluster, schedule: PipelineSchedule = ONE_F_ONE_B
) -> Plan | Dropped:
    """One strategy: its partition, memory and step time, or why it cannot be.

    Raises:
        ValueError: a step takes longer than a number can say.
    """
    samples = workload.micro_batch_size * strategy.data
    if workload.train_batch_size % samples:
        return Dropped(
            strategy,
            BATCH,
            f"{workload.train_batch_size} samples a step are no multiple of {samples} (micro-batch "
            f"{workload.micro_batch_size} x data parallel {strategy.data})",
            schedule,
        )
    micro_batches = workload.train_batch_size // samples
    if schedule.type == MULTIDIRECTION and micro_batches % strategy.pipeline:
        text = f"{micro_batches} micro-batches a step are no multiple of {strategy.pipeline} stages"
        return Dropped(strategy, BATCH, text, schedule)
    share, times = share_of(strategy, workload, schedule), item_times(strategy, workload, cluster)
    _check_finite(sum(time.total_s for time in times))
    stream = schedule.stream(strategy.pipeline, micro_batches)
    if stream is None:
        boundaries = boundaries_of(share, times, strategy.pipeline, cluster.memory_bytes, micro_batches)
        memory = memory_of(share, boundaries, micro_batches)
    else:
        try:
            boundaries, memory = stages_without_flush(share, times, schedule, stream, cluster.memory_bytes)
        except DoesNotFit as short:
            return _too_large(strategy, schedule, short.stage, short.need_bytes, workload, cluster)
    stage, most = max(enumerate(memory), key=lambda entry: entry[1].total)
    if most.total > cluster.memory_bytes:
        return _too_large(strategy, schedule, stage, most.total, workload, cluster)
    terms, simulated = step_terms(strategy, workload, cluster, share, times, boundaries, micro_batches, stream)
    _check_finite(sum(terms.values()))
    return Plan(strategy, boundaries, micro_batches, memory, terms, simulated, schedule, workload.recomputes)


def _too_large(
    strategy: Strategy, schedule: PipelineSchedule, stage: int, need_bytes: float, workload: Workload, cluster: Cluster
) -> Dropped:
    where = "device" if schedule.directions > 1 else "stage"
    text = f"{where} {stage} needs {need_bytes / 2**30:.4g} GiB of {cluster.memory_bytes / 2**30:.4g} GiB"
    text += " although layers are recomputed" if workload.recomputes else ""
    return Dropped(strategy, MEMORY, text, schedule)


def _check_finite(seconds: float) -> None:
    if not isfinite(seconds):
        raise ValueError("a step takes longer than can be computed with: give higher speeds or shorter latencies.")
