"""Boundaries and recomputed layers found together, by simulation, against trying everything."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from paceline.planning.blocks import Device, DoesNotFit
from paceline.planning.memory import ItemMemory, States, stage_memory
from paceline.planning.recomputation import Recomputable, layers_of_stages, recomputed, recomputed_s
from paceline.planning.recomputed_stages import fastest_stages
from paceline.planning.shared_devices import held_by
from paceline.planning.shared_recomputation import SharedRecomputable
from paceline.planning.stages import plan_of_boundaries
from paceline.schedules.families import one_f_one_b

STATES, STAGES = States(), 2
SCHEDULE = one_f_one_b(STAGES, 8)


def draw(seed: int) -> tuple[list[ItemMemory], list[tuple[float, float]], list[Device]]:
    """Draw a model of alike layers whose times were measured, so that they differ, on devices that are short of it."""
    chance = random.Random(seed)
    layers = chance.randint(3, 8)
    items = [
        ItemMemory("embedding", 1, 1.0, 2.0),
        *(ItemMemory("layer", 1, 50.0, 2.0) for _ in range(layers)),
        ItemMemory("head", 1, 5.0, 0.0, 7.0),
    ]
    times = [chance.uniform(0.7, 1.5) for _ in range(layers)]
    seconds = [(0.1, 0.1), *((time, 2 * time) for time in times), (0.5, 1.0)]
    share = chance.uniform(0.6, 1.1)
    return items, seconds, [Device(chance.choice([1.0, 2.0]), share * layers * 60) for _ in range(STAGES)]


@pytest.mark.parametrize("seed", range(60))
def test_each_stage_recomputes_the_fewest_of_its_first_layers(seed: int) -> None:
    """Also where other boundaries are faster than those that recomputed layers were found for."""
    items, seconds, devices = draw(seed)
    try:
        plan, again = fastest_stages(items, seconds, devices, STATES, SCHEDULE, owners=None, may_recompute=True)
    except DoesNotFit:
        assert not best_s(items, seconds, devices)
        return
    mixed = recomputed(items, again)
    for stage, layers in enumerate(layers_of_stages(plan.boundaries)):
        own = [layer for layer in again if layer in layers]
        assert own == [*layers[: len(own)]]
        assert stage_memory(mixed, plan.boundaries, stage, STATES, STAGES - stage) == plan.memory[stage]
        assert plan.memory[stage].total <= devices[stage].memory_bytes
        if own:
            fewer = recomputed(items, own[:-1])
            need = stage_memory(fewer, plan.boundaries, stage, STATES, STAGES - stage).total
            assert need > devices[stage].memory_bytes, "one fewer would not do"
    assert plan.step_s == pytest.approx(min(best_s(items, seconds, devices)))


def best_s(items: list[ItemMemory], seconds: list[tuple[float, float]], devices: list[Device]) -> list[float]:
    """Seconds of a step of all boundaries that fit."""
    model = SharedRecomputable(items, STATES, held_by(SCHEDULE, None))
    found = []
    for cuts in combinations(range(2, len(items) - 1), STAGES - 1):
        boundaries = (0, *cuts, len(items))
        assert all(start < stop for start, stop in pairwise(boundaries))
        try:
            again = model.fewest(boundaries, [device.memory_bytes for device in devices]).items
        except DoesNotFit:
            continue
        mixed, longer = recomputed(items, again), recomputed_s(seconds, again)
        found.append(
            plan_of_boundaries(boundaries, mixed, longer, devices, STATES, SCHEDULE, compare_orders=False).step_s
        )
    return found


def test_other_boundaries_have_other_layers_recomputed() -> None:
    """Cases in which boundaries move after layers were chosen for those that halving finds."""
    moved = 0
    for seed in range(200):
        items, seconds, devices = draw(seed)
        try:
            halved = Recomputable.of(items, seconds, STATES, SCHEDULE).partition(devices)
            plan, again = fastest_stages(items, seconds, devices, STATES, SCHEDULE, owners=None, may_recompute=True)
        except DoesNotFit:
            continue
        moved += bool(again) and plan.boundaries != halved.boundaries
    assert moved >= 3
