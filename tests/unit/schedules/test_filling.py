"""Where backwards of weights are put: in idle time, in order, within memory."""

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules import Costs, Link, Schedule, families, simulate, verify
from paceline.schedules.filling import composed, filled
from support.schedule_cases import ROUTES, split_costs


def rows(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def one_f_one_b(costs, *, room=inf, patience=0.5, num_micro_batches=2):
    num_ranks = len(costs.forward_s)
    schedule = families.one_f_one_b(num_ranks, num_micro_batches)
    return rows(filled(schedule, costs, (room,) * num_ranks, patience))


def test_weights_run_while_a_rank_waits():
    """The second stage has nothing to wait for but its last activation; the first waits for gradients."""
    assert one_f_one_b(Costs((1.0, 1.0), (2.0, 2.0))) == ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"]
    late = Costs((1.0, 1.0), (2.0, 2.0), (3.0,), (Link(1.0),), (Link(),))
    assert one_f_one_b(late) == ["F0 F1 I0 W0 I1 W1", "F0 I0 W0 F1 I1 W1"]


def test_patience():
    """The second stage ends its first backward of inputs at 3.75, its second activation is there at 4, and its
    weights' backward takes 1.
    """
    costs = Costs((1.0, 0.5), (2.0, 1.75), (1.5,), (Link(1.0),), (Link(),), weight_s=(1.0, 1.0))
    assert one_f_one_b(costs, patience=0.2)[1] == "F0 I0 W0 F1 I1 W1"
    assert one_f_one_b(costs, patience=0.3)[1] == "F0 I0 F1 I1 W0 W1"


def test_weights_make_room():
    costs = Costs((1.0, 1.0), (2.0, 2.0), activation_bytes=(1.0, 1.0))
    assert one_f_one_b(costs, room=1.0)[1] == "F0 I0 W0 F1 I1 W1"
    assert one_f_one_b(replace(costs, deferred_bytes=(0.5, 0.5)), room=1.5)[1] == "F0 I0 F1 I1 W0 W1"
    assert one_f_one_b(replace(costs, deferred_bytes=(0.5, 0.5)), room=1.4)[1] == "F0 I0 W0 F1 I1 W1"


@st.composite
def cases(draw):
    route = draw(ROUTES)
    num_ranks, num_micro_batches = max(route) + 1, draw(st.integers(1, 6))
    shape = Schedule(((),) * num_ranks, num_micro_batches, len(route) // num_ranks, routes=(route,))
    orders = composed(route, num_micro_batches, draw(split_costs(len(route))), (inf,) * num_ranks)
    return replace(shape, orders=orders.orders), draw(split_costs(len(route)))


@given(cases(), st.floats(0, 30), st.sampled_from((0.0, 0.5, 2.0)))
@settings(max_examples=60, deadline=None)
def test_only_weights_change_their_place(case, room, patience):
    schedule, costs = case
    rooms = (room,) * schedule.num_ranks
    found = filled(schedule, costs, rooms, patience)
    assert verify(found).backward_in_order
    for before, after in zip(schedule.orders, found.orders, strict=True):
        assert [a for a in before if a.kind != "W"] == [a for a in after if a.kind != "W"]
    # Backwards of weights at once are the least that the order can keep.
    at_once = filled(schedule, costs, (0.0,) * schedule.num_ranks)
    least, most = simulate(at_once, costs).peak_bytes, simulate(found, costs).peak_bytes
    assert all(peak <= max(room, least) + 1e-6 for peak, least in zip(most, least, strict=True))


def test_what_runs_when_it_can():
    costs = Costs((1.0,) * 4, (2.0,) * 4, activation_bytes=(1.0,) * 4)
    assert rows(composed((0, 1, 1, 0), 1, costs, (2.0, 2.0))) == ["F0 F0.1 I0.1 W0.1 I0 W0", "F0 F0.1 I0.1 I0 W0.1 W0"]
    assert composed((0, 1, 1, 0), 1, costs, (1.0, 2.0)) is None, "no room for both chunks"
    plain = composed((0, 1), 2, Costs((1.0,) * 2, (2.0,) * 2, activation_bytes=(1.0,) * 2), (1.0, 1.0))
    assert rows(plain) == ["F0 I0 W0 F1 I1 W1"] * 2


@given(ROUTES, st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_memory_is_kept(route, num_micro_batches, data):
    costs = replace(data.draw(split_costs(len(route))), deferred_bytes=())
    num_ranks = max(route) + 1
    one = [sum(costs.activation_bytes[s] for s, held in enumerate(route) if held == rank) for rank in range(num_ranks)]
    rooms = tuple(data.draw(st.sampled_from((1, 1.5, 2, 4))) * size for size in one)
    found = composed(route, num_micro_batches, costs, rooms)
    assert found is not None
    assert all(peak <= room + 1e-6 for peak, room in zip(simulate(found, costs).peak_bytes, rooms, strict=True))
