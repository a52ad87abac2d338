"""From costs of items to boundaries: against all boundaries that there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from paceline.planning.blocks import Device, DoesNotFit
from paceline.planning.memory import ItemMemory, States, stage_memory, with_head_slices
from paceline.planning.stages import plan_stages
from paceline.schedules import families, simulate, verify
from paceline.schedules.costs import Costs

LAYERS = 9
ITEMS = [
    ItemMemory("embedding", 300, 2, 8),
    *(ItemMemory(f"layers.{i}", 100, 40, 8, 10) for i in range(LAYERS)),
    ItemMemory("head", 300, 50, 0, 60),
]
SECONDS = [(0.1, 0.1), *((1.0, 2.0) for _ in range(LAYERS)), (0.8, 1.2)]
SCHEDULE = families.make("1f1b", 3, 6)
LIVE = verify(SCHEDULE).peak_activations


def makespan(cuts: tuple[int, ...], speeds: tuple[float, ...]) -> float:
    stages = [SECONDS[cuts[s] : cuts[s + 1]] for s in range(3)]
    forward, backward = (
        tuple(sum(item[way] for item in held) / speed for held, speed in zip(stages, speeds, strict=True))
        for way in (0, 1)
    )
    return simulate(SCHEDULE, Costs(forward, backward)).makespan_s


def all_boundaries() -> list[tuple[int, ...]]:
    return [(0, *inner, LAYERS + 2) for inner in combinations(range(1, LAYERS + 2), 2)]


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (4.0, 2.0, 1.0), (1.0, 3.0, 2.0)])
def test_the_shortest_step_of_all_boundaries(speeds: tuple[float, ...]) -> None:
    plan = plan_stages(ITEMS, SECONDS, [Device(speed) for speed in speeds], States(), SCHEDULE)
    best = min(makespan(cuts, speeds) for cuts in all_boundaries())
    assert plan.step_s == pytest.approx(makespan(plan.boundaries, speeds))
    assert plan.step_s == pytest.approx(best)


def test_memory_limits() -> None:
    """The first device is fastest and has room for its least share plus a layer."""
    states = States()

    def need(cuts: tuple[int, ...], stage: int) -> float:
        return stage_memory(ITEMS, cuts, stage, states, LIVE[stage]).total

    limits = (need((0, 3, 4, 11), 0), 1e9, 1e9)
    devices = [Device(speed, limit) for speed, limit in zip((4.0, 1.0, 1.0), limits, strict=True)]
    plan = plan_stages(ITEMS, SECONDS, devices, states, SCHEDULE)
    assert plan.boundaries[1] == 3
    assert [memory.total for memory in plan.memory] == [need(plan.boundaries, stage) for stage in range(3)]
    fitting = [cuts for cuts in all_boundaries() if need(cuts, 0) <= limits[0]]
    assert plan.step_s == pytest.approx(min(makespan(cuts, (4.0, 1.0, 1.0)) for cuts in fitting))


@pytest.mark.parametrize("most", [2, 3])
def test_all_slices_of_a_stage_are_computed_at_once(most: int) -> None:
    """Working memory of slices adds up; a stage that begins with one keeps hidden states for each live micro-batch."""
    items = with_head_slices([*ITEMS[:-1], ITEMS[-1]._replace(working_bytes=40_000)], 4)
    seconds = [*SECONDS[:-1], *[(0.2, 0.3)] * 4]
    limit = 10_000 * (most + 1)  # one slice works with 10,000 bytes; states and all else are less than that
    plan = plan_stages(items, seconds, [Device(1.0, limit)] * 3, States(), SCHEDULE)
    assert max(need.total for need in plan.memory) <= limit
    held = [sum(item.is_slice for item in items[a:b]) for a, b in pairwise(plan.boundaries)]
    assert max(held) <= most


def test_what_does_not_fit_names_stage_need_and_limit() -> None:
    alone = stage_memory(ITEMS, (0, 1, 3, 11), 0, States(), LIVE[0]).total
    least = alone + max(item.working_bytes for item in ITEMS[:-1])  # with room to compute any of its layers
    assert plan_stages(ITEMS, SECONDS, [Device(1.0, alone), Device(), Device()], States(), SCHEDULE).boundaries[1] == 1
    devices = [Device(1.0, alone - 1), Device(), Device()]
    with pytest.raises(DoesNotFit, match=f"stage 0 .*needs {least:.0f} bytes .*limit is {alone - 1:.0f} bytes") as no:
        plan_stages(ITEMS, SECONDS, devices, States(), SCHEDULE)
    assert (no.value.stage, no.value.need_bytes, no.value.limit_bytes) == (0, least, alone - 1)


def test_a_better_order_of_the_devices_is_named() -> None:
    """The last stage keeps fewest micro-batches: the device with little memory belongs there."""
    limit = stage_memory(ITEMS, (0, 8, 9, 11), 2, States(), LIVE[2]).total * 1.2
    devices = [Device(2.0, limit), Device(1.0), Device(1.0)]
    plan = plan_stages(ITEMS, SECONDS, devices, States(), SCHEDULE)
    assert plan.better is not None
    order, gain = plan.better
    assert sorted(order) == [0, 1, 2]
    assert order[0] != 0
    assert 0.05 <= gain < 1


def test_equal_devices_have_no_better_order() -> None:
    assert plan_stages(ITEMS, SECONDS, [Device()] * 3, States(), SCHEDULE).better is None
    alike = [Device(1.0, 1e9), Device(1.01, 1.01e9), Device(0.99, 9.9e8)]
    assert plan_stages(ITEMS, SECONDS, alike, States(), SCHEDULE).better is None


def test_slow_links_move_a_cut_to_a_narrow_place() -> None:
    """Sending is dear after every layer but one."""
    items = [item._replace(output_bytes=1 if item.name == "layers.2" else 100) for item in ITEMS]
    schedule = families.make("1f1b", 2, 4)
    free = plan_stages(items, SECONDS, [Device()] * 2, States(), schedule)
    bound = plan_stages(items, SECONDS, [Device()] * 2, States(), schedule, links=[2.0])
    assert free.boundaries[1] > 4
    assert bound.boundaries[1] == 4
