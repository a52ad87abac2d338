"""The order of the devices: exact where it says so, never worse than the order given elsewhere."""

import random
import re
from itertools import pairwise, permutations
from math import inf, isclose

import pytest

from paceline.planning import Block, Device, DoesNotFit, bottleneck, links_in_order, partition, search_order


def instance(draw):
    num_devices = draw.choice([1, 2, 3, 3, 4, 4, 5])
    num_blocks = draw.randint(num_devices, 9)
    blocks = [
        Block(draw.randint(0, 5), draw.randint(0, 10), draw.randint(0, 10), draw.randint(0, 3))
        for _ in range(num_blocks)
    ]
    devices = [Device(draw.choice([1, 2, 4]), draw.choice([inf, draw.randint(5, 20)])) for _ in range(num_devices)]
    rates = draw.choice([[1.0, 5.0], [draw.random() + 0.1 for _ in range(9)]])
    links = [[draw.choice(rates) for _ in devices] for _ in devices] if draw.random() < 0.7 else []
    return blocks, devices, links, [draw.randint(0, 3) for _ in devices]


def every_order(blocks, devices, links, live):
    for order in permutations(range(len(devices))):
        rates = [min(links[i][j], links[j][i]) for i, j in pairwise(order)] if links else []
        try:
            yield partition(blocks, [devices[device] for device in order], rates, live=live).bottleneck_s
        except DoesNotFit:
            yield inf


def check_consistent(found, blocks, devices, links):
    assert sorted(found.order) == list(range(len(devices)))
    in_order = [devices[device] for device in found.order]
    rates = links_in_order(links, found.order)
    assert found.bottleneck_s == bottleneck(blocks, in_order, rates, found.boundaries)


def test_as_good_as_the_best_of_all_orders():
    draw = random.Random(1)
    impossible = 0
    for _ in range(100):
        blocks, devices, links, live = instance(draw)
        orders = list(every_order(blocks, devices, links, live))
        try:
            found = search_order(blocks, devices, links, live=live)
        except DoesNotFit:
            assert min(orders) == inf
            impossible += 1
            continue
        assert isclose(found.bottleneck_s, min(orders), rel_tol=1e-12)
        assert found.bottleneck_s < orders[0] or found.order == tuple(range(len(devices)))
        check_consistent(found, blocks, devices, links)
    assert 5 < impossible < 75


def many(**changed):
    """Twelve devices, no two alike: more than the exact search takes with 100 blocks."""
    return [Device(1.0 + index / 100, **changed) for index in range(12)]


def test_a_local_search_where_there_are_too_many_avoids_slow_links():
    blocks, devices = [Block(1.0, 1.0)] * 100, many()
    links = [[1.0] * 12 for _ in devices]
    for device in (1, 5, 8):
        links[device][device + 1] = 0.01  # one direction is enough
    found = search_order(blocks, devices, links)
    given = partition(blocks, devices, links_in_order(links, range(12)))
    assert given.bottleneck_s == 200.0
    assert found.bottleneck_s < 10.0
    check_consistent(found, blocks, devices, links)


def test_a_local_search_finds_an_order_that_fits():
    """The first stage keeps twelve micro-batches of a large embedding; the device with room for that is the last."""
    blocks = [Block(1.0, 0.0, 1.0, 10.0), *[Block(1.0, 0.0, 1.0)] * 99]
    devices = [*many(memory_bytes=20.0)[:-1], Device(1.0, 200.0)]
    live = range(12, 0, -1)
    with pytest.raises(DoesNotFit):
        partition(blocks, devices, live=live)
    found = search_order(blocks, devices, live=live)
    assert found.order[0] == 11
    assert found.bottleneck_s == pytest.approx(100 / 12, rel=0.1)
    check_consistent(found, blocks, devices, ())


def test_devices_of_two_kinds_are_no_large_search():
    blocks = [Block(1.0, 1.0)] * 120
    devices = [Device(1.0 + index % 2) for index in range(24)]
    # Slow ones on one host and fast ones on another: the best order crosses once, where little is sent.
    links = [[8.0 if (i - j) % 2 == 0 else 0.1 for j in range(24)] for i in range(24)]
    blocks[79] = Block(1.0, 0.1)
    found = search_order(blocks, devices, links)
    assert [device % 2 for device in found.order] == [1] * 12 + [0] * 12
    assert found.bottleneck_s == 4.0
    check_consistent(found, blocks, devices, links)


def test_the_order_given_is_kept_if_none_is_better():
    found = search_order([Block(1.0)] * 6, [Device(1.0), Device(2.0)])
    assert (found.order, found.boundaries) == ((0, 1), (0, 2, 6))
    found = search_order([Block(4.0), Block(1.0), Block(1.0)], [Device(1.0), Device(2.0)])
    assert (found.order, found.boundaries) == ((1, 0), (0, 1, 3))


def test_nothing_fits_in_any_order():
    with pytest.raises(DoesNotFit, match="stage 1 on device 1 needs 50 bytes at least"):
        search_order([Block(1.0, 0, 10), Block(1.0, 0, 50)], [Device(1.0, 20), Device(2.0, 30)])


@pytest.mark.parametrize("links", [[[1.0]], [[1.0, 1.0], [1.0]], [[1.0] * 3] * 3])
def test_links_that_are_no_matrix(links):
    with pytest.raises(ValueError, match=re.escape("links is no matrix of 2 rows with 2 values each")):
        search_order([Block(1.0)] * 2, [Device()] * 2, links)


def test_rates_that_are_none():
    links = [[0.0, 1.0], [-1.0, 0.0]]
    with pytest.raises(ValueError, match=re.escape("links[1][0] is -1.0: give bytes a second, above 0.")):
        search_order([Block(1.0)] * 2, [Device()] * 2, links)
