"""Placement without copies: the value, the greedy rule, bounds, the exact search."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning.placement import (
    Placement,
    device_loads,
    greedy,
    imbalance,
    lower_bound,
    moved,
    replicated,
    split,
)
from paceline.planning.swaps import swapped

whole = st.integers(0, 20)


def most(placement, loads, shares=None):
    return max(device_loads(placement, loads, shares))


def test_value():
    placement = Placement(((0, 1, 2), (2, 3, 0), ()))
    assert (placement.num_devices, placement.num_experts) == (3, 4)
    assert placement.owned == (2, 2, 0)
    assert placement.owners == (0, 0, 1, 1)
    assert placement.copies == ((0, 1), (0,), (1, 0), (1,))
    assert placement == Placement([[0, 1, 2], [2, 3, 0], []], [2, 2, 0])
    # Who has an expert in the earliest slot owns it, of several the first; unless it is said otherwise.
    assert Placement(((0, 1), (1, 0))).owners == (0, 1)
    assert Placement(((0, 1), (1, 0)), (2, 0)).owners == (0, 0)
    assert Placement(((0, 1), (1, 0)), (2, 0)).copies == ((0, 1), (0, 1))


@pytest.mark.parametrize(
    ("devices", "owned", "message"),
    [
        ((), (), "the placement has no devices: give one at least."),
        (((), ()), (), "the placement has no experts: give one at least."),
        (((0, 1), (2, 2)), (), "device 1 holds expert 2 twice: one copy there does the same."),
        (((0, 1), (3,)), (), "no device holds expert 2: experts are numbered from 0 without gaps, to 3."),
        (((0, -1),), (), "device 0 holds -1: experts are whole numbers from 0."),
        (((0, True),), (), "device 0 holds True: experts are whole numbers from 0."),
        (((0, 1.0),), (), "device 0 holds 1.0: experts are whole numbers from 0."),
        (((0,), (1,)), (1,), "owned has 1 numbers for 2 devices: give one for each."),
        (((0,), (1,)), (1, 2), "owned[1] is 2: device 1 holds 1 experts."),
        (((0, 1), (1,)), (2, 1), "expert 1 belongs to device 0 and to device 1: on each device put the experts"),
        (((0, 1), (1,)), (1, 0), "expert 1 belongs to no device: on each device put the experts"),
        # The copy of 2 is before expert 1, which device 0 alone has.
        (((0, 2, 1), (2, 3)), (), "expert 2 belongs to device 0 and to device 1"),
    ],
)
def test_what_is_no_placement(devices, owned, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Placement(devices, owned)


def test_contiguous():
    assert Placement.contiguous(6, 3).devices == ((0, 1), (2, 3), (4, 5))
    assert Placement.contiguous(7, 3).devices == ((0, 1, 2), (3, 4), (5, 6))
    assert Placement.contiguous(2, 3).devices == ((0,), (1,), ())
    with pytest.raises(ValueError, match="num_devices is 0: give 1 or more"):
        Placement.contiguous(2, 0)


def test_loads_of_devices():
    placement = Placement(((0, 1), (2, 0)), (2, 1))
    assert device_loads(placement, [4, 1, 5]) == (3, 7)
    assert device_loads(placement, [4, 1, 5], [(0.75, 0.25), (1,), (1,)]) == (4, 6)
    assert imbalance(placement, [4, 1, 5]) == 1.4
    assert imbalance(placement, [0, 0, 0]) == 1.0
    with pytest.raises(ValueError, match="there are 2 loads for 3 experts: give one for each"):
        device_loads(placement, [4, 1])
    with pytest.raises(ValueError, match="give one number for each copy of each expert"):
        device_loads(placement, [4, 1, 5], [(1,), (1,), (1,)])


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([], "there are no loads"),
        ([1, -1], "the load of expert 1 is -1.0: give a finite number from 0 upwards."),
        ([float("nan")], "the load of expert 0 is nan"),
        ([1, 10**400], "the load of expert 1 is inf"),
        ([1e308, 1e308], "the sum of the loads is not finite"),
    ],
)
def test_what_are_no_loads(loads, message):
    for function in (greedy, lower_bound):
        with pytest.raises(ValueError, match=message):
            function(loads, 2)


def test_moved():
    old = Placement(((0, 1), (2, 3)))
    assert moved(old, old) == 0
    assert moved(old, Placement(((1, 0), (3, 2)))) == 0
    assert moved(old, Placement(((0, 2), (1, 3)))) == 2
    assert moved(old, Placement(((0, 1, 2), (2, 3)), (2, 2))) == 1
    assert moved(Placement(((0, 1, 2), (2, 3)), (2, 2)), old) == 0
    with pytest.raises(ValueError, match="of 4 and 1 experts"):
        moved(old, Placement(((0,),)))


def test_example_of_the_seed():
    assert greedy([4, 3, 2, 1], 3, 2).devices == ((0,), (1,), (2, 3))


def test_ties_keep_experts_where_they_are():
    current = Placement(((3, 1), (2, 0)))
    assert greedy([1, 1, 1, 1], 2, current=current) == current
    assert greedy([1, 1, 1, 1], 2).devices == ((0, 2), (1, 3))
    # Only where devices have the same load: the second expert goes to the one that has none.
    assert greedy([1, 1, 1, 1], 2, current=Placement(((3, 2), (1, 0)))).devices == ((1, 2), (3, 0))


def test_who_stays_keeps_its_slot():
    current = Placement(((0, 1, 2), (3, 4, 5)))
    assert greedy([9, 8, 1, 2, 3, 4], 2, current=current).devices == ((0, 4, 2), (3, 1, 5))


@pytest.mark.parametrize(
    ("loads", "num_devices", "slots", "devices"),
    [
        ([5, 1], 4, None, ((0,), (1,), (), ())),  # fewer experts than devices
        ([3, 3, 3, 3, 3], 2, None, ((0, 2, 4), (1, 3))),  # no divisor
        ([0, 7, 0], 3, 1, ((1,), (0,), (2,))),  # all tokens on one expert
        ([0, 7, 0], 2, 3, ((1,), (0, 2))),  # more room than needed
    ],
)
def test_edges(loads, num_devices, slots, devices):
    assert greedy(loads, num_devices, slots).devices == devices


def test_too_little_room():
    for function in (greedy, lower_bound):
        with pytest.raises(ValueError, match="2 devices with 2 slots each have no room for 5 experts: give 3 slots"):
            function([1] * 5, 2, 2)
    with pytest.raises(ValueError, match="num_devices is 0"):
        greedy([1], 0)
    with pytest.raises(ValueError, match="4 devices are not 3 nodes of the same size"):
        greedy([1] * 4, 4, nodes=3)
    with pytest.raises(
        ValueError, match="the current placement is of 4 experts on 2 devices, and asked for are 4 on 4"
    ):
        greedy([1] * 4, 4, current=Placement.contiguous(4, 2))


def test_nodes():
    """The groups of EPLB's published example, three experts each, on two nodes of two places."""
    loads = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    groups = [sum(loads[first : first + 3]) for first in range(0, 12, 3)]
    assert [set(node) for node in greedy(groups, 2).devices] == [{1, 2}, {3, 0}]
    found = greedy(loads, 4, nodes=2)
    flat = greedy(loads, 2, 6)
    assert [set(found.devices[2 * node] + found.devices[2 * node + 1]) for node in range(2)] == [
        set(experts) for experts in flat.devices
    ]
    assert all(len(experts) == 3 for experts in found.devices)
    assert greedy(loads, 4, nodes=1) == greedy(loads, 4) == greedy(loads, 4, nodes=4)


