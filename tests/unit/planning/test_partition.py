"""The partition: the dynamic programme finds what looking at every split finds, with and without limits."""

import random
import re
from fractions import Fraction
from functools import reduce
from itertools import combinations, pairwise
from math import inf, isclose, nan
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning import Block, Device, DoesNotFit, bottleneck, partition


def every_split(num_blocks, num_devices):
    for cuts in combinations(range(1, num_blocks), num_devices - 1):
        yield (0, *cuts, num_blocks)


def brute_force(blocks, devices, links, live):
    """The smallest bottleneck of all splits that fit, infinite if none does; nothing of the package is used."""
    best = inf
    rates = links or [inf] * (len(devices) - 1)
    for boundaries in every_split(len(blocks), len(devices)):
        cuts = zip(boundaries[1:-1], rates, strict=True)
        worst = max((2 * blocks[cut - 1][1] / rate for cut, rate in cuts), default=0.0)
        for (first, end), (speed, limit), alive in zip(pairwise(boundaries), devices, live, strict=True):
            if sum(memory + alive * kept for _, _, memory, kept in blocks[first:end]) > limit:
                break
            worst = max(worst, sum(work for work, *_ in blocks[first:end]) / speed)
        else:
            best = min(best, worst)
    return best


def instance(draw, *, memory, links):
    """At most 12 blocks on at most 5 devices; half of them with whole numbers, where equal sums are common."""
    num_devices = draw.randint(1, 5)
    num_blocks = draw.randint(num_devices, 12)
    work = draw.choice([lambda: draw.randint(0, 5), lambda: draw.random() ** 3])
    blocks = [Block(work(), draw.randint(0, 10), draw.randint(0, 10), draw.randint(0, 3)) for _ in range(num_blocks)]
    rates = [draw.choice([inf, 1.0, 20 * draw.random() + 0.1]) for _ in range(num_devices - 1)]
    devices = [
        Device(draw.choice([0.5, 1, 2, 4, draw.random() + 0.1]), draw.choice([inf, draw.randint(5, 60)]))
        for _ in range(num_devices)
    ]
    if not memory:
        devices = [Device(device.speed) for device in devices]
    return blocks, devices, rates if links else [], [draw.randint(0, 3) for _ in devices]


@pytest.mark.parametrize("links", [False, True], ids=["free", "links"])
@pytest.mark.parametrize("memory", [False, True], ids=["unlimited", "memory"])
def test_as_good_as_the_best_of_all_splits(memory, links):
    draw = random.Random(f"{memory} {links}")
    impossible = 0
    for _ in range(1000):
        blocks, devices, rates, live = instance(draw, memory=memory, links=links)
        best = brute_force(blocks, devices, rates, live)
        try:
            found = partition(blocks, devices, rates, live=live)
        except DoesNotFit:
            assert best == inf
            impossible += 1
            continue
        assert isclose(found.bottleneck_s, best, rel_tol=1e-12), (blocks, devices, rates, live)
        assert found.bottleneck_s == bottleneck(blocks, devices, rates, found.boundaries)
        assert found.order == tuple(range(len(devices)))
        for (first, end), device, alive in zip(pairwise(found.boundaries), devices, live, strict=True):
            need = sum(block.memory_bytes + alive * block.live_bytes for block in blocks[first:end])
            assert first < end
            assert need <= device.memory_bytes
    assert (impossible > 100) == memory


def test_without_links_on_equal_devices_it_is_linear_partitioning():
    draw = random.Random(2)
    for _ in range(200):
        works = [draw.randint(1, 30) for _ in range(draw.randint(1, 40))]
        num_parts = draw.randint(1, len(works))

        def parts(most, works=works):
            """How many runs of at most so much work the blocks fill, one after the other."""
            count, left = 1, most
            for work in works:
                if work > left:
                    count, left = count + 1, most
                left -= work
            return count

        classic = next(most for most in range(max(works), sum(works) + 1) if parts(most) <= num_parts)
        assert partition([Block(work, 1.0) for work in works], [Device()] * num_parts).bottleneck_s == classic


@given(st.integers(0, 2**32), st.sampled_from([0.25, 2.0, 1024.0]))
def test_faster_by_x_is_shorter_by_x(seed, factor):
    blocks, devices, rates, live = instance(random.Random(seed), memory=False, links=True)
    faster = [Device(device.speed * factor) for device in devices]
    slow = partition(blocks, devices, rates, live=live)
    fast = partition(blocks, faster, [rate * factor for rate in rates], live=live)
    assert fast.bottleneck_s * factor == slow.bottleneck_s
    assert fast.boundaries == slow.boundaries


