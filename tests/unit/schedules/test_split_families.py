"""Families with split backwards: their bubble, their memory, and orders by hand."""

import time

import pytest

from paceline.schedules import Costs, families, simulate, verify
from paceline.schedules.split_families import (
    SPLIT_FAMILIES,
    dualpipev_split,
    vhalf,
    vmin,
    zbh1,
    zbh2,
    zbv,
)

UNIT_S = 0.02
"""Of a forward, and of both halves of a backward, through a rank's whole stage."""


def step_of(schedule, unit_s=UNIT_S, forward_s=None, weight_s=None):
    num_ranks = schedule.num_ranks
    whole = Costs(
        (forward_s or unit_s,) * num_ranks,
        (2 * unit_s,) * num_ranks,
        weight_s=(weight_s or unit_s,) * num_ranks,
        activation_bytes=(1.0,) * num_ranks,
    )
    return simulate(schedule, whole.of_chunks([schedule.rank(stage) for stage in range(schedule.num_stages)]))


@pytest.mark.parametrize(
    ("make", "eight_s", "sixteen_s"),
    [
        (families.one_f_one_b, 0.66, 1.14),
        (lambda *shape: families.interleaved(*shape, 2), 0.57, 1.05),
        (zbh1, 0.54, 1.02),
        (zbh2, 0.54, 1.02),
        (zbv, 0.51, 0.99),
        (dualpipev_split, 0.51, 0.99),
        (vmin, 0.59, 1.07),
        (vhalf, 0.57, 1.05),
    ],
)
def test_steps_of_four_ranks(make, eight_s, sixteen_s):
    assert step_of(make(4, 8)).makespan_s == pytest.approx(eight_s)
    assert step_of(make(4, 16)).makespan_s == pytest.approx(sixteen_s)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_shape(num_ranks):
    """Proven, in micro-batch order, within their memory; and what is refused says why."""
    for num_micro_batches in range(1, 33):
        for name, make in SPLIT_FAMILIES.items():
            if name == "dualpipev_split" and num_micro_batches < 2 * num_ranks:
                with pytest.raises(ValueError, match=r"is less than 2 · num_ranks"):
                    make(num_ranks, num_micro_batches)
                continue
            schedule = make(num_ranks, num_micro_batches)
            assert (schedule.name, schedule.num_micro_batches) == (name, num_micro_batches)
            proof = verify(schedule)
            assert proof.backward_in_order
            most = {"zbh1": num_ranks, "zbh2": 2 * num_ranks - 1, "dualpipev_split": 2 * num_ranks + 1}
            assert max(proof.peak_held) <= most.get(name, 2 * num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_bubbles_of_equal_stages(num_ranks, times):
    """F = B = W = 2 of a whole stage. ZB-V's orders miss the least there can be by a few per mille."""
    num_micro_batches = times * num_ranks
    work, later = 6 * num_micro_batches, num_ranks - 1

    def bubble(schedule):
        return step_of(schedule, unit_s=2.0).makespan_s - work

    assert bubble(zbh1(num_ranks, num_micro_batches)) == 2 * later
    assert later <= bubble(zbv(num_ranks, num_micro_batches)) <= later + 0.04 * work
    assert bubble(vmin(num_ranks, num_micro_batches)) < bubble(families.one_f_one_b(num_ranks, num_micro_batches))
    if times > 1:
        assert bubble(zbh2(num_ranks, num_micro_batches)) == 2 * later
        assert bubble(dualpipev_split(num_ranks, num_micro_batches)) == later


def test_zbh2_hides_backwards_that_take_longer_than_weights():
    """F + B − W of ZB-H1 for each of the three ranks after the first, F + B − 2W of ZB-H2 if that is more than F."""
    assert step_of(zbh1(4, 12), unit_s=1.0, weight_s=0.5).makespan_s == 12 * 3 + 3 * (1 + 1.5 - 0.5)
    assert step_of(zbh2(4, 12), unit_s=1.0, weight_s=0.5).makespan_s == 12 * 3 + 3 * (1 + 1.5 - 2 * 0.5)


@pytest.mark.parametrize(
    ("num_ranks", "of_vmin", "of_vhalf"), [(4, 2, 3), (6, 3, 4), (8, 4, 5), (16, 6, 9), (24, 9, 13)]
)
def test_memory_of_few_activations(num_ranks, of_vmin, of_vhalf):
    """In whole stages, of which 1F1B keeps as many as there are ranks."""
    for make, stages in ((vmin, of_vmin), (vhalf, of_vhalf), (zbv, num_ranks)):
        step = step_of(make(num_ranks, 3 * num_ranks))
        assert max(step.peak_bytes) == max(peak.held for peak in step.peaks) / 2 == stages


@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_few_activations_on_any_number_of_ranks(num_ranks):
    for make, share in ((vmin, 1 / 3), (vhalf, 1 / 2)):
        peak = max(verify(make(num_ranks, 3), paired=False).peak_held)
        assert peak <= 6
        if num_ranks <= 8:
            peak = max(verify(make(num_ranks, 4 * num_ranks), paired=False).peak_held)
            assert peak <= 2 * (share * num_ranks + 1.5)


def test_two_stages_on_each_of_64_ranks_take_a_moment():
    schedule, costs = dualpipev_split(64, 1024), Costs.uniform(128, 1.0, 2.0, 0.5)

    def seconds():
        begin = time.process_time()  # of this process: what else runs here counts little
        simulate(schedule, costs)
        return time.process_time() - begin

    assert any(seconds() < 6.0 for _ in range(3))  # 0.6 s of a core that is not slow


def rows(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_zbh1_by_hand():
    assert rows(zbh1(3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zbh2_by_hand():
    assert rows(zbh2(2, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zbv_by_hand():
    """The first rank has the first and the last stage; at the end what is deferred fills the gaps."""
    assert rows(zbv(1, 2)) == ["F0 F0.1 I0.1 I0 W0.1 W0 F1 F1.1 I1.1 I1 W1.1 W1"]
    first, last = rows(zbv(2, 4))
    assert first.startswith("F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 I0 ")
    assert last.startswith("F0 F0.1 F1 F1.1 I0.1 I0 W0.1 I1.1 I1 ")


@pytest.mark.parametrize("make", SPLIT_FAMILIES.values(), ids=SPLIT_FAMILIES)
def test_wrong_shapes_are_refused(make):
    with pytest.raises(ValueError, match=r"=0 must be 1 or more"):
        make(0, 8)
    with pytest.raises(ValueError, match=r"num_micro_batches=-1 must be 1 or more"):
        make(2, -1)
    with pytest.raises(ValueError, match=r"are more than 33554432 forwards and backwards a step"):
        make(4, 2**31)