def balanced_packing(loads, num_packs):
    """EPLB's rule: by falling weight, to the lightest pack that is not full. The largest weight of a pack."""
    room = len(loads) // num_packs
    open_packs = [(0, pack, 0) for pack in range(num_packs)]
    weights = [0] * num_packs
    for load in sorted(loads, reverse=True):
        weight, pack, size = heapq.heappop(open_packs)
        weights[pack] = weight + load
        if size + 1 < room:
            heapq.heappush(open_packs, (weight + load, pack, size + 1))
    return max(weights)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_greedy_is_balanced_packing(num_devices, slots, data):
    loads = data.draw(st.lists(whole, min_size=num_devices * slots, max_size=num_devices * slots))
    found = greedy(loads, num_devices)
    assert most(found, loads) == balanced_packing(loads, num_devices)
    assert {len(experts) for experts in found.devices} == {slots}


def brute_force(loads, num_devices, slots):
    best = float("inf")
    for devices in itertools.product(range(num_devices), repeat=len(loads)):
        if max(map(devices.count, range(num_devices))) <= slots:
            totals = [0.0] * num_devices
            for load, device in zip(loads, devices, strict=True):
                totals[device] += load
            best = min(best, max(totals))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(whole, min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 2))
def test_greedy_lies_between_the_best_and_the_room(loads, num_devices, spare):
    slots = -(-len(loads) // num_devices) + spare
    best = brute_force(loads, num_devices, slots)
    assert lower_bound(loads, num_devices, slots) <= best * (1 + 1e-12)
    found = greedy(loads, num_devices, slots)
    assert most(found, loads) >= best
    assert max(map(len, found.devices)) <= slots


def test_greedy_with_ten_experts_is_near_the_best():
    loads = [80, 70, 60, 50, 40, 5, 4, 3, 2, 1]
    assert brute_force(loads, 2, 5) == 158
    assert most(greedy(loads, 2), loads) == 173


def test_lower_bound():
    assert lower_bound([9, 1, 1, 1], 2) == 10  # the hottest is not alone
    assert lower_bound([9, 1, 1, 1], 2, 3) == 9
    assert lower_bound([5, 5, 5], 2) == 10  # two of three meet
    assert lower_bound([2, 2, 2, 2], 2) == 4  # the mean
    assert lower_bound([3], 4) == 3


# -- devices of unequal speed ------------------------------------------------------------------------------------------

SPEEDS = [1.0, 1.0, 2.0, 4.0]


def test_load_is_divided_by_the_speed_of_its_device():
    placement = Placement(((0, 1), (1, 2)), (1, 2))
    assert device_loads(placement, [4, 2, 5], None, [3, 1]) == pytest.approx((5 * 2 / 3, 6 * 2))
    assert device_loads(placement, [4, 2, 5], None, [7, 7]) == device_loads(placement, [4, 2, 5])
    assert imbalance(placement, [4, 2, 5], None, [3, 1]) == pytest.approx(12 / 5.5)
    with pytest.raises(ValueError, match="3 speeds for 2 devices"):
        device_loads(placement, [4, 2, 5], None, [1, 1, 1])
    with pytest.raises(ValueError, match=r"the speed of device 1 is 0\.0: give a finite number above 0"):
        greedy([4, 2, 5], 2, speeds=[1.0, 0.0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=4, max_size=6), st.lists(st.integers(1, 5), min_size=2, max_size=3))
def test_on_unequal_devices_no_placement_beats_the_bound_and_greedy_is_near_the_best(loads, speeds):
    slots = len(loads)
    placements = (
        Placement(tuple(tuple(e for e, owner in enumerate(owners) if owner == d) for d in range(len(speeds))))
        for owners in itertools.product(range(len(speeds)), repeat=len(loads))
    )
    best = min(max(device_loads(placement, loads, None, speeds)) for placement in placements)
    assert lower_bound(loads, len(speeds), slots, speeds) <= best * (1 + 1e-12)
    found = max(device_loads(greedy(loads, len(speeds), slots, speeds=speeds), loads, None, speeds))
    # The rule that takes the device which would be done first is within twice the best (Gonzalez et al. 1977).
    assert best * (1 - 1e-12) <= found <= 2 * best * (1 + 1e-12)


def test_busy_experts_go_to_the_fast_devices():
    ratios = {"greedy": [], "swapped": [], "copies": [], "split over copies": []}
    for seed in range(8):
        draw = random.Random(seed)
        loads, start = [draw.paretovariate(1.5) for _ in range(32)], Placement.contiguous(32, 4)
        for name, place in (
            ("greedy", functools.partial(greedy, loads, 4)),
            ("swapped", functools.partial(swapped, loads, start)),
            ("copies", functools.partial(replicated, loads, 4, None, 2, start)),
        ):
            blind, found = place(), place(speeds=SPEEDS)
            assert set(found.owned) == {8}
            ratios[name].append(imbalance(found, loads, None, SPEEDS) / imbalance(blind, loads, None, SPEEDS))
        both = [imbalance(p, loads, split(p, loads, speeds=SPEEDS), SPEEDS) for p in (found, blind)]
        ratios["split over copies"].append(both[0] / both[1])
    for name, of_seeds in ratios.items():
        assert sum(of_seeds) / len(of_seeds) < 0.8, name


def test_equal_speeds_change_nothing():
    loads = [9, 7, 5, 4, 3, 3, 2, 1]
    start = Placement.contiguous(8, 4)
    assert greedy(loads, 4, speeds=[2.0] * 4) == greedy(loads, 4)
    assert swapped(loads, start, speeds=[2.0] * 4) == swapped(loads, start)
    assert replicated(loads, 4, 2, 1, start, speeds=[2.0] * 4) == replicated(loads, 4, 2, 1, start)


def test_nodes_of_unequal_speed_share_the_load_by_it():
    found = greedy([1.0] * 12, 4, 6, nodes=2, speeds=[2.0, 2.0, 1.0, 1.0])
    assert [len(experts) for experts in found.devices] == [4, 4, 2, 2]