@given(st.integers(0, 2**32))
def test_one_more_equal_device_never_hurts(seed):
    draw = random.Random(seed)
    blocks = [Block(draw.random()) for _ in range(12)]
    times = [partition(blocks, [Device()] * count).bottleneck_s for count in range(1, 13)]
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(times))
    assert times[-1] == max(block.work for block in blocks)


def test_speeds_of_four_two_one_one():
    blocks, devices = [Block(1.0, 1.0)] * 24, [Device(speed) for speed in (4, 2, 1, 1)]
    found = partition(blocks, devices)
    assert [end - first for first, end in pairwise(found.boundaries)] == [12, 6, 3, 3]
    assert found.bottleneck_s == 3.0
    assert bottleneck(blocks, devices, (), (0, 6, 12, 18, 24)) == 2.0 * found.bottleneck_s


def test_a_slow_link_is_crossed_where_little_is_sent():
    blocks = [Block(1.0, sent) for sent in (8, 8, 8, 1, 8, 8)]
    found = partition(blocks, [Device(), Device()], [2.0])
    assert found.boundaries == (0, 4, 6)
    assert found.bottleneck_s == 4.0
    assert partition(blocks, [Device(), Device()], [8.0]).boundaries == (0, 3, 6)


def test_the_earliest_cuts_of_equally_good_ones():
    assert partition([Block(1.0)] * 10, [Device()] * 4).boundaries == (0, 2, 4, 7, 10)
    # Sums of tenths differ in the last bit, which decides nothing.
    assert partition([Block(0.1)] * 10, [Device()] * 4).boundaries == (0, 2, 4, 7, 10)
    assert partition([Block(0.0)] * 3, [Device()] * 2).boundaries == (0, 1, 3)


def test_bottleneck_adds_without_rounding():
    works = [0.1] * 10
    exact = sum(map(Fraction, works))
    assert bottleneck([Block(work) for work in works], [Device()], (), (0, 10)) == float(exact)
    assert partition([Block(work) for work in works], [Device()]).bottleneck_s == float(exact) != reduce(add, works)


