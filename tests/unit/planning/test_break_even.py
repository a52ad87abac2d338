"""Where asynchronous pipelines stop being faster, against closed forms and exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from paceline.planning.break_even import (
    FLUSHED,
    FLUSHING,
    BreakEven,
    break_even,
    compare,
    exists,
    group_sizes,
)
from paceline.schedules.asynchronous import multidirection
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import kfkb
from paceline.schedules.simulate import simulate
from paceline.schedules.steady import period


def uniform(num_stages, transfer_s=0.0, latency_s=0.0):
    return Costs.uniform(num_stages, 1.0, 2.0, transfer_s, latency_s)


# By hand for four stages: 1F1B takes (M+3)(F+B), M/4 rounds 13 each, a flush of them F+B more, one direction M(F+B).
@pytest.mark.parametrize("micro_batches", [8, 16, 32, 36, 40])
def test_four_stages(micro_batches):
    found = compare(uniform(4), micro_batches)
    assert found["1f1b"] == found["kfkb"] == 3 * micro_batches + 9
    assert found["multidirection"] == 3.25 * micro_batches
    assert found[FLUSHED] == 3.25 * micro_batches + 3
    assert found["one_direction"] == 3 * micro_batches
    assert list(found) == ["1f1b", "kfkb", "dualpipev", "multidirection", FLUSHED, "one_direction"]


@pytest.mark.parametrize(("micro_batches", "ratio"), [(8, 1.27), (16, 1.10), (36, 1.0)])
def test_published_speed_ups(micro_batches, ratio):
    found = compare(uniform(4), micro_batches)
    assert found["1f1b"] / found["multidirection"] == pytest.approx(ratio, abs=5e-3)


@pytest.mark.parametrize("micro_batches", [8, 16, 32])
def test_dualpipev_has_a_shorter_flush(micro_batches):
    """Published, with sends that wait for the backward beside them: 31, 55, 103."""
    found = compare(uniform(4), micro_batches)["dualpipev"]
    assert 3 * micro_batches + 5 < found <= 3 * micro_batches + 7


def test_what_does_not_exist_is_left_out():
    assert list(compare(uniform(4), 6)) == ["1f1b", "kfkb", "one_direction"]
    assert list(compare(uniform(4), 2)) == ["1f1b", "one_direction"]
    assert list(compare(uniform(7), 14)) == ["1f1b", "kfkb", "dualpipev", "one_direction"]
    assert compare(uniform(1), 4) == dict.fromkeys(("1f1b", "kfkb", "dualpipev", "one_direction"), 12.0)
    assert [shape for shape in ((4, 0), (4, 4), (4, 6), (3, 3), (6, 6), (36, 36)) if exists(*shape)] == [(4, 4), (6, 6)]


def test_the_best_of_kfkb():
    costs = uniform(4, 3.0)
    each = {k: simulate(kfkb(4, 16, k), costs).makespan_s for k in (2, 4, 8)}
    assert compare(costs, 16)["kfkb"] == min(each.values()) < max(each.values())


def test_group_sizes():
    assert [group_sizes(count) for count in (1, 2, 3, 4, 5, 16, 17)] == [
        *((), (), (2,), (2,), (2, 4), (2, 4, 8), (2, 4, 8, 16))
    ]


def test_what_a_step_costs_besides_counts_for_all():
    costs = uniform(4)
    more = {name: step_s + 0.5 for name, step_s in compare(costs, 8).items()}
    assert compare(replace(costs, step_s=0.5), 8) == more


# 3.25 M < 3 M + 9, and less than 3 M + 5.5.
@pytest.mark.parametrize(("against", "most"), [("1f1b", 32), ("kfkb", 32), ("dualpipev", 20)])
def test_most_micro_batches_of_four_stages(against, most):
    assert break_even(uniform(4), 8, against).micro_batches == most


def test_two_devices_have_no_break_even_point():
    """Without a bubble, and with fast links."""
    assert break_even(uniform(2), 4) == BreakEven(None, None)


def test_none_and_all():
    assert break_even(uniform(4), 8, most_micro_batches=32).micro_batches is None
    assert break_even(uniform(4), 8, most_micro_batches=36).micro_batches == 32
    # Groups hide what costs multidirection a quarter of its time, already where a step is one round.
    assert break_even(uniform(4, 6.0, 3.0), 8, "kfkb", most_micro_batches=64).micro_batches in (0, 4)


def random_costs(random):
    links = tuple(Link(random.choice((2.0, 4.0, 8.0)), random.randrange(0, 4) / 8) for _ in range(3))
    return Costs(
        tuple(random.randrange(8, 12) / 8 for _ in range(4)),
        tuple(random.randrange(16, 24) / 8 for _ in range(4)),
        (1.0,) * 3,
        links,
        links,
        step_s=random.choice((0.0, 1.0)),
    )


@pytest.mark.parametrize("seed", range(4))
def test_most_micro_batches_is_that_of_exhaustive_search(seed):
    costs = random_costs(Random(seed))
    asynchronous_s = {count: period(multidirection(4, count), costs) for count in range(4, 41, 4)}
    for against, flushing_s in FLUSHING.items():
        others_s = {count: flushing_s(costs, count) for count in asynchronous_s}
        wins = [
            count for count, other_s in others_s.items()
            if other_s is None or asynchronous_s[count] < other_s * (1 - 1e-9)
        ]  # fmt: skip
        most = break_even(costs, 8, against, most_micro_batches=40).micro_batches
        assert wins == list(range(4, (40 if most is None else most) + 1, 4))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_micro_batches", [8, 16])
def test_transfer_times_are_where_it_turns(seed, num_micro_batches):
    costs = random_costs(Random(seed))
    slowest_s = max(1 / link.bytes_per_s + link.latency_s for link in costs.down)
    found = break_even(costs, num_micro_batches, "kfkb").transfer_s
    assert found is None or found > 0

    def wins(transfer_s):
        factor = transfer_s / slowest_s
        links = tuple(Link(link.bytes_per_s / factor, link.latency_s * factor) for link in costs.down)
        tried = replace(costs, down=links, up=links)
        asynchronous_s = period(multidirection(4, num_micro_batches), tried)
        return asynchronous_s < FLUSHING["kfkb"](tried, num_micro_batches) * (1 - 1e-9)

    longest_s = 2 * max(map(sum, zip(costs.forward_s, costs.backward_s, strict=True)))
    assert wins(0.9 * (found or longest_s))
    assert found is None or not wins(found + 1.1e-3 * longest_s)


def test_transfers_of_alike_links_where_there_are_none():
    with_none, with_some = (break_even(uniform(4, transfer_s), 16, "kfkb").transfer_s for transfer_s in (0.0, 0.1))
    assert with_none == pytest.approx(with_some) == pytest.approx(5 / 14, abs=6e-3)  # 52 + 20 c against 57 + 6 c


def test_what_a_host_sends_counts_as_a_link():
    shared = replace(uniform(4), hosts=(0, 1, 2, 3), egress_bytes_per_s=(4.0,) * 4)
    assert break_even(shared, 16, "kfkb").transfer_s == pytest.approx(5 / 14, abs=6e-3)


def test_slower_than_1f1b_without_transfers():
    assert break_even(uniform(4), 40).transfer_s == 0.0


@pytest.mark.parametrize(
    ("stages", "micro_batches", "against", "message"),
    [
        (4, 8, "gpipe", "against='gpipe' is no schedule with a flush: choose one of 1f1b, kfkb, dualpipev."),
        (7, 7, "1f1b", "7 devices have no multi-direction order"),
        (4, 10, "1f1b", "10 micro-batches a step do not fill rounds of 4"),
    ],
)
def test_refusals(stages, micro_batches, against, message):
    with pytest.raises(ValueError, match=message):
        break_even(uniform(stages), micro_batches, against)


def test_fewer_directions_win_over_fewer_micro_batches():
    """By hand for eight stages of forwards of 1 and backwards of 2: two directions take 30 a round, 1F1B 3M + 21."""
    found = break_even(uniform(8), 8, num_directions=2)
    assert found.micro_batches == 24  # 90 against 93; 32 take 120 against 117
    assert break_even(uniform(8), 8).micro_batches == 160
