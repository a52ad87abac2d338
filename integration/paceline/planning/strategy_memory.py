"""Which layers the stages of a strategy hold, and what they keep in memory.

Legend: t, p, d, ep, edp of :class:`~paceline.planning.strategy_shape.Strategy`; M micro-batches of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from ..schedules.asynchronous import ONE_DIRECTION
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from .blocks import Block, Device, DoesNotFit
from .memory import ItemMemory, StageMemory, States, stage_memory
from .partition import partition
from .partition_methods import by_work, by_work_of_devices
from .shared_devices import held_by
from .shared_recomputation import SharedRecomputable
from .stages import plan_stages
from .strategy_shape import ONE_F_ONE_B, PipelineSchedule, Strategy
from .strategy_times import ItemTime
from .workload import Workload

WHOLE_ACTIVATIONS = 4
"""Activations of a layer that every rank of a tensor-parallel group has whole, in hidden states: what the two norms
take and give (arXiv 2205.05198, section 4.1, without dropout)."""


@dataclass(frozen=True)
class Share:
    """The share of all items that a rank would hold if it had every stage.

    Args:
        items: without their routed experts.
        experts: parameters of routed experts, by item.
        dense: how states of the items are kept.
        of_experts: how those of the experts are, which have other replicas.
    """

    items: tuple[ItemMemory, ...]
    experts: tuple[int, ...]
    dense: States
    of_experts: States

    def parameters(self, start: int, stop: int) -> tuple[int, int]:
        """Parameters of the items from ``start`` up to ``stop``: all but experts', and experts'."""
        return sum(item.num_parameters for item in self.items[start:stop]), sum(self.experts[start:stop])


def share_of(strategy: Strategy, workload: Workload, schedule: PipelineSchedule = ONE_F_ONE_B) -> Share:
    """Cut by tensor and expert parallelism. Without a flush, masters have memory of their own; with several directions
    states are sharded whatever ZeRO is. A device that holds the embedding and the head has weights that they share
    once."""
    tensor, last = strategy.tensor, len(workload.items) - 1
    imbalance = workload.imbalance(strategy.expert)
    items, experts = [], []
    for index, item in enumerate(workload.items):
        memory = item.memory.with_rows(imbalance.get(index, 1.0))
        count = memory.num_parameters - item.expert_parameters
        if index == last and (strategy.pipeline == 1 or schedule.chunks > 1):
            count -= workload.tied_parameters
        memory = memory._replace(num_parameters=count, tied_parameters=0)
        if index and tensor > 1:  # the embedding is on every rank
            memory = in_slices(memory, tensor, is_head=index == last, blocks_per_layer=workload.blocks_per_layer)
        items.append(memory)
        held = item.expert_parameters * workload.most_experts(strategy.expert)
        experts.append(-(-held // (max(1, workload.num_experts) * tensor)))
    states = replace(
        workload.states,
        shard=workload.states.shard or schedule.directions > 1,
        beside=not schedule.flushes,
    )
    return Share(
        tuple(items),
        tuple(experts),
        replace(states, data_parallel=strategy.data),
        replace(states, data_parallel=strategy.expert_data),
    )


def in_slices(item: ItemMemory, size: int, *, is_head: bool, blocks_per_layer: int = 1) -> ItemMemory:
    """A decoder layer or head of which each of ``size`` ranks has a slice."""
    saved, blocks = item.saved_bytes, 1 if is_head else blocks_per_layer
    whole = min(saved, WHOLE_ACTIVATIONS / blocks * item.output_bytes)
    return item._replace(
        num_parameters=-(-item.num_parameters // size),
        saved_bytes=whole + (saved - whole) / size,
        working_bytes=item.working_bytes / (size if is_head else 1),
        again_bytes=item.again_bytes / size,  # nearly all of it
    )


def boundaries_of(
    share: Share,
    times: Sequence[ItemTime],
    stages: int,
    memory_bytes: float,
    micro_batches: int,
    work: Sequence[float] = (),
) -> tuple[int, ...]:
    """The split over items whose slowest stage is fastest, of those that fit; if none fits, of all.

    Args:
        work: of the items; the split by work is taken where it fits.
    """
    items = share.items
    if stages == 1:
        return (0, len(items))
    if work:
        found = tuple(_by_work(tuple(work), stages))
        if max(need.total for need in memory_of(share, found, micro_batches)) <= memory_bytes:
            return found
    live = live_micro_batches(stages, micro_batches)
    blocks = _blocks(share, times)
    message = max(item.output_bytes for item in items)
    beside = max(item.working_bytes for item in items if not item.is_slice) + (3 + live[0]) * message
    beside += live[0] * max(item.first_bytes for item in items)
    # What a stage works with depends on its layers: without room for the most of it, too much may seem to fit.
    for limit in (max(memory_bytes - beside, 0.0), memory_bytes):
        with suppress(DoesNotFit):
            return partition(blocks, [Device(1.0, limit)] * stages, live=live).boundaries
    return partition(blocks, [Device()] * stages).boundaries


def even_boundaries(times: Sequence[ItemTime], route: Sequence[int], work: Sequence[float] = ()) -> tuple[int, ...]:
    """The split over items that a run makes by work where devices hold several stages, whatever these need.

    Args:
        route: device of each stage.
        work: of the items; left out, their seconds.
    """
    return tuple(_by_work_of_devices(tuple(work or (time.total_s for time in times)), tuple(route)))


_by_work_of_devices = lru_cache(maxsize=64)(by_work_of_devices)


@lru_cache(maxsize=64)
def _by_work(work: tuple[float, ...], stages: int) -> list[int]:
    return by_work(work, [1.0] * stages)


def _blocks(share: Share, times: Sequence[ItemTime]) -> list[Block]:
    """One an item."""
    blocks = []
    for index, (item, time) in enumerate(zip(share.items, times, strict=True)):
        dense, experts = share.parameters(index, index + 1)
        memory_bytes = sum(share.dense.of(dense)) + sum(share.of_experts.of(experts))
        # A stage computes its slices of the head at once: each adds to what it needs, as its states do.
        memory_bytes += item.working_bytes if item.is_slice else 0.0
        blocks.append(Block(work=time.total_s, memory_bytes=memory_bytes, live_bytes=item.saved_bytes))
    return blocks


def memory_of(share: Share, boundaries: Sequence[int], micro_batches: int) -> tuple[StageMemory, ...]:
    """Memory of each rank of each stage, under 1F1B."""
    return tuple(
        _with_experts(stage_memory(share.items, boundaries, stage, share.dense, live), share, boundaries, [stage])
        for stage, live in enumerate(live_micro_batches(len(boundaries) - 1, micro_batches))
    )


def memory_of_devices(share: Share, boundaries: Sequence[int], schedule: Schedule) -> tuple[StageMemory, ...]:
    """Memory of each device where one holds several stages of one direction; what is deferred counts as live."""
    return tuple(
        _with_experts(held.memory(share.items, boundaries, share.dense), share, boundaries, held.stages)
        for held in held_by(schedule, None)
    )


def fewest_recomputed(
    share: Share, boundaries: Sequence[int], schedule: Schedule, memory_bytes: float
) -> tuple[int, ...]:
    """Items of as few layers as it takes for all devices to fit, if these are recomputed: all layers, if nothing fits.

    Args:
        schedule: of one direction, whose devices may hold several stages.
    """
    held = held_by(schedule, None)
    experts = [
        sum(share.parameters(boundaries[stage], boundaries[stage + 1])[1] for stage in own.stages) for own in held
    ]
    limits = [memory_bytes - sum(share.of_experts.of(number)) for number in experts]
    try:
        return SharedRecomputable(share.items, share.dense, held).fewest(boundaries, limits).items
    except DoesNotFit:
        return tuple(range(1, len(share.items) - 1))


def _with_experts(need: StageMemory, share: Share, boundaries: Sequence[int], stages: Sequence[int]) -> StageMemory:
    experts = sum(share.parameters(boundaries[stage], boundaries[stage + 1])[1] for stage in stages)
    weights, gradients, masters, moments = share.of_experts.of(experts)
    return replace(
        need,
        weights=need.weights + weights,
        gradients=need.gradients + gradients,
        masters=need.masters + masters,
        moments=need.moments + moments,
    )


def stages_without_flush(
    share: Share, times: Sequence[ItemTime], schedule: PipelineSchedule, stream: Stream, memory_bytes: float
) -> tuple[tuple[int, ...], tuple[StageMemory, ...]]:
    """The split over items and what each device needs, where all ranks of a stage have all of its experts.

    The split is that with the smallest bottleneck or, where devices hold several stages and it is faster, one whose
    sums are alike: neither is refined by simulation, which would take seconds for each strategy.

    Raises:
        DoesNotFit: nothing fits in memory.
    """
    items = [
        item._replace(num_parameters=item.num_parameters + experts)
        for item, experts in zip(share.items, share.experts, strict=True)
    ]
    # In the static order no backward comes between the end of a step and its update.
    states = replace(share.dense, gradient_sets=stream.most_lag + 1 if schedule.type == ONE_DIRECTION else 1)
    seconds = [(time.forward_s, time.backward_s) for time in times]
    devices = [Device(1.0, memory_bytes)] * stream.num_ranks
    found = plan_stages(items, seconds, devices, states, stream, owners="direction", budget=1)
    return found.boundaries, found.memory


def live_micro_batches(stages: int, micro_batches: int) -> list[int]:
    """Alive at once on each stage of 1F1B."""
    return [min(micro_batches, stages - stage) for stage in range(stages)]
