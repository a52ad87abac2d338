"""Cuts for devices that hold several stages: against all cuts that there are, and against counts by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from paceline.planning.blocks import Device, DoesNotFit
from paceline.planning.memory import ItemMemory, StageMemory, States, stage_memory
from paceline.planning.shared_devices import Held, held_by, step_s, whole_schedule
from paceline.planning.stages import plan_stages
from paceline.schedules import Costs, simulate
from paceline.schedules.asynchronous import multidirection, one_direction
from paceline.schedules.families import dualpipev, interleaved
from paceline.schedules.schedule import Schedule
from paceline.schedules.steady import period
from paceline.schedules.stream import Stream

LAYERS = 10
ITEMS = [
    ItemMemory("embedding", 300, 2, 8),
    *(ItemMemory(f"layers.{i}", 100, 40, 8, 10) for i in range(LAYERS)),
    ItemMemory("head", 300, 50, 0, 60),
]
SECONDS = [(0.1, 0.1), *((1.0, 2.0) for _ in range(LAYERS)), (1.5, 3.0)]


def costs_of(boundaries: Sequence[int], speeds: Sequence[float] = ()) -> Costs:
    stages = [SECONDS[first:end] for first, end in pairwise(boundaries)]
    forward, backward = (tuple(sum(item[way] for item in held) for held in stages) for way in (0, 1))
    return Costs(forward, backward, speeds=tuple(speeds))


def all_boundaries(num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, LAYERS + 2) for inner in combinations(range(1, LAYERS + 2), num_stages - 1)]


@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0, 1.0, 0.5, 1.0)])
@pytest.mark.parametrize("order", [multidirection(4, 4), multidirection(4, 8).unrolled(1)], ids=["stream", "flushed"])
def test_the_shortest_step_of_all_cuts(order: Stream, speeds: tuple[float, ...]) -> None:
    plan = plan_stages(ITEMS, SECONDS, [Device(speed) for speed in speeds], States(), order, owners="direction")
    best = min(step_s(order, costs_of(boundaries, speeds)) for boundaries in all_boundaries(4))
    assert plan.step_s == pytest.approx(step_s(order, costs_of(plan.boundaries, speeds)))
    assert plan.step_s <= best * 1.02
    assert plan.held == ((0, 3), (1, 2), (2, 1), (3, 0))


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (2.0, 1.0)])
@pytest.mark.parametrize("order", [interleaved(2, 4, 2), dualpipev(2, 4)], ids=["interleaved", "dualpipev"])
def test_the_shortest_step_of_all_cuts_where_a_device_holds_chunks(order: Schedule, speeds: tuple[float, ...]) -> None:
    plan = plan_stages(ITEMS, SECONDS, [Device(speed) for speed in speeds], States(), order)
    best = min(step_s(order, costs_of(boundaries, speeds)) for boundaries in all_boundaries(4))
    assert plan.step_s == pytest.approx(step_s(order, costs_of(plan.boundaries, speeds)))
    assert plan.step_s <= best * 1.05
    assert plan.held == order.stages
    assert len(plan.memory) == 2
    tight = max(need.total for need in plan.memory) - 1
    with pytest.raises(DoesNotFit):
        plan_stages(ITEMS, SECONDS, [Device(memory_bytes=tight / 4)] * 2, States(), order)


def test_a_stage_that_no_cut_makes_short_costs_less_where_devices_hold_several() -> None:
    """A head of six layers' work: six layers' on one of four stages, however the others are cut."""
    seconds = [(0.0, 0.0), *((1.0, 2.0) for _ in range(LAYERS)), (6.0, 12.0)]
    plan, alone = (
        plan_stages(ITEMS, seconds, [Device()] * 4, States(), order, owners="direction")
        for order in (multidirection(4, 8), one_direction(4, 8))
    )
    assert alone.step_s == pytest.approx(8 * 18)  # the last stage is always at work
    assert plan.step_s <= 8 * 15


STREAMS = [multidirection(4, 8), multidirection(6, 6), one_direction(4, 4)]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_a_step_in_the_search_is_that_of_the_steady_state(stream: Stream) -> None:
    uneven = Costs((1.0,) * (stream.num_ranks - 1) + (1.5,), (2.0,) * (stream.num_ranks - 1) + (3.0,))
    assert step_s(stream, uneven) == pytest.approx(period(stream, uneven), rel=0.02)


def test_faster_devices_take_less_time() -> None:
    """Of all ranks alike, a step is shorter by that factor; of one, its computing is."""
    order = multidirection(4, 4).unrolled(1)
    plain = simulate(order, Costs.uniform(4, 1.0, 2.0))
    alike, one = (
        simulate(order, Costs((1.0,) * 4, (2.0,) * 4, speeds=speeds)) for speeds in ((2.0,) * 4, (1.0, 1.0, 4.0, 1.0))
    )
    assert alike.makespan_s == plain.makespan_s / 2
    assert one.busy_s == tuple(busy / (4 if rank == 2 else 1) for rank, busy in enumerate(plain.busy_s))
    with pytest.raises(ValueError, match=r"speeds has 3 values and there are 4 ranks"):
        simulate(order, Costs((1.0,) * 4, (2.0,) * 4, speeds=(1.0,) * 3))
    with pytest.raises(ValueError, match=r"speeds\[1\] is 0"):
        Costs((1.0,) * 4, (2.0,) * 4, speeds=(1.0, 0.0))


@pytest.mark.parametrize(("devices", "count"), [(4, 2), (6, 2), (8, 2), (8, 4)])
def test_live_micro_batches_and_owners(devices: int, count: int) -> None:
    schedule = whole_schedule(multidirection(devices, devices, count))
    peaks = simulate(schedule, Costs.uniform(devices, 1.0, 2.0)).peak_activations
    held = held_by(schedule, "direction")
    assert tuple(one.peak for one in held) == peaks
    # One byte in some stages and thousand in others: what the simulator has at most in memory.
    sizes = tuple(1.0 if stage % 3 else 1000.0 for stage in range(devices))
    simulated = simulate(schedule, Costs((1.0,) * devices, (2.0,) * devices, activation_bytes=sizes)).peak_bytes
    for one, most in zip(held, simulated, strict=True):
        items = [ItemMemory("layer", 0, size, 0) for size in sizes]
        assert one.memory(items, range(devices + 1), States()).activations == most
    assert [one.stages[0] for one in held] == list(range(devices))  # whose states are there
    assert all(one.owned == (1.0,) + (0.0,) * (count - 1) for one in held)
    mirrored = held_by(schedule, "mirror")
    for stage in range(devices):
        shares = [share for one in mirrored for s, share in zip(one.stages, one.owned, strict=True) if s == stage]
        assert shares == [1 / count] * count


def test_bytes_of_a_device() -> None:
    """(4P+12)Ψ/d with bf16 and gradients in it, and 16Ψ/d for 1F1B: the published sums."""
    items = [ItemMemory(f"layers.{i}", 1000, 0, 0) for i in range(8)]
    states = States(weight_bytes=2, gradient_bytes=2, beside=True)
    boundaries = tuple(range(9))
    for devices, count in ((4, 2), (8, 2), (8, 4)):
        bounds = tuple(range(0, 9, 8 // devices))
        for owners in ("direction", "mirror"):
            held = held_by(whole_schedule(multidirection(devices, devices, count)), owners)
            each = {one.memory(items, bounds, states).total for one in held}
            assert each == {(4 * count + 12) * 8000 / devices}
    assert stage_memory(items, boundaries, 0, states, 1).total == 16 * 1000


def test_what_does_not_fit_is_told() -> None:
    order = multidirection(4, 4)
    free = plan_stages(ITEMS, SECONDS, [Device()] * 4, States(), order, owners="direction")
    least = max(memory.total for memory in free.memory)
    tight = [Device(1.0, least)] * 4
    assert all(one.total <= least for one in plan_stages(ITEMS, SECONDS, tight, States(), order).memory)
    with pytest.raises(DoesNotFit, match=r"no split fits in memory: stage \d on device \d needs"):
        plan_stages(ITEMS, SECONDS, [Device(1.0, 100.0)] * 4, States(), order)


def test_what_is_deferred_counts_as_live() -> None:
    """Two stages, live micro-batches of each, and behind them those whose gradients of weights are still to come."""
    stages = [StageMemory(*[1.0] * 4, activations, 3.0, 2.0) for activations in (10.0, 7.0)]
    held = Held((0, 3), ((3, 1, 0, 0), (1, 0, 1, 2)), (None, None))
    assert held.together(stages).activations == max(3 * 10 + 7, 10 + 10 + 2 * 7)
    assert replace(held, live=((3, 1), (1, 0, 1, 4))).together(stages).activations == 10 + 10 + 4 * 7
