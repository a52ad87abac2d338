"""Copies: what may be where, and how much they help."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning.placement import Placement, device_loads, greedy, imbalance, moved, replicated, split

TRACE = Path(__file__).parents[2] / "golden" / "moe_trace.npz"


def most(placement, loads, shares=None):
    return max(device_loads(placement, loads, shares))


@st.composite
def cases(draw):
    nodes = draw(st.integers(1, 2))
    num_devices = nodes * draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 12))
    fewest = -(-num_experts // num_devices)
    slots = fewest + draw(st.integers(0, 2))
    replicas = draw(st.integers(0, 3))
    loads, before = (draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts)) for _ in range(2))
    current = draw(
        st.sampled_from(
            [
                None,
                Placement.contiguous(num_experts, num_devices),
                replicated(before, num_devices, slots, replicas, nodes=nodes),
            ]
        )
    )
    return loads, num_devices, slots, replicas, nodes, current


def check(placement, slots, replicas):
    for experts, owned in zip(placement.devices, placement.owned, strict=True):
        assert owned <= slots
        assert len(experts) - owned <= replicas


@settings(max_examples=80, deadline=None)
@given(cases())
def test_what_is_where(case):
    loads, num_devices, slots, replicas, nodes, current = case
    found = replicated(loads, num_devices, slots, replicas, current, nodes=nodes)
    assert (found.num_experts, found.num_devices) == (len(loads), num_devices)
    check(found, slots, replicas)
    per_node = num_devices // nodes
    assert all(len({device // per_node for device in holders}) == 1 for holders in found.copies)
    assert all(loads[expert] for expert, holders in enumerate(found.copies) if len(holders) > 1) or current is not None
    if current is not None and nodes == 1:
        assert most(found, loads) <= most(current, loads) * (1 + 1e-9)
    if current is not None:
        for before, now, owned_before, owned_now in zip(
            current.devices, found.devices, current.owned, found.owned, strict=True
        ):
            if owned_now >= owned_before:
                stay = set(before[:owned_before]) & set(now[:owned_now])
                assert all(before.index(expert) == now.index(expert) for expert in stay)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_owners_stay(case):
    loads, num_devices, slots, replicas, _, current = case
    if current is None:
        current = Placement.contiguous(len(loads), num_devices)
    found = replicated(loads, num_devices, slots, replicas, current, keep_owners=True)
    assert found.owners == current.owners
    assert [experts[:owned] for experts, owned in zip(found.devices, found.owned, strict=True)] == [
        experts[:owned] for experts, owned in zip(current.devices, current.owned, strict=True)
    ]
    check(found, slots, replicas)
    assert most(found, loads) <= most(current, loads) * (1 + 1e-9)


def test_hot_expert_is_everywhere():
    found = replicated([8, 0, 0, 0], 4, 1, 1)
    assert device_loads(found, [8, 0, 0, 0]) == (2, 2, 2, 2)
    assert sorted(map(len, found.devices)) == [1, 2, 2, 2]


def test_no_replicas_are_none():
    loads = [9, 7, 5, 5, 3, 1]
    found = replicated(loads, 3, 2, 0)
    assert all(len(holders) == 1 for holders in found.copies)
    assert most(found, loads) == most(greedy(loads, 3), loads) == 10


def test_nothing_moves_for_nothing():
    loads = [9, 8, 7, 6, 5, 4, 3, 2]
    found = replicated(loads, 4, 2, 1)
    assert replicated(loads, 4, 2, 1, found) == found
    # Devices are alike: with others' names for them nothing would be better.
    other = Placement(found.devices[::-1], found.owned[::-1])
    assert moved(other, replicated(loads, 4, 2, 1, other)) == 0


def test_the_devices_of_the_owners_are_kept():
    """Where the search starts anew, the devices are numbered so that little moves."""
    draw = np.random.default_rng(1)
    loads = list(draw.lognormal(0, 1.5, 32))
    current = greedy([load * draw.uniform(0.9, 1.1) for load in loads], 8)
    found = replicated(loads, 8, 4, 1, current)
    kept = sum(a == b for a, b in zip(found.owners, current.owners, strict=True))
    assert kept > 32 / 8 * 2


def test_published_example_of_eplb():
    """With a device less than two experts each there, whose 16 places are free; ours own 2 and copy 1: not worse."""
    layers = (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    )
    places = (
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    )
    for loads, experts in zip(layers, places, strict=True):
        devices = tuple(zip(experts[::2], experts[1::2], strict=True))
        held = [[number for number, on in enumerate(devices) if expert in on] for expert in range(12)]
        theirs = max(sum(loads[expert] / len(held[expert]) for expert in on) for on in devices)
        assert most(replicated(loads, 8, 2, 1, nodes=2), loads) <= theirs
        assert most(replicated(loads, 8, 2, 1), loads) <= theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1] * 4, 2, 1, 1), "2 devices with 1 slots each have no room for 4 experts"),
        (([1] * 4, 2, 2, -1), "replicas is -1: give 0 or more places for copies."),
        (([1] * 4, 2, 2, 1, Placement.contiguous(4, 4)), "the current placement is of 4 experts on 4 devices"),
        (([1, -1], 2, 1, 1), "the load of expert 1 is -1.0"),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        replicated(*arguments)


def test_owners_that_cannot_stay():
    with pytest.raises(ValueError, match="keep_owners needs a current placement whose devices own at most 2 experts"):
        replicated([1] * 4, 2, 2, 1, keep_owners=True)
    with pytest.raises(ValueError, match="own at most 2 experts"):
        replicated([1] * 4, 2, 2, 1, Placement(((0, 1, 2), (3,))), keep_owners=True)


@pytest.mark.parametrize(
    ("num_devices", "placed", "copied", "fresh"), [(8, 2.879, 1.138, 1.07), (16, 5.744, 1.306, 1.2)]
)
def test_trace(num_devices, placed, copied, fresh):
    """Place by one sample's loads, measure on the next one: max/mean load, averaged.

    Greedy on every sample of the trace, as the published numbers are; copies on every sixtieth.
    """
    with np.load(TRACE) as trace:
        layers = trace["loads"].transpose(1, 0, 2).tolist()
    greedy_found, even, by_load = [], [], []
    for samples in layers:
        current = Placement.contiguous(32, num_devices)
        with_copies = current
        for index, loads in enumerate(samples):
            if index:
                new = greedy(samples[index - 1], num_devices, current=current)
                if imbalance(new, samples[index - 1]) < imbalance(current, samples[index - 1]):
                    current = new
            greedy_found.append(imbalance(current, loads))
            if index % 60 == 59:
                with_copies = replicated(samples[index - 1], num_devices, None, 1, with_copies)
                even.append(imbalance(with_copies, loads))
                by_load.append(imbalance(with_copies, loads, split(with_copies, loads)))
    assert np.mean(greedy_found) == pytest.approx(placed, rel=0.005)
    assert np.mean(even) < copied
    assert np.mean(by_load) < fresh
