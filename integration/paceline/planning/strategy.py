"""The search over parallel strategies: all ways to use N devices, those that fit, and how long a step of each takes.

Source: ``expert placement``, claims 1 and 2 of the seed system: permute tensor, data, pipeline and expert parallelism
over the devices, predict each by what the gate permits or what its load is, and keep the best. Within one strategy
every device has room for a fixed number of experts; which ones they are is the placement's business, and may change
while training goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

from ..schedules.asynchronous import MULTIDIRECTION
from .blocks import Device, DoesNotFit
from .cluster import Cluster
from .divisors import divisors
from .memory import StageMemory
from .recomputation import Recomputable, Recomputation, counts_of_layers
from .strategy_costs import step_terms
from .strategy_memory import boundaries_of, live_micro_batches, memory_of, share_of, stages_without_flush
from .strategy_shape import ONE_F_ONE_B, PipelineSchedule, Strategy, late_schedules
from .strategy_times import item_times
from .workload import Workload

BATCH, MEMORY = "batch", "memory"
"""Reasons for which a strategy is dropped."""

NEAR = 0.03
"""Share of a step by which an option must be faster than the usual one: two measurements differ by as much."""


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
        recomputed: items whose activations backwards compute anew.
        blocks_per_layer: items that a decoder layer is: itself, or its two halves.
        head_slices: items that the head is.
    """

    strategy: Strategy
    boundaries: tuple[int, ...]
    micro_batches: int
    memory: tuple[StageMemory, ...]
    terms: Mapping[str, float]
    simulated: bool
    schedule: PipelineSchedule
    recomputed: tuple[int, ...]
    blocks_per_layer: int
    head_slices: int = 1

    @property
    def recomputes(self) -> bool:
        """Whether any layer is recomputed."""
        return bool(self.recomputed)

    @property
    def recomputed_of_stages(self) -> tuple[int, ...]:
        """Recomputed layers of each stage; where one ends within a layer, both stages count it."""
        return counts_of_layers(self.boundaries, self.recomputed, self.blocks_per_layer)

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
    sliced: Workload | None = None,
) -> Ranking:
    """All strategies, predicted. Among equally fast ones those with fewer kinds of parallelism come first.

    Args:
        late: types of schedule without a flush that are tried beside 1F1B.
        recomputed: the same workload with all layers recomputed, for strategies that do not fit otherwise: of these as
            few layers are as it takes. Models with experts have no schedule without a flush then.
        sliced: the same workload with the head in slices. Stages of 1F1B share them where that is clearly faster, or
            where nothing fits otherwise; not with tensor parallelism, whose ranks share the head already.

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
            plan = plan_of(strategy, workload, cluster, schedule, recomputed)
            if sliced is not None and may_share_head(strategy, schedule):
                plan = faster_cut(plan, in_slices(strategy, workload, sliced, cluster))
            if isinstance(plan, Dropped):
                dropped.append(plan)
            else:
                plans.append(plan)
    plans.sort(key=lambda plan: (plan.step_s, plan.strategy, plan.schedule))
    return Ranking(tuple(plans), tuple(dropped))


def may_share_head(strategy: Strategy, schedule: PipelineSchedule) -> bool:
    """Whether the last stages may share the head in slices."""
    return strategy.tensor == 1 < strategy.pipeline and schedule == ONE_F_ONE_B


def in_slices(strategy: Strategy, workload: Workload, sliced: Workload, cluster: Cluster) -> Plan | Dropped:
    """The plan of 1F1B whose last stages share the head. Workloads as of :func:`search`."""
    plan = _plan_of(strategy, sliced, cluster, ONE_F_ONE_B)
    if isinstance(plan, Dropped):
        return plan
    return replace(plan, head_slices=len(sliced.items) - len(workload.items) + 1)


def faster_cut(whole: Plan | Dropped, finer: Plan | Dropped) -> Plan | Dropped:
    """The ``finer`` one of two plans if it is clearly faster, or nothing else fits; else that of the whole head."""
    if isinstance(finer, Dropped) or (isinstance(whole, Plan) and finer.step_s * (1 + NEAR) > whole.step_s):
        return whole
    return finer


def plan_of(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    schedule: PipelineSchedule = ONE_F_ONE_B,
    recomputed: Callable[[], Workload] | None = None,
) -> Plan | Dropped:
    """One strategy: its partition, memory and step time, or why it cannot be.

    Args:
        recomputed: as of :func:`search`. All layers are recomputed, or none, with tensor parallelism and without a
            flush.

    Raises:
        ValueError: a step takes longer than a number can say.
    """
    plan = _plan_of(strategy, workload, cluster, schedule)
    is_full = isinstance(plan, Dropped) and plan.reason == MEMORY
    if not is_full or recomputed is None or (workload.num_experts and not schedule.flushes):
        return plan
    again, boundaries = recomputed(), None
    if strategy.tensor == 1 and schedule == ONE_F_ONE_B:
        found = _recomputation(strategy, workload, again, cluster)
        if found is not None:
            again, boundaries = workload.with_recomputed(again, found.items), found.boundaries
    return _plan_of(strategy, again, cluster, schedule, boundaries)


def _recomputation(strategy: Strategy, workload: Workload, again: Workload, cluster: Cluster) -> Recomputation | None:
    """The fewest recomputed layers with which the stages of 1F1B fit, and their boundaries; None: nothing fits."""
    kept, times = share_of(strategy, workload), item_times(strategy, workload, cluster)
    micro_batches = workload.train_batch_size // (workload.micro_batch_size * strategy.data)
    states = [
        sum(kept.dense.of(dense)) + sum(kept.of_experts.of(experts))
        for dense, experts in (kept.parameters(index, index + 1) for index in range(len(times)))
    ]
    seconds = [(time.forward_s, time.backward_s) for time in times]
    live = live_micro_batches(strategy.pipeline, micro_batches)
    model = Recomputable(kept.items, share_of(strategy, again).items, states, seconds, live)
    with suppress(DoesNotFit):
        return model.partition([Device(1.0, cluster.memory_bytes)] * strategy.pipeline)
    return None


def _plan_of(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    schedule: PipelineSchedule,
    boundaries: tuple[int, ...] | None = None,
) -> Plan | Dropped:
    """The plan of what ``workload`` says is recomputed, with the boundaries that suit it best if none are given."""
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
        if boundaries is None:
            limits = cluster.memory_bytes, micro_batches
            boundaries = boundaries_of(share, times, strategy.pipeline, *limits, workload.work)
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
    return Plan(
        strategy,
        boundaries,
        micro_batches,
        memory,
        terms,
        simulated,
        schedule,
        workload.recomputed,
        workload.blocks_per_layer,
    )


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
