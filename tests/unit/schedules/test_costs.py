"""Costs: what is refused, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan

import pytest

from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import one_f_one_b
from paceline.schedules.simulate import simulate

EVERYTHING = Costs(
    forward_s=(1.0, 2.0, 3.0),
    backward_s=(2.0, 4.0, 6.0),
    message_bytes=(8.0, 9.0),
    down=(Link(100.0, 0.5), Link()),
    up=(Link(latency_s=0.25), Link(50.0)),
    hosts=(0, 0, 1),
    egress_bytes_per_s=(inf, 75.0),
    activation_bytes=(10.0, 11.0, 12.0),
    fixed_bytes=(1.0, 2.0, 3.0),
    step_s=0.125,
    weight_s=(1.0, 1.5, 6.0),
    deferred_bytes=(5.0, 6.0, 20.0),
    ahead_s=(0.5, 4.0, 0.0),
)


def test_uniform():
    assert Costs.uniform(3, 1.0, 2.0, 0.5, 0.25) == Costs(
        forward_s=(1.0,) * 3,
        backward_s=(2.0,) * 3,
        message_bytes=(1.0,) * 2,
        down=(Link(2.0, 0.25),) * 2,
        up=(Link(2.0, 0.25),) * 2,
    )
    assert Costs.uniform(2, 1.0, 2.0).down == (Link(inf, 0.0),)
    assert Costs.uniform(1, 1.0, 2.0, 0.5).down == ()


def test_two_stages_a_rank_in_v():
    costs = Costs(
        (2.0, 4.0, 6.0), (4.0, 6.0, 8.0), (10.0, 20.0), (Link(1.0), Link(2.0)), (Link(3.0), Link(4.0, 0.5)),
        activation_bytes=(2.0, 4.0, 8.0), weight_s=(1.0, 2.0, 3.0), deferred_bytes=(4.0, 6.0, 8.0),
        fixed_bytes=(1.0, 2.0, 3.0), step_s=0.25,
    )  # fmt: skip
    assert costs.of_chunks((0, 1, 2, 2, 1, 0)) == Costs(
        forward_s=(1.0, 1.0, 2.0, 2.0, 3.0, 3.0),
        backward_s=(2.0, 2.0, 3.0, 3.0, 4.0, 4.0),
        message_bytes=(10.0, 10.0, 20.0, 20.0, 20.0),
        down=(Link(1.0), Link(2.0), Link(), Link(4.0, 0.5), Link(3.0)),
        up=(Link(3.0), Link(4.0, 0.5), Link(), Link(2.0), Link(1.0)),
        activation_bytes=(1.0, 1.0, 2.0, 2.0, 4.0, 4.0),
        weight_s=(0.5, 0.5, 1.0, 1.0, 1.5, 1.5),
        deferred_bytes=(2.0, 2.0, 3.0, 3.0, 4.0, 4.0),
        fixed_bytes=(1.0, 2.0, 3.0),
        step_s=0.25,
    )
    bare = Costs((2.0,), (4.0,)).of_chunks((0, 0))
    assert (bare.forward_s, bare.message_bytes, bare.down) == ((1.0, 1.0), (), (Link(),))
    one_way = replace(costs, up=()).of_chunks((0, 1, 2, 2, 1, 0))
    assert one_way.down == (Link(1.0), Link(2.0), Link(), Link(), Link())
    assert one_way.up == (Link(), Link(), Link(), Link(2.0), Link(1.0))


def test_two_stages_a_rank_that_go_round():
    """From the last rank to the first there is no link of their own: the slowest, and the longest latency."""
    links = (Link(1.0), Link(2.0, 0.25)), (Link(3.0), Link(4.0, 0.5))
    round_about = Costs((2.0,) * 3, (4.0,) * 3, (10.0, 20.0), *links).of_chunks((0, 1, 2, 0, 1, 2))
    assert round_about.down == (Link(1.0), Link(2.0, 0.25), Link(1.0, 0.5), Link(1.0), Link(2.0, 0.25))
    assert round_about.up == (Link(3.0), Link(4.0, 0.5), Link(1.0, 0.5), Link(3.0), Link(4.0, 0.5))
    assert round_about.message_bytes == (10.0, 10.0, 20.0, 20.0, 20.0)


@pytest.mark.parametrize("costs", [EVERYTHING, Costs.uniform(3, 1.0, 2.0, 0.5), Costs((1.0,), (2.0,))])
def test_json_round_trip(costs):
    text = json.dumps(costs.to_dict(), allow_nan=False)
    assert Costs.from_dict(json.loads(text)) == costs


def test_json_leaves_out_what_is_empty():
    assert Costs((1.0,), (2.0,)).to_dict() == {"forward_s": [1.0], "backward_s": [2.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": ()}, r"forward_s is empty: give the seconds of a forward, one number a stage"),
        ({"backward_s": ()}, r"backward_s has 0 values and there are 3 stages: give 3, one a stage"),
        ({"message_bytes": (1.0,)}, r"message_bytes has 1 values and there are 3 stages: give 2, one a boundary"),
        ({"up": (Link(),) * 3}, r"up has 3 values and there are 3 stages: give 2, one a boundary"),
        ({"activation_bytes": (1.0,)}, r"activation_bytes has 1 values and there are 3 stages: give 3, one a stage"),
        ({"hosts": (0, 1, 2)}, r"hosts names host 2 and egress_bytes_per_s has 2 values: give 3, one a host"),
        ({"hosts": (0, -1, 1)}, r"host -1 is negative: hosts are numbered from 0"),
        ({"forward_s": (1.0, -2.0, 3.0)}, r"forward_s\[1\] is -2.0: give a number from 0 upwards"),
        ({"backward_s": (1.0, nan, 3.0)}, r"backward_s\[1\] is nan: give a number from 0 upwards"),
        ({"fixed_bytes": (inf, 0.0, 0.0)}, r"fixed_bytes\[0\] is inf: give a number from 0 upwards"),
        ({"weight_s": (1.0,)}, r"weight_s has 1 values and there are 3 stages: give 3, one a stage"),
        ({"weight_s": (1.0, 4.5, 1.0)}, r"weight_s\[1\] is 4.5 and backward_s\[1\] 4.0: give the part of the backward"),
        ({"ahead_s": (1.0,)}, r"ahead_s has 1 values and there are 3 stages: give 3, one a stage"),
        ({"ahead_s": (1.0, 4.5, 1.0)}, r"ahead_s\[1\] is 4.5 and backward_s\[1\] 4.0: give the part of the backward"),
        ({"deferred_bytes": (1.0, -1.0, 1.0)}, r"deferred_bytes\[1\] is -1.0: give a number from 0 upwards"),
        ({"down": (Link(0.0), Link())}, r"down\[0\].bytes_per_s is 0.0: give a number above 0"),
        ({"up": (Link(), Link(1.0, -1.0))}, r"up\[1\].latency_s is -1.0: give a number from 0 upwards"),
        ({"egress_bytes_per_s": (1.0, nan)}, r"egress_bytes_per_s\[1\] is nan: give a number above 0"),
        ({"step_s": -1.0}, r"step_s is -1.0: give a number from 0 upwards"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(EVERYTHING, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"foward_s": [1.0]}, r'"foward_s" is not a key of the costs; did you mean "forward_s"\?'),
        ({"colour": 1}, r'"colour" is not a key of the costs; choose from forward_s, backward_s, '),
        ({"down": [{"latency": 1}, {}]}, r'"latency" is not a key of down\[0\]; did you mean "latency_s"\?'),
        ({"down": [1.0, 2.0]}, r"down\[0\] is 1.0: give an object with bytes_per_s, latency_s"),
        ({"forward_s": 1.0}, r"forward_s is 1.0: give a list"),
        ({"forward_s": [1.0, "2", 3.0]}, r'forward_s\[1\] is "2": give a number'),
        ({"forward_s": [1.0, True, 3.0]}, r"forward_s\[1\] is true: give a number"),
        ({"hosts": [0, 0.5, 1]}, r"hosts\[1\] is 0.5: give a whole number"),
        ({"step_s": None}, r"step_s is null: give a number"),
        ({"step_s": [1.0]}, r"step_s is a list: give a number"),
    ],
)
def test_no_costs(changes, message):
    with pytest.raises(ValueError, match=message):
        Costs.from_dict({**EVERYTHING.to_dict(), **changes})


@pytest.mark.parametrize("name", ["forward_s", "backward_s"])
def test_compute_is_needed(name):
    values = EVERYTHING.to_dict()
    del values[name]
    with pytest.raises(ValueError, match=rf"{name} is missing: give a list of seconds, one number a stage"):
        Costs.from_dict(values)


def test_gradients_of_fewer_bytes_are_sent_faster() -> None:
    """1F1B of two stages and one micro-batch: forward, message, forward, backward, message, backward."""
    slow = Costs.uniform(2, 1.0, 2.0, transfer_s=4.0)
    fast = replace(slow, gradient_share=0.25)
    schedule = one_f_one_b(2, 1)
    assert simulate(schedule, slow).makespan_s == 1 + 4 + 1 + 2 + 4 + 2
    assert simulate(schedule, fast).makespan_s == 1 + 4 + 1 + 2 + 1 + 2
    assert Costs.from_dict(fast.to_dict()) == fast
    assert "gradient_share" not in slow.to_dict()


def test_a_split_backward_may_take_longer_than_a_whole_one() -> None:
    plain = Costs.uniform(1, 1.0, 2.0, weight_s=0.5)
    costs = replace(plain, split_factor=1.5)
    assert [costs.seconds[kind] for kind in "FBIW"] == [(1.0,), (2.0,), (2.25,), (0.75,)]
    assert Costs.from_dict(costs.to_dict()) == costs
    assert "split_factor" not in plain.to_dict()
    with pytest.raises(ValueError, match="split_factor is 0"):
        replace(plain, split_factor=0.0)
