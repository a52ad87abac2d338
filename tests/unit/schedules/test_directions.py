"""Orders of directions, against the published ones and against what the static order needs of them."""

from __future__ import annotations

import pytest

from paceline.schedules import directions

COUNTS = (2, 4, 8, 12, 16, 20, 24, 28, 32)


# The published orders (AMDP, arXiv 2605.29664), one string a direction.
@pytest.mark.parametrize(
    ("num_devices", "orders"),
    [
        (2, ["01"]),
        (4, ["0123", "3210"]),
        (8, ["01234567", "32107654", "45670123", "76543210"]),
    ],
)
def test_published_orders(num_devices, orders):
    assert directions.routes(num_devices) == tuple(tuple(map(int, order)) for order in orders)


@pytest.mark.parametrize(("num_devices", "groups"), [(2, [(0,), (1,)]), (4, [(0, 3), (1, 2)]),
                                                     (8, [(0, 3, 4, 7), (1, 2, 5, 6)])])  # fmt: skip
def test_published_mirror_groups(num_devices, groups):
    assert list(directions.mirror_groups(directions.routes(num_devices))) == groups


@pytest.mark.parametrize("num_devices", COUNTS)
def test_what_every_order_obeys(num_devices):
    routes = directions.routes(num_devices)
    everyone = set(range(num_devices))
    assert len(routes) == directions.num_directions(num_devices) == num_devices // 2
    for route in routes:
        assert set(route) == everyone
    # All first stages lie on different devices, and so do all last ones: none has twice the embedding or the head.
    for end in (0, -1):
        assert len({route[end] for route in routes}) == len(routes)
    for device in everyone:
        stages = directions.stages_of(device, routes)
        assert len(set(stages)) == len(routes)
        assert [route[stage] for route, stage in zip(routes, stages, strict=True)] == [device] * len(routes)


@pytest.mark.parametrize("num_devices", range(2, 33, 2))
def test_there_and_back(num_devices):
    """Stages i and d-1-i on each of two devices, in mirror groups of those two."""
    routes = directions.routes(num_devices, 2)
    there = tuple(range(num_devices))
    assert routes == (there, there[::-1])
    assert list(directions.mirror_groups(routes)) == [(i, num_devices - 1 - i) for i in range(num_devices // 2)]
    assert 2 in directions.allowed(num_devices)
    if num_devices % 4 == 2 and num_devices > 2:
        assert directions.routes(num_devices) == routes


@pytest.mark.parametrize(
    ("num_devices", "asked", "take"),
    [(2, 3, "1 or 2"), (4, 1, "2"), (6, 3, "2"), (8, 3, "2 or 4"), (8, 8, "2 or 4"), (10, 5, "2"), (12, 1, "2 or 6")],
)
def test_other_numbers_of_directions_are_refused(num_devices, asked, take):
    with pytest.raises(ValueError, match=f"^{num_devices} devices have no order of {asked} directions ") as caught:
        directions.routes(num_devices, asked)
    assert str(caught.value).endswith(f": take {take}.")
    assert all(directions.num_directions(num_devices, int(count)) for count in take.split(" or "))


@pytest.mark.parametrize("num_devices", COUNTS)
def test_mirror_groups_part_the_devices(num_devices):
    routes = directions.routes(num_devices)
    groups = directions.mirror_groups(routes)
    assert sorted(device for group in groups for device in group) == list(range(num_devices))
    held = [{frozenset(directions.stages_of(device, routes)) for device in group} for group in groups]
    assert all(len(sets) == 1 for sets in held)
    assert len(groups) == 2
    # Every stage is held by each device of one group once, and by nobody else.
    assert sorted(stage for (stages,) in held for stage in stages) == list(range(num_devices))


@pytest.mark.parametrize(
    ("num_devices", "why", "nearest"),
    [
        (0, "two directions", "2 or 4"),
        (1, "two directions", "2 or 4"),
        (3, "two directions", "2 or 4"),
        (7, "two directions", "6 or 8"),
        (31, "two directions", "30 or 32"),
        (34, "checked for up to 32", "30 or 32"),
        (36, "checked for up to 32", "30 or 32"),
    ],
)
def test_refusal_says_why_and_what_to_take(num_devices, why, nearest):
    with pytest.raises(ValueError, match=f"^{num_devices} devices have no multi-direction order") as caught:
        directions.routes(num_devices)
    assert why in str(caught.value)
    assert str(caught.value).endswith(f"such as {nearest}.")
