"""The generated schedule: against every family, against all orders that there are, and within memory."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules import Costs, Schedule, families, simulate, verify
from paceline.schedules.generator import generated
from paceline.schedules.schedule import backward_input, backward_weight, forward
from paceline.schedules.split_families import SPLIT_FAMILIES
from support.schedule_cases import split_costs

FAMILIES = (
    families.one_f_one_b,
    families.gpipe,
    *(partial(families.kfkb, k=k) for k in (2, 4)),
    *(partial(families.eager, slack=slack) for slack in (1.0, 2.0)),
    partial(families.interleaved, num_chunks=2),
    families.dualpipev,
    *SPLIT_FAMILIES.values(),
)


def routes_of(costs):
    """By route: costs of one stage a rank, and of two, round and in V."""
    plain = tuple(range(len(costs.forward_s)))
    return {plain: costs, **{route: costs.of_chunks(route) for route in (families.v_route(len(plain)), plain * 2)}}


def costs_for(schedule, costs_of):
    return costs_of[tuple(schedule.rank(stage) for stage in range(schedule.num_stages))]


@given(st.integers(1, 4).flatmap(split_costs), st.integers(1, 9), st.sampled_from((None, 3.0, 6.0, 12.0)))
@settings(max_examples=40, deadline=None)
def test_no_family_that_fits_is_faster(costs, num_micro_batches, room):
    costs_of = routes_of(costs)
    num_ranks = len(costs.forward_s)
    steps = []
    for make in FAMILIES:
        try:
            schedule = make(num_ranks, num_micro_batches)
        except ValueError:
            continue
        step = simulate(schedule, costs_for(schedule, costs_of))
        if room is None or max(step.peak_bytes) <= room:
            steps.append(step.makespan_s)
    rooms = None if room is None else (room,) * num_ranks
    if not steps:
        with contextlib.suppress(ValueError):  # there may be a slow one that fits
            generated(costs_of, num_micro_batches, rooms)
        return
    found = generated(costs_of, num_micro_batches, rooms)
    step = simulate(found, costs_for(found, costs_of))
    assert verify(found).backward_in_order
    assert step.makespan_s <= min(steps) * (1 + 1e-9)
    assert room is None or max(step.peak_bytes) <= room * (1 + 1e-6)


def orders_of(num_micro_batches):
    """All orders of one stage in which each kind runs in micro-batch order."""

    def extended(ran, order):
        if sum(ran) == 3 * num_micro_batches:
            yield tuple(order)
        for kind, make in enumerate((forward, backward_input, backward_weight)):
            if ran[kind] < (ran[kind - 1] if kind else num_micro_batches):
                after = [*ran[:kind], ran[kind] + 1, *ran[kind + 1 :]]
                yield from extended(after, [*order, make(ran[kind])])

    return list(extended([0, 0, 0], []))


def fastest_s(costs, num_micro_batches):
    steps = []
    for orders in product(orders_of(num_micro_batches), repeat=len(costs.forward_s)):
        try:
            steps.append(simulate(Schedule(orders, num_micro_batches), costs).makespan_s)
        except ValueError:
            continue
    return min(steps)


@given(split_costs(2), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_close_to_the_fastest_of_all_orders(costs, num_micro_batches):
    found = generated({(0, 1): costs}, num_micro_batches)
    assert simulate(found, costs).makespan_s <= 1.1 * fastest_s(costs, num_micro_batches)


@pytest.mark.parametrize(
    ("costs", "num_micro_batches", "makespan_s"),
    [
        (Costs((0.02,) * 4, (0.04,) * 4), 8, 0.51),
        (Costs((0.02,) * 4, (0.04,) * 4), 16, 0.99),
        # The weights' part is a good third: no family comes to this.
        (Costs((0.02,) * 4, (0.04,) * 4, weight_s=(0.015,) * 4), 8, 0.51),
    ],
)
def test_equal_stages(costs, num_micro_batches, makespan_s):
    costs_of = routes_of(costs)
    found = generated(costs_of, num_micro_batches)
    assert simulate(found, costs_for(found, costs_of)).makespan_s == pytest.approx(makespan_s, rel=0.005)


def test_a_heavy_head_and_a_slow_network():
    """Where families idle: 1F1B by half, and the best of them all by a part of that."""
    heavy = Costs((1.0, 1.0, 1.0, 1.5), (2.0, 2.0, 2.0, 3.0), weight_s=(0.8, 0.8, 0.8, 1.4))
    slow = Costs.uniform(4, 1.0, 2.0, 0.5, weight_s=0.8)
    for costs in (heavy, slow):
        costs_of = routes_of(costs)
        found = generated(costs_of, 8)
        assert found.name.startswith("generated")
        before = simulate(families.one_f_one_b(4, 8), costs).makespan_s
        assert before / simulate(found, costs_for(found, costs_of)).makespan_s > 1.25


def test_speeds_and_hosts_count():
    """The prediction is that of the full model."""
    costs = Costs((1.0, 1.0), (2.0, 2.0), speeds=(1.0, 0.5))
    found = generated({(0, 1): costs}, 4)
    assert simulate(found, costs).makespan_s < simulate(families.one_f_one_b(2, 4), costs).makespan_s


def test_less_memory_is_slower():
    costs_of = routes_of(Costs((1.0,) * 4, (2.0,) * 4, activation_bytes=(1.0,) * 4))
    steps = []
    for room in (2.0, 3.0, 4.0, 7.0):
        found = generated(costs_of, 12, (room,) * 4)
        step = simulate(found, costs_for(found, costs_of))
        assert max(step.peak_bytes) <= room
        steps.append(step.makespan_s)
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[2]


def test_too_little_memory():
    costs = Costs((1.0,) * 2, (2.0,) * 2, activation_bytes=(100.0,) * 2)
    with pytest.raises(ValueError, match=r"no schedule of 4 micro-batches on 2 ranks fits into memory: .* keeps 100 b"):
        generated({(0, 1): costs}, 4, (50.0, 50.0))


def test_the_same_costs_give_the_same_schedule():
    costs_of = routes_of(Costs.uniform(3, 1.0, 2.0, 0.25, weight_s=0.75))
    assert generated(costs_of, 7) == generated(costs_of, 7)
