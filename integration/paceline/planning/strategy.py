"""The search over parallel strategies: all ways to use N devices, those that fit, and how long a step of each takes.

Source: ``expert placement``, claims 1 and 2 of the seed system: permute tensor, data, pipeline and expert parallelism
over the devices, predict each by what the gate permits or what its load is, and keep the best. Within one strategy
every device has a fixed number of experts; which ones they are is the placement's business, and may change while
training goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from .cluster import Cluster
from .memory import StageMemory
from .strategy_costs import step_terms
from .strategy_memory import boundaries_of, memory_of, share_of
from .strategy_shape import Strategy
from .strategy_times import item_times
from .workload import Workload

BATCH, MEMORY = "batch", "memory"
"""Why a strategy is left out."""


class Dropped(NamedTuple):
    """A strategy that cannot be, and why.

    Args:
        reason: :data:`BATCH` or :data:`MEMORY`.
        text: the same with its numbers.
    """

    strategy: Strategy
    reason: str
    text: str


@dataclass(frozen=True)
class Plan:
    """One strategy, predicted.

    Args:
        boundaries: of the stages, over items.
        micro_batches: M of a pipeline.
        memory: of each stage.
        terms: seconds by :data:`~paceline.planning.strategy_costs.TERMS`; they add up to the step. The first four are
            of the slowest stage; bubble is what the pipeline takes beyond that, messages between stages among it.
        simulated: whether the pipeline was; else by formula.
    """

    strategy: Strategy
    boundaries: tuple[int, ...]
    micro_batches: int
    memory: tuple[StageMemory, ...]
    terms: Mapping[str, float]
    simulated: bool

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Ranking:
    """All strategies of a cluster, the fastest first, and those that were left out."""

    plans: tuple[Plan, ...]
    dropped: tuple[Dropped, ...]

    @property
    def num_dropped(self) -> dict[str, int]:
        """By reason."""
        return dict(Counter(dropped.reason for dropped in self.dropped))


def strategies(
    num_devices: int, *, num_layers: int, num_heads: int = 1, num_kv_heads: int = 1, num_experts: int = 0
) -> Iterator[Strategy]:
    """Every (t, p, d, ep, edp) with t·p·d = N, ep·edp = d, E mod ep = 0, t | heads, t | kv heads, p ≤ layers; once.

    Raises:
        ValueError: a number that must be at least 1 is not.
    """
    for name, value in (("num_devices", num_devices), ("num_layers", num_layers), ("num_heads", num_heads)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give a whole number from 1 upwards.")
    for tensor in _divisors(num_devices):
        if num_heads % tensor or num_kv_heads % tensor:
            continue
        for pipeline in _divisors(num_devices // tensor):
            if pipeline > num_layers:
                continue
            data = num_devices // tensor // pipeline
            for expert in _divisors(data):
                if expert == 1 or (num_experts and num_experts % expert == 0):
                    yield Strategy(tensor, pipeline, data, expert)


def search(workload: Workload, cluster: Cluster) -> Ranking:
    """All strategies, predicted. Among equally fast ones those with fewer kinds of parallelism come first.

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
    for strategy in found:
        plan = plan_of(strategy, workload, cluster)
        if isinstance(plan, Dropped):
            dropped.append(plan)
        else:
            plans.append(plan)
    plans.sort(key=lambda plan: (plan.step_s, plan.strategy))
    return Ranking(tuple(plans), tuple(dropped))


def plan_of(strategy: Strategy, workload: Workload, cluster: Cluster) -> Plan | Dropped:
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
        )
    micro_batches = workload.train_batch_size // samples
    share, times = share_of(strategy, workload), item_times(strategy, workload, cluster)
    _check_finite(sum(time.total_s for time in times))
    boundaries = boundaries_of(share, times, strategy.pipeline, cluster.memory_bytes, micro_batches)
    memory = memory_of(share, boundaries, micro_batches)
    stage, most = max(enumerate(memory), key=lambda entry: entry[1].total)
    if most.total > cluster.memory_bytes:
        return Dropped(
            strategy,
            MEMORY,
            f"stage {stage} needs {most.total / 2**30:.4g} GiB of {cluster.memory_bytes / 2**30:.4g} GiB",
        )
    terms, simulated = step_terms(strategy, workload, cluster, share, times, boundaries, micro_batches)
    _check_finite(sum(terms.values()))
    return Plan(strategy, boundaries, micro_batches, memory, terms, simulated)


def _check_finite(seconds: float) -> None:
    if not isfinite(seconds):
        raise ValueError("a step takes longer than can be computed with: give higher speeds or shorter latencies.")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
