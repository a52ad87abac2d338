"""The refinement: never worse than its start, nearly always the best of all splits, and it counts what it spends."""

import random
import re
from itertools import combinations

import pytest

from paceline.planning import Block, Device, bottleneck, partition, refine, stage_costs
from paceline.schedules import Costs, Link, make, simulate
from paceline.schedules.simulate import Simulation


def every_split(num_blocks, num_devices):
    for cuts in combinations(range(1, num_blocks), num_devices - 1):
        yield (0, *cuts, num_blocks)


def instance(draw):
    """At most 12 blocks on 2 to 4 devices, and the seconds of a step of 1F1B with them."""
    num_devices = draw.randint(2, 4)
    blocks = [Block(draw.uniform(0.5, 2), draw.choice([0, 1, 2])) for _ in range(draw.randint(num_devices, 12))]
    blocks[-1] = Block(draw.choice([1.0, 4.0]))  # a head
    devices = [Device(draw.choice([1, 1, 2, 4])) for _ in range(num_devices)]
    links = [draw.choice([1.0, 4.0]) for _ in range(num_devices - 1)]
    schedule = make("1f1b", num_devices, draw.choice([4, 16]))

    def step_s(boundaries):
        return simulate(schedule, stage_costs(boundaries, blocks, devices, links)).makespan_s

    return blocks, devices, links, step_s


def test_close_to_the_best_of_all_splits():
    draw = random.Random(1)
    ratios = []
    for _ in range(40):
        blocks, devices, links, step_s = instance(draw)
        start = partition(blocks, devices, links).boundaries
        found, seconds = refine(start, step_s)
        best = min(step_s(boundaries) for boundaries in every_split(len(blocks), len(devices)))
        assert seconds == step_s(found)
        assert best <= seconds <= step_s(start)
        ratios.append(seconds / best)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 35
    assert max(ratios) < 1.1


def test_a_smaller_bottleneck_is_not_a_shorter_step():
    """With few micro-batches a step is mostly fill and drain, and the fast device should have nearly everything."""
    blocks, devices = [Block(3.0)] * 8, [Device(3.0), Device(1.0)]
    schedule = make("1f1b", 2, 1)

    def step_s(boundaries):
        return simulate(schedule, stage_costs(boundaries, blocks, devices)).makespan_s

    start = partition(blocks, devices).boundaries
    assert (start, step_s(start)) == ((0, 6, 8), pytest.approx(12.0))
    found, seconds = refine(start, step_s)
    assert (found, seconds) == ((0, 7, 8), pytest.approx(10.0))
    assert bottleneck(blocks, devices, (), found) > bottleneck(blocks, devices, (), start)


def test_moves_several_cuts_at_once():
    """From here neither cut alone makes it better; both to the right do, then both apart."""
    order = {(0, 2, 4, 9): 3.0, (0, 3, 5, 9): 2.0, (0, 2, 6, 9): 1.0}
    found = refine((0, 2, 4, 9), lambda boundaries: order.get(boundaries, 4.0))
    assert found == ((0, 2, 6, 9), 1.0)


def test_only_what_fits():
    def step_s(boundaries):
        assert boundaries[1] <= 6
        return 10.0 - boundaries[1]

    assert refine((0, 3, 10), step_s, fits=lambda boundaries: boundaries[1] <= 6) == ((0, 6, 10), 4.0)


def test_a_stage_is_never_empty():
    assert refine((0, 3, 6, 9), lambda boundaries: boundaries[1] + boundaries[2]) == ((0, 1, 2, 9), 3)
    assert refine((0, 4), lambda boundaries: 1.0) == ((0, 4), 1.0)


@pytest.mark.parametrize("budget", [1, 2, 7, 500])
def test_budget(budget):
    calls = []

    def step_s(boundaries):
        calls.append(boundaries)
        return sum((boundary - target) ** 2 for boundary, target in zip(boundaries, (0, 30, 50, 60), strict=True))

    found, seconds = refine((0, 20, 40, 60), step_s, budget=budget)
    assert len(calls) == len(set(calls)) <= budget
    assert seconds == min(map(step_s, calls[:budget]))
    if budget == 500:
        assert found == (0, 30, 50, 60)
        assert len(calls) < 100


def test_rounding_is_no_improvement():
    calls = []

    def step_s(boundaries):
        calls.append(boundaries)
        return 1.0 - 1e-12 * len(calls)

    assert refine((0, 2, 4), step_s)[0] == (0, 2, 4)
    assert len(calls) == 3


def test_costs_of_stages():
    blocks = [Block(3.0, 10, 100, 7), Block(6.0, 20, 200, 8), Block(9.0, 30, 300, 9)]
    devices, links = [Device(1.0), Device(2.0)], [5.0]
    both_ways = (Link(5.0),)
    assert stage_costs((0, 2, 3), blocks, devices, links) == Costs(
        forward_s=(3.0, 1.5),
        backward_s=(6.0, 3.0),
        message_bytes=(20,),
        down=both_ways,
        up=both_ways,
        activation_bytes=(15.0, 9.0),
        fixed_bytes=(300.0, 300.0),
    )
    own = stage_costs((0, 1, 3), blocks, devices, forward=[3.0, 0.0, 8.0])
    assert (own.forward_s, own.backward_s) == ((3.0, 4.0), (0.0, 3.5))
    assert isinstance(simulate(make("1f1b", 2, 2), own), Simulation)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: refine((0, 0, 3), float), "boundaries [0, 0, 3] do not split 3 blocks into 2 stages"),
        (lambda: refine((), float), "boundaries [] do not split 0 blocks into 1 stages"),
        (lambda: refine((0, 1, 3), float, budget=0), "budget=0 is no number of evaluations: give 1 or more."),
        (lambda: stage_costs((0, 2), [Block(1.0)], [Device()]), "boundaries [0, 2] do not split 1 blocks"),
        (lambda: stage_costs((0, 1), [Block(-1.0)], [Device()]), "blocks[0].work is -1.0"),
        (lambda: stage_costs((0, 1), [Block(1.0)], [Device()], forward=[]), "forward has 0 values for 1 blocks"),
        (
            lambda: stage_costs((0, 1), [Block(1.0)], [Device()], forward=[2.0]),
            "forward[0] is 2.0 of a work of 1.0: give a number from 0 to that.",
        ),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()
