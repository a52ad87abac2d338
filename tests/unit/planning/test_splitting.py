"""How load is split over copies."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.planning.placement import Placement, device_loads, split


def least_maximum(placement, loads, speeds=None):
    """By the theorem of minimum cuts: some set of devices has experts that are nowhere else, and their mean load."""
    speeds = speeds or [1.0] * placement.num_devices
    mean = sum(speeds) / len(speeds)
    numbers = range(placement.num_devices)
    sets = itertools.chain.from_iterable(itertools.combinations(numbers, size + 1) for size in numbers)
    return max(
        sum(load for load, holders in zip(loads, placement.copies, strict=True) if set(holders) <= set(devices))
        / sum(speeds[device] / mean for device in devices)
        for devices in sets
    )


@st.composite
def cases(draw):
    num_devices = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, num_devices - 1), min_size=1, max_size=8))
    owned = [[expert for expert, owner in enumerate(owners) if owner == device] for device in range(num_devices)]
    copied = [
        [expert for expert in draw(st.sets(st.integers(0, len(owners) - 1), max_size=3)) if expert not in own]
        for own in owned
    ]
    placement = Placement(
        tuple((*own, *others) for own, others in zip(owned, copied, strict=True)), tuple(map(len, owned))
    )
    loads = draw(st.lists(st.integers(0, 30) | st.floats(0, 1e9), min_size=len(owners), max_size=len(owners)))
    return placement, loads


@settings(max_examples=80, deadline=None)
@example((Placement(((0,), (0,)), (1, 0)), [5e-324]), 0.0)
@example((Placement(((0, 1), (1, 0)), (1, 1)), [1e308, 5e-324]), 0.0)
@given(cases(), st.sampled_from([0.0, 1e-3, 0.1]))
def test_no_split_is_better(case, tolerance):
    placement, loads = case
    shares = split(placement, loads, tolerance=tolerance)
    assert [len(parts) for parts in shares] == [len(holders) for holders in placement.copies]
    assert all(sum(parts) == pytest.approx(1) and min(parts) >= -1e-12 for parts in shares)
    most, least = max(device_loads(placement, loads, shares)), least_maximum(placement, loads)
    assert least * (1 - 1e-9) <= most <= least * (1 + tolerance + 1e-8)


@settings(max_examples=60, deadline=None)
@given(cases(), st.lists(st.integers(1, 8), min_size=5, max_size=5))
def test_no_split_is_better_where_devices_differ(case, speeds):
    placement, loads = case
    speeds = speeds[: placement.num_devices]
    shares = split(placement, loads, tolerance=0.0, speeds=speeds)
    assert all(sum(parts) == pytest.approx(1) and min(parts) >= -1e-12 for parts in shares)
    most, least = max(device_loads(placement, loads, shares, speeds)), least_maximum(placement, loads, speeds)
    assert least * (1 - 1e-9) <= most <= least * (1 + 1e-8)


def test_even_is_kept_where_it_is_best():
    assert split(Placement(((0, 1), (1, 0)), (1, 1)), [4, 2]) == ((0.5, 0.5), (0.5, 0.5))
    assert split(Placement(((0, 1), (1, 0)), (1, 1)), [0, 0]) == ((0.5, 0.5), (0.5, 0.5))


def test_load_is_passed_on_along_a_chain():
    """Device 0 shares expert 0 with device 1 alone, which shares expert 1 with device 2."""
    placement = Placement(((0,), (1, 0), (2, 1)), (1, 1, 1))
    shares = split(placement, [12, 3, 0], tolerance=0)
    assert device_loads(placement, [12, 3, 0], shares) == pytest.approx((6, 6, 3))
    assert shares[1] == pytest.approx((0, 1))


def test_what_is_no_load():
    with pytest.raises(ValueError, match="there are 1 loads for 2 experts"):
        split(Placement(((0, 1),)), [1])
