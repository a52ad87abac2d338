"""Steps over links whose messages do not all take the same."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest

from paceline.schedules.asynchronous import one_direction
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import make
from paceline.schedules.simulate import simulate
from paceline.schedules.steady import period
from paceline.schedules.variation import expected, phases, resampled_s, varies

STAGES, MICRO_BATCHES = 3, 6


def varying(*multiples: float, transfer_s: float = 1.0) -> Costs:
    costs = Costs.uniform(STAGES, 1.0, 2.0, transfer_s)
    link = replace(costs.down[0], variation=multiples)
    return replace(costs, down=(link,) * (STAGES - 1), up=(link,) * (STAGES - 1))


def test_links_that_are_steady_make_the_step_of_the_mean() -> None:
    schedule = make("eager", STAGES, MICRO_BATCHES, slack=1.0)
    found = resampled_s(schedule, varying(1.0, 1.0, 1.0), phases(4))
    assert found == [simulate(schedule, varying()).makespan_s] * 4


def test_each_message_takes_its_multiple() -> None:
    """One link, all forwards first: arrivals follow one another as long as the messages take."""
    costs = replace(Costs.uniform(2, 0.0, 0.0, 1.0), forward_s=(0.0, 0.0), backward_s=(0.0, 0.0))
    costs = replace(costs, down=(Link(1.0, 0.5, (1.0, 2.0, 6.0)),), up=(Link(),))
    schedule = make("gpipe", 2, 3)
    assert resampled_s(schedule, costs, [0.0, 0.34, 0.67]) == [9.5] * 3
    short = make("gpipe", 2, 1)
    assert resampled_s(short, costs, [0.0, 0.34, 0.67]) == [1.5, 2.5, 6.5]


def test_messages_that_share_a_host_take_their_multiple_too() -> None:
    costs = Costs.uniform(2, 0.0, 0.0, 1.0)
    costs = replace(costs, hosts=(0, 1), egress_bytes_per_s=(1.0, float("inf")), up=(Link(),))
    costs = replace(costs, down=(Link(float("inf"), 0.0, (3.0,)),))
    assert resampled_s(make("gpipe", 2, 4), costs, [0.0]) == [12.0]


def test_a_stream_counts_its_steps_after_the_first() -> None:
    stream = one_direction(STAGES, MICRO_BATCHES)
    steady = varying(1.0, 1.0, transfer_s=0.1)
    assert resampled_s(stream, steady, [0.0]) == [pytest.approx(period(stream, steady))]
    assert resampled_s(stream, varying(0.1, 8.0, transfer_s=0.5), [0.0])[0] > 1.05 * period(stream, steady)


def test_phases_are_spread_however_many_there_are() -> None:
    assert phases(4) == [0.0, 0.5, 0.25, 0.75]
    assert sorted(phases(32)) == [number / 32 for number in range(32)]


def test_mean_and_quantile() -> None:
    seconds = [float(number) for number in range(1, 11)]
    assert expected(seconds) == 5.5
    assert [expected(seconds, risk) for risk in (0.5, 0.9, 0.95)] == [5.0, 9.0, 10.0]


def test_what_a_step_could_not_notice_is_not_replayed() -> None:
    assert varies(varying(0.5, 1.5))
    assert not varies(varying(0.5, 1.5, transfer_s=0.001))
    assert not varies(varying(1.0, 1.0))
    assert not varies(varying())
    assert not varies(Costs.uniform(1, 1.0, 2.0))


def test_variation_is_written_and_read() -> None:
    costs = varying(0.5, 1.5)
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    with pytest.raises(ValueError, match="a multiple in a link's variation is -1"):
        varying(1.0, -1.0)
    with pytest.raises(ValueError, match=r"down\[0\]\.variation"):
        Costs.from_dict({"forward_s": [1, 1], "backward_s": [1, 1], "down": [{"variation": 3}]})


def test_slower_messages_on_the_way_make_longer_steps_than_their_mean() -> None:
    chance = random.Random(0)
    multiples = [0.1 if chance.random() < 0.8 else 4.0 for _ in range(256)]
    mean = fmean(multiples)
    costs = varying(*(each / mean for each in multiples), transfer_s=mean)
    schedule = make("eager", STAGES, 32, slack=1.0)
    assert fmean(resampled_s(schedule, costs, phases(16))) > 1.05 * simulate(schedule, costs).makespan_s
