"""The fewest recomputed layers where devices hold several stages, against trying everything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from paceline.planning.blocks import Device, DoesNotFit
from paceline.planning.memory import ItemMemory, States
from paceline.planning.recomputation import layers_of_stages, recomputed
from paceline.planning.recomputed_stages import fastest_stages
from paceline.planning.shared_devices import Held, held_by, whole_schedule
from paceline.planning.shared_recomputation import SharedRecomputable
from paceline.schedules.asynchronous import multidirection
from paceline.schedules.families import interleaved, one_f_one_b
from paceline.schedules.schedule import Schedule
from paceline.schedules.split_families import zbv

STATES, DEVICES = States(), 2
SCHEDULES = {
    "one stage": one_f_one_b(DEVICES, 4),
    "round": interleaved(DEVICES, 4, 2),
    "split": zbv(DEVICES, 4),
    "both ways": whole_schedule(multidirection(DEVICES, 4, 2)),
}


class Model:
    """Alike layers in stages, on devices that have room for a part of what they keep."""

    def __init__(self, seed: int, schedule: Schedule) -> None:
        chance = random.Random(seed)
        self.held: tuple[Held, ...] = held_by(schedule, None)
        self.num_stages = schedule.num_stages
        counts = [chance.randint(1, 3) for _ in range(self.num_stages)]
        saved = chance.uniform(5.0, 60.0)
        self.items = [
            ItemMemory("embedding", 1, 1.0, 2.0),
            *(ItemMemory("layer", 1, saved, 2.0, chance.choice([0.0, 10.0])) for _ in range(sum(counts))),
            ItemMemory("head", 1, 5.0, 0.0, 7.0),
        ]
        ends = [sum(counts[: number + 1]) + 1 for number in range(self.num_stages)]
        self.boundaries = [0, *ends[:-1], len(self.items)]
        share = chance.uniform(0.2, 1.0)
        self.limits = [
            share * now + (1 - share) * least
            for now, least in zip(self.needs(()), self.needs(range(1, len(self.items) - 1)), strict=True)
        ]

    def needs(self, again: Sequence[int]) -> list[float]:
        mixed = recomputed(self.items, again)
        return [held.memory(mixed, self.boundaries, STATES).total for held in self.held]

    def fits(self, counts: Sequence[int]) -> bool:
        stages = zip(layers_of_stages(self.boundaries), counts, strict=True)
        again = [layer for own, count in stages for layer in own[:count]]
        return all(need <= limit for need, limit in zip(self.needs(again), self.limits, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_few_as_by_trying_everything(name: str) -> None:
    tried = 0
    for seed in range(60):
        model = Model(seed, SCHEDULES[name])
        layers = layers_of_stages(model.boundaries)
        choices = [c for c in product(*(range(len(own) + 1) for own in layers)) if model.fits(c)]
        try:
            found = SharedRecomputable(model.items, STATES, model.held).fewest(model.boundaries, model.limits)
        except DoesNotFit:
            assert not choices, seed
            continue
        assert found.boundaries == tuple(model.boundaries)
        counts = [sum(layer in found.items for layer in own) for own in layers]
        assert found.items == tuple(layer for own, c in zip(layers, counts, strict=True) for layer in own[:c])
        assert model.fits(counts)
        assert sum(counts) == min(map(sum, choices)), seed
        tried += 0 < sum(counts) < len(model.items) - 2
    assert tried > 20


def test_a_device_that_is_too_small_is_named() -> None:
    model = Model(0, SCHEDULES["round"])
    with pytest.raises(DoesNotFit, match=r"device 1 needs .*with all its layers recomputed"):
        SharedRecomputable(model.items, STATES, model.held).fewest(model.boundaries, [1e6, 10.0])
    seconds = [(1.0, 2.0)] * len(model.items)
    arguments = model.items, seconds, [Device(1.0, 10.0)] * DEVICES, STATES, SCHEDULES["round"]
    with pytest.raises(DoesNotFit, match=r"device \d needs .*with all its layers recomputed"):
        fastest_stages(*arguments, owners=None, may_recompute=True)


@pytest.mark.parametrize("name", ["round", "split", "both ways"])
def test_boundaries_are_found_together_with_recomputed_layers(name: str) -> None:
    """None of the boundaries nearby would be faster, each with its own recomputed layers."""
    schedule, found = SCHEDULES[name], 0
    for seed in range(12):
        model = Model(seed, schedule)
        devices = [Device(1.0 + device, min(model.limits)) for device in range(DEVICES)]
        seconds = [(0.1, 0.1), *[(1.0, 2.0)] * (len(model.items) - 2), (0.5, 1.0)]
        arguments = (model.items, seconds, devices, STATES, schedule)
        try:
            plan, again = fastest_stages(*arguments, owners=None, may_recompute=True)
        except DoesNotFit:
            continue
        assert all(need.total <= device.memory_bytes for need, device in zip(plan.memory, devices, strict=True))
        mixed = recomputed(model.items, again)
        assert plan.memory == tuple(held.memory(mixed, plan.boundaries, STATES) for held in model.held)
        assert len(plan.boundaries) == model.num_stages + 1
        assert all(start < stop for start, stop in pairwise(plan.boundaries))
        found += bool(again)
    assert found >= 3


def test_some_layers_are_recomputed_where_all_would_not_fit() -> None:
    """A recomputed layer leaves the factors of its products for later beside its input, so all of them need more."""
    layer = ItemMemory("layer", 1, 1130.0, 66.0, factor_bytes=1049.0)
    items = [ItemMemory("embedding", 1, 4.0, 66.0), *[layer] * 4, ItemMemory("head", 1, 401.0, 0.0, 397.0)]
    seconds, schedule = [(0.0, 0.0), *[(1.0, 2.0)] * 4, (0.3, 0.6)], zbv(DEVICES, 2)
    held = held_by(schedule, None)
    even = (0, 2, 3, 4, 6)
    kept, all_again = (
        [own.memory(each, even, STATES).total for own in held] for each in (items, recomputed(items, range(1, 5)))
    )
    limit = 0.96 * max(kept)
    assert max(all_again) > limit
    devices = [Device(1.0, limit)] * DEVICES
    plan, again = fastest_stages(items, seconds, devices, STATES, schedule, owners=None, may_recompute=True)
    assert plan.boundaries == even
    assert len(again) == 1
    assert max(need.total for need in plan.memory) <= limit