@pytest.mark.parametrize(
    ("memory", "limits", "live", "stage", "need", "limit", "why"),
    [
        # Three devices hold two blocks each, and four are left.
        ([10] * 10, [25] * 4, 0, 3, 40, 25, "blocks 6 to 9, what the stages before cannot hold"),
        # The huge block is the first, and so stage 0's.
        ([50, 1, 1], [40, 60], 0, 0, 50, 40, "block 0 alone"),
        # Stage 0 may leave block 1 or block 2 to stage 1, which holds neither.
        ([1, 30, 20, 1], [60, 15, 60], 0, 1, 20, 15, "block 2 alone"),
        ([30, 40], [60], 0, 0, 70, 60, "all blocks"),
        # State alone would fit; two live micro-batches of 10 a block do not.
        ([10] * 4, [25, 60], 2, 0, 30, 25, "block 0 alone"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(memory, limits, live, stage, need, limit, why):
    blocks = [Block(1.0, 0.0, size, 10) for size in memory]
    devices = [Device(1.0, size) for size in limits]
    with pytest.raises(DoesNotFit) as caught:
        partition(blocks, devices, live=[live] * len(devices))
    assert (caught.value.stage, caught.value.need_bytes, caught.value.limit_bytes) == (stage, need, limit)
    assert str(caught.value).startswith(
        f"no split fits in memory: stage {stage} on device {stage} needs {need} bytes at least ({why}) and its limit "
        f"is {limit} bytes; take more devices, devices with more memory, or blocks that need less ("
    )


@pytest.mark.parametrize(
    ("need", "shown"),
    [
        (3 * 2**30, "3221225472 bytes (3.00 GiB)"),
        (2**30 - 1, "1073741823 bytes (1024.00 MiB)"),
        (9_741_271, "9741271 bytes (9.29 MiB)"),
        (1536, "1536 bytes (1.50 KiB)"),
        (1023, "1023 bytes"),
    ],
)
def test_sizes_are_shown_in_units_for_people_too(need, shown):
    with pytest.raises(DoesNotFit, match=re.escape(f"needs {shown} at least (block 0 alone) and its limit is 2 bytes")):
        partition([Block(1.0, 0, need)] * 2, [Device(1.0, 2)] * 2)


def test_the_limit_may_be_one_that_was_set():
    with pytest.raises(DoesNotFit, match=r"memory_gib where it is set\.$"):
        partition([Block(1.0, 0, 3)], [Device(1.0, 2)])


def test_memory_that_is_filled_to_the_last_byte_fits():
    blocks = [Block(1.0, 0, 2**53 // 8 + 1)] * 8
    limit = 4 * (2**53 // 8 + 1)
    assert partition(blocks, [Device(1.0, limit)] * 2).boundaries == (0, 4, 8)
    with pytest.raises(DoesNotFit):
        partition(blocks, [Device(1.0, limit - 1), Device(1.0, limit)])


BLOCKS, DEVICES = [Block(1.0, 1.0)] * 3, [Device(), Device()]


@pytest.mark.parametrize(
    ("blocks", "devices", "links", "live", "message"),
    [
        ([], DEVICES, (), None, "there are no blocks: give one at least."),
        (BLOCKS, [], (), None, "there are no devices: give one at least."),
        (BLOCKS, [Device()] * 4, (), None, "4 devices are more than 3 blocks: each device gets one at least; take"),
        (BLOCKS, DEVICES, (1.0, 1.0), None, "links has 2 values for 2 devices: give 1, one between two neighbours"),
        (BLOCKS, DEVICES, (0.0,), None, "links[0] is 0.0: give bytes a second, above 0."),
        (BLOCKS, DEVICES, (nan,), None, "links[0] is nan: give bytes a second, above 0."),
        (BLOCKS, DEVICES, (), (1,), "live has 1 values for 2 devices: give one a stage."),
        (BLOCKS, DEVICES, (), (1, -1), "live[1] is -1: give a number from 0 upwards."),
        ([*BLOCKS, Block(-1.0)], DEVICES, (), None, "blocks[3].work is -1.0: give a number from 0 upwards."),
        ([*BLOCKS, Block(nan)], DEVICES, (), None, "blocks[3].work is nan: give a number from 0 upwards."),
        ([*BLOCKS, Block(inf)], DEVICES, (), None, "blocks[3].work is inf: give a number from 0 upwards."),
        ([Block(1, -2), *BLOCKS], DEVICES, (), None, "blocks[0].activation_bytes is -2: give a number from 0 upwards."),
        ([Block(1, 1, inf), *BLOCKS], DEVICES, (), None, "blocks[0].memory_bytes is inf: give a number from 0"),
        ([Block(1, 1, 1, nan), *BLOCKS], DEVICES, (), None, "blocks[0].live_bytes is nan: give a number from 0"),
        (BLOCKS, [Device(0.0), Device()], (), None, "devices[0].speed is 0.0: give a number above 0."),
        (BLOCKS, [Device(), Device(nan)], (), None, "devices[1].speed is nan: give a number above 0."),
        (BLOCKS, [Device(), Device(1.0, nan)], (), None, "devices[1].memory_bytes is nan: give a number from 0"),
        (BLOCKS, [Device(), Device(1.0, -1)], (), None, "devices[1].memory_bytes is -1: give a number from 0"),
        ([Block(1e308)] * 3, DEVICES, (), None, "the numbers are too far apart to be computed with"),
        ([Block(1e200)] * 3, [Device(1e-200)], (), None, "the numbers are too far apart to be computed with"),
        ([Block(1.0, 1e200)] * 3, DEVICES, (1e-200,), None, "the numbers are too far apart to be computed with"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(blocks, devices, links, live, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        partition(blocks, devices, links, live=live)


@pytest.mark.parametrize("boundaries", [(0, 3), (0, 0, 3), (0, 2, 2), (1, 2, 3), (0, 3, 2), (0, 1, 2, 3), ()])
def test_boundaries_that_are_none(boundaries):
    message = f"boundaries {list(boundaries)} do not split 3 blocks into 2 stages: give 3 rising numbers from 0 to 3."
    with pytest.raises(ValueError, match=re.escape(message)):
        bottleneck(BLOCKS, DEVICES, (), boundaries)


def test_a_large_one_is_the_optimum():
    """No split is better: as many blocks as go below the answer, one stage after the other, do not reach the end."""
    draw = random.Random(3)
    blocks = [Block(draw.random()) for _ in range(1000)]
    devices = [Device(draw.uniform(0.5, 2.0)) for _ in range(64)]
    best = partition(blocks, devices).bottleneck_s
    done = 0
    for device in devices:
        work = 0.0
        while done < len(blocks) and work + blocks[done].work < best * device.speed * (1 - 1e-9):
            work += blocks[done].work
            done += 1
    assert done < len(blocks)
