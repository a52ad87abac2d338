"""Where layers would lie best, from what a run showed: predictions, memory, and the search against all partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning import repartition as subject
from paceline.planning.kept_activations import as_kept
from paceline.planning.repartition import LARGE, ItemCosts, Layout, item_costs
from paceline.planning.shared_devices import live_of, one_a_device, routes_of
from paceline.schedules.costs import Again, Costs, Link
from paceline.schedules.families import chunked_route, dualpipev, interleaved, one_f_one_b
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import zbh1, zbv
from paceline.schedules.verify import verify

LAYER = ItemCosts(1.0, 2.0, saved_bytes=10.0, output_bytes=5.0, num_parameters=100.0)


def layout(items: Sequence[ItemCosts], parts: Sequence[int], **changes: object) -> Layout:
    stages = len(parts) - 1
    plain = Layout(tuple(items), tuple(parts), tuple(range(1, len(items))), (inf,) * stages, (16.0,) * stages, 12.0)
    return replace(plain, **changes)


def costs_of(plan: Layout, speeds: Sequence[float], parts: Sequence[int] | None = None) -> Costs:
    """What a run with the partition of ``plan`` (or ``parts``) on devices of these speeds shows."""
    stages = [plan.items[a:b] for a, b in pairwise(parts or plan.parts)]
    return Costs(
        tuple(sum(i.forward_s for i in stage) / speed for stage, speed in zip(stages, speeds, strict=True)),
        tuple(sum(i.backward_s for i in stage) / speed for stage, speed in zip(stages, speeds, strict=True)),
        message_bytes=tuple(stage[-1].output_bytes for stage in stages[:-1]),
        activation_bytes=tuple(sum(i.saved_bytes for i in stage) for stage in stages),
    )


def every_partition(plan: Layout) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(plan.cuts, plan.num_stages - 1):
        yield (0, *cuts, len(plan.items))


def search(
    plan: Layout, now: Costs, micro_batches: int, known: Sequence[int] | None = None
) -> tuple[tuple[int, ...], float]:
    schedule = one_f_one_b(plan.num_stages, micro_batches)
    peaks = one_a_device(verify(schedule).peak_activations)
    num_actions = 2 * plan.num_stages * micro_batches
    return plan.best(now, peaks, lambda parts: step_s(plan, now, parts, micro_batches), num_actions, known)


def step_s(plan: Layout, now: Costs, parts: Sequence[int], micro_batches: int) -> float:
    return simulate(one_f_one_b(plan.num_stages, micro_batches), plan.costs(now, parts)).makespan_s


def same(one: Costs, other: Costs) -> bool:
    names = ("forward_s", "backward_s", "message_bytes", "activation_bytes")
    return all(getattr(one, name) == pytest.approx(getattr(other, name)) for name in names)


def test_the_prediction_for_what_runs_is_the_measurement() -> None:
    """Whatever was measured, also if it is not what the items add up to."""
    plan = layout([LAYER, LAYER._replace(forward_s=0.3), LAYER, LAYER], (0, 1, 2, 4))
    now = Costs((0.123, 7.0, 0.0), (0.4, 0.0, 2.5), (77.0, 3.0), activation_bytes=(1.0, 2.0, 0.0), step_s=9.0)
    assert plan.costs(now, plan.parts) == now


def test_a_stage_takes_as_much_more_as_its_items_do() -> None:
    plan = layout([LAYER] * 4, (0, 2, 4))
    now = Costs((4.0, 1.0), (6.0, 5.0), (5.0,), activation_bytes=(20.0, 22.0), step_s=0.5)
    found = plan.costs(now, (0, 1, 4))
    assert found.forward_s == pytest.approx((2.0, 1.5))
    assert found.backward_s == pytest.approx((3.0, 7.5))
    assert found.activation_bytes == pytest.approx((10.0, 33.0))
    assert found.message_bytes == (5.0,)
    assert found.step_s == 0.5


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_devices_are_seen_through(data: st.DataObject) -> None:
    """From one partition on devices of any speed follows what any other takes on them."""
    times = st.floats(0.1, 9.0)
    items = [
        ItemCosts(*data.draw(st.tuples(times, times, times, times, times))) for _ in range(data.draw(st.integers(3, 8)))
    ]
    cuts = st.lists(st.integers(1, len(items) - 1), min_size=2, max_size=2, unique=True).map(sorted)
    speeds = data.draw(st.tuples(times, times, times))
    plan = layout(items, (0, *data.draw(cuts), len(items)))
    other = (0, *data.draw(cuts), len(items))
    assert same(plan.costs(costs_of(plan, speeds), other), costs_of(plan, speeds, other))


@pytest.mark.parametrize("moved", [-1, 1])
def test_a_stage_that_recomputes_nothing_gets_only_what_arrives(moved: int) -> None:
    """The first of two stages on devices of speeds 2 and 1 recomputes its three layers, the second one none."""
    head = ItemCosts()
    plan = layout([head, *[LAYER] * 6, head], (0, 4, 8))
    again = Again((1.5, 0.0), (300.0, 0.0), (100.0, 0.0), kept=(0.0, 0.0), room_bytes=(inf, inf))
    now = replace(costs_of(plan, (2.0, 1.0)), again=again)
    assert plan.costs(now, plan.parts) == now
    found = plan.costs(now, (0, 4 + moved, 8))
    assert found.again is not None
    expected = {-1: ((1.0, 1.0), (200.0, 100.0)), 1: ((1.5, 0.0), (300.0, 0.0))}[moved]
    assert (found.again.seconds, found.again.num_bytes) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    tight = replace(found, again=replace(found.again, room_bytes=(150.0, 50.0)))
    assert as_kept(tight, one_f_one_b(2, 4)).backward_s[1] == pytest.approx(found.backward_s[1])


def test_messages_are_as_large_as_what_the_last_item_hands_on() -> None:
    """Measured bytes may have parts that the items do not tell of: they grow with the rest."""
    plan = layout([LAYER, LAYER._replace(output_bytes=20.0), LAYER._replace(output_bytes=0.0), LAYER], (0, 1, 4))
    now = replace(costs_of(plan, (1, 1)), message_bytes=(6.0,))
    assert plan.costs(now, (0, 2, 4)).message_bytes == (24.0,)
    assert plan.costs(now, (0, 3, 4)).message_bytes == (6.0,)  # nothing is known of that one


def test_a_stage_whose_items_take_no_time_has_a_typical_device() -> None:
    nothing = ItemCosts()
    plan = layout([LAYER, LAYER, nothing, nothing, LAYER], (0, 2, 4, 5))
    now = Costs((4.0, 0.01, 2.0), (8.0, 0.0, 4.0), (5.0, 0.0), activation_bytes=(20.0, 0.0, 10.0))  # speeds 1/2
    found = plan.costs(now, (0, 1, 4, 5))
    assert found.forward_s == pytest.approx((2.0, 2.0, 2.0))
    assert found.backward_s == pytest.approx((4.0, 4.0, 4.0))
    assert plan.costs(now, (0, 2, 3, 5)).forward_s == pytest.approx((4.0, 0.01, 2.0))
    assert same(plan.costs(now, plan.parts), now)
    parts, seconds = search(plan, now, 8)
    assert parts == (0, 1, 4, 5) or parts == (0, 1, 3, 5)
    assert seconds < step_s(plan, now, plan.parts, 8)


def test_where_no_item_took_time_the_layers_stay() -> None:
    plan = layout([ItemCosts()] * 4, (0, 2, 4))
    now = Costs((1.0, 2.0), (1.0, 2.0), (0.0,), activation_bytes=(0.0, 0.0))
    assert search(plan, now, 4) == (plan.parts, step_s(plan, now, plan.parts, 4))


def test_states_and_live_micro_batches_count_together() -> None:
    plan = layout([LAYER] * 4, (0, 2, 4), state_bytes=(16.0, 8.0), limit_bytes=(3240.0, 2430.0))
    now = costs_of(plan, (1, 1))
    assert plan.need_bytes(now, (0, 2, 4), one_a_device((2, 1))) == (2 * 1600 + 2 * 20, 2 * 800 + 20)
    assert plan.need_bytes(now, (0, 1, 4), one_a_device((2, 1))) == (1600 + 2 * 10, 3 * 800 + 30)
    assert plan.fits(now, (0, 2, 4), one_a_device((2, 1)))
    assert plan.fits(now, (0, 1, 4), one_a_device((2, 1)))
    assert not plan.fits(now, (0, 2, 4), one_a_device((3, 1)))  # one micro-batch more is alive
    assert not plan.fits(now, (0, 1, 4), one_a_device((2, 2)))
    assert not plan.fits(now, (0, 3, 4), one_a_device((2, 1)))


def test_what_moves_is_sent_by_the_stage_that_had_it() -> None:
    plan = layout([LAYER, LAYER, LAYER._replace(num_parameters=7.0), LAYER, LAYER, LAYER], (0, 2, 4, 6))
    assert plan.sent_bytes(plan.parts) == (0.0, 0.0, 0.0)
    assert plan.sent_bytes((0, 1, 3, 6)) == (1200.0, 1200.0, 0.0)
    assert plan.sent_bytes((0, 3, 5, 6)) == (0.0, 84.0, 1200.0)
    assert plan.sent_bytes((0, 1, 2, 6)) == (1200.0, 84.0 + 1200.0, 0.0)


def test_a_migration_takes_as_long_as_the_host_that_sends_longest() -> None:
    plan = layout([LAYER] * 6, (0, 2, 4, 6))
    now = replace(costs_of(plan, (1, 1, 1)), hosts=(0, 0, 1), egress_bytes_per_s=(100.0, 10.0))
    assert plan.migration_s(now, plan.parts, 0.5) == 0.5
    assert plan.migration_s(now, (0, 1, 3, 6), 0.5) == 0.5 + 12.0  # what stays on the host does not use its interface
    inside = replace(now, down=(Link(60.0), Link(inf)), up=(Link(60.0), Link(inf)))
    assert plan.migration_s(inside, (0, 1, 3, 6), 0.5) == 0.5 + 20.0
    assert plan.migration_s(now, (0, 2, 5, 6), 0.5) == 0.5 + 120.0
    # Small messages tell less of a link than what moved before, large ones more.
    assert plan.migration_s(now, (0, 2, 5, 6), 0.5, earlier_bytes_per_s=50.0) == 0.5 + 24.0
    assert plan.migration_s(now, (0, 1, 3, 6), 0.5, earlier_bytes_per_s=50.0) == 0.5 + 24.0
    large = replace(now, message_bytes=(5.0, float(LARGE)))
    assert plan.migration_s(large, (0, 2, 5, 6), 0.5, earlier_bytes_per_s=50.0) == 0.5 + 120.0
    # A third of it is waited for; the rest moves beside steps, whose links have time for some of it.
    beside = replace(plan, paused_bytes=plan.moved_bytes / 3)
    assert beside.migration_s(now, (0, 2, 5, 6), 0.5) == pytest.approx(0.5 + 120.0)
    assert beside.migration_s(now, (0, 2, 5, 6), 0.5, idle_s=30.0) == pytest.approx(0.5 + 40.0 + 50.0)
    assert beside.migration_s(now, (0, 2, 5, 6), 0.5, idle_s=100.0) == pytest.approx(0.5 + 40.0)
    unknown = costs_of(plan, (1, 1, 1))
    assert plan.migration_s(unknown, (0, 1, 3, 6), 0.5) == 0.5
    assert plan.migration_s(unknown, (0, 1, 3, 6), 0.5, earlier_bytes_per_s=50.0) == 0.5 + 24.0


WORK = st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.5])


@st.composite
def instances(draw: st.DrawFn) -> tuple[Layout, tuple[float, ...], int]:
    stages = draw(st.integers(2, 4))
    count = draw(st.integers(stages, 9))
    items = [LAYER._replace(forward_s=work, backward_s=2 * work) for work in draw(st.tuples(*[WORK] * count))]
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), min_size=stages - 1)))
    parts = sorted(draw(st.permutations(cuts))[: stages - 1])
    speeds = draw(st.tuples(*[st.sampled_from([1.0, 1.0, 2.0, 4.0])] * stages))
    plan = layout(items, (0, *parts, count), cuts=tuple(cuts))
    if draw(st.booleans()):  # so little memory that not every stage could have another item
        limit = 1600.0 * max(b - a for a, b in pairwise(plan.parts)) + 100.0
        plan = replace(plan, limit_bytes=(limit,) * stages)
    return plan, speeds, draw(st.sampled_from([2, 8]))


@given(instances())
@settings(max_examples=40, deadline=None)
def test_never_worse_than_what_runs_and_never_against_cuts_or_memory(
    instance: tuple[Layout, tuple[float, ...], int],
) -> None:
    plan, speeds, micro_batches = instance
    now = costs_of(plan, speeds)
    parts, seconds = search(plan, now, micro_batches)
    assert seconds == step_s(plan, now, parts, micro_batches) <= step_s(plan, now, plan.parts, micro_batches)
    assert set(parts[1:-1]) <= set(plan.cuts)
    peaks = one_a_device(verify(one_f_one_b(plan.num_stages, micro_batches)).peak_activations)
    assert parts == plan.parts or plan.fits(now, parts, peaks)
    best = min(
        step_s(plan, now, other, micro_batches)
        for other in every_partition(plan)
        if other == plan.parts or plan.fits(now, other, peaks)
    )
    assert seconds <= best * 1.1  # a local search


@pytest.mark.parametrize(
    "speeds", [(1, 1), (4, 1), (1, 3), (4, 2, 1, 1), (1, 1, 2, 4), (1, 4, 1), (2, 1, 4), (3, 5, 2)]
)
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_equal_layers_lie_as_well_as_they_can(speeds: tuple[int, ...], micro_batches: int) -> None:
    stages, count = len(speeds), 10
    head = LAYER._replace(forward_s=2.0, backward_s=4.0)
    uniform = (*(stage * count // stages for stage in range(stages)), count)
    plan = layout([LAYER] * (count - 1) + [head], uniform)
    now = costs_of(plan, speeds)
    _, seconds = search(plan, now, micro_batches)
    best = min(step_s(plan, now, other, micro_batches) for other in every_partition(plan))
    assert seconds == pytest.approx(best, rel=1e-9)


def test_speeds_of_4_2_1_1() -> None:
    """24 layers, 32 micro-batches: the bound is 1.93 times."""
    plan = layout([LAYER] * 24, (0, 6, 12, 18, 24))
    now = costs_of(plan, (4, 2, 1, 1))
    parts, seconds = search(plan, now, 32)
    assert seconds * 1.9 <= step_s(plan, now, plan.parts, 32)
    assert parts == (0, 12, 18, 21, 24)


def test_links_count() -> None:
    """A cut where little is handed on, although the work is then less even."""
    items = [LAYER] * 3 + [LAYER._replace(output_bytes=0.1)] + [LAYER] * 2
    slow = Link(1.0)
    plan = layout(items, (0, 3, 6))
    now = replace(costs_of(plan, (1, 1)), down=(slow,), up=(slow,))
    assert search(plan, replace(now, down=(Link(inf),), up=(Link(inf),)), 16)[0] == (0, 3, 6)
    assert search(plan, now, 16)[0] == (0, 4, 6)


def test_what_runs_may_not_fit_and_then_what_does_is_found() -> None:
    plan = layout([LAYER] * 6, (0, 5, 6), limit_bytes=(3 * 1600.0 + 200.0,) * 2)
    now = costs_of(plan, (1, 1))
    assert search(plan, now, 8)[0] == (0, 3, 6)
    nowhere = replace(plan, limit_bytes=(1.0, 1.0))
    assert search(nowhere, now, 8) == (plan.parts, step_s(plan, now, plan.parts, 8))


def test_what_runs_may_lie_where_nothing_could_be_moved_to() -> None:
    plan = layout([LAYER] * 6, (0, 1, 6), cuts=(2, 4))
    now = costs_of(plan, (1, 1))
    assert search(plan, now, 8)[0] in ((0, 2, 6), (0, 4, 6))


def test_what_is_known_is_a_start() -> None:
    """So that a second search, for another schedule, is never worse than what led to it."""
    plan = layout([LAYER] * 20, (0, 1, 20))
    now = costs_of(plan, (1, 1))
    seconds = {(0, 1, 20): 5.0, (0, 10, 20): 4.0, (0, 18, 20): 1.0}  # no move of the search leads to the last one

    def best(known: Sequence[int] | None) -> tuple[tuple[int, ...], float]:
        return plan.best(now, one_a_device((1, 1)), lambda parts: seconds.get(parts, 9.0), 10, known)

    assert best(None) == ((0, 10, 20), 4.0)
    assert best((0, 18, 20)) == ((0, 18, 20), 1.0)


def test_a_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "REFINE_ACTIONS", 100)
    plan = layout([LAYER] * 60, (0, *range(1, 9), 60))
    now = costs_of(plan, (1,) * 9)
    asked: list[tuple[int, ...]] = []

    def length(parts: tuple[int, ...]) -> float:
        asked.append(parts)
        return step_s(plan, now, parts, 4)

    _, seconds = plan.best(now, one_a_device((4,) * 9), length, 10**6)
    assert len(asked) <= 2 * 20
    assert seconds < step_s(plan, now, plan.parts, 4)


def test_items_that_were_not_seen_cost_nothing() -> None:
    found = item_costs({1: (2.0, 3.0)}, {1: (4.0, 5.0, 6.0), 2: (7.0, 8.0, 9.0)}, 4)
    assert found == (ItemCosts(), ItemCosts(2.0, 3.0, 4.0, 5.0, 6.0), ItemCosts(0.0, 0.0, 7.0, 8.0, 9.0), ItemCosts())
    assert found[1].work_s == 5.0


# -- devices with several stages -------------------------------------------------------------------------------------

SHARED = {
    "interleaved": (interleaved(2, 4, 2), chunked_route("interleaved", 2, 2)),
    "dualpipev": (dualpipev(2, 4), chunked_route("dualpipev", 2, 2)),
}


def shared(name: str, items: Sequence[ItemCosts], parts: Sequence[int]) -> Layout:
    return layout(items, parts, limit_bytes=(inf,) * 2, state_bytes=(16.0,) * 2, routes=(SHARED[name][1],))


def on_devices(plan: Layout, speeds: Sequence[float]) -> Costs:
    return costs_of(plan, [speeds[device] for device in plan.routes[0]])


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5), (3.0, 1.0)])
@pytest.mark.parametrize("name", SHARED)
def test_the_best_partition_of_chunks_is_nearly_that_of_all(name: str, speeds: tuple[float, ...]) -> None:
    schedule, _ = SHARED[name]
    plan = shared(name, [LAYER] * 12, (0, 3, 6, 9, 12))
    now, live = on_devices(plan, speeds), [live_of(schedule, device) for device in range(2)]

    def length(parts: Sequence[int]) -> float:
        return simulate(schedule, plan.costs(now, parts)).makespan_s

    parts, seconds = plan.best(now, live, length, 2 * 4 * 4)
    assert seconds == length(parts)
    assert seconds <= 1.02 * min(map(length, every_partition(plan)))


def test_a_device_needs_what_all_of_its_stages_need() -> None:
    plan = shared("dualpipev", [LAYER] * 8, (0, 1, 3, 6, 8))
    now = on_devices(plan, (1.0, 1.0))
    need = plan.need_bytes(now, plan.parts, [((3, 0), (1, 2)), ((2, 1),)])
    assert need == (3 * 1600 + max(3 * 10, 10 + 2 * 20), 5 * 1600 + 2 * 20 + 30)


@pytest.mark.parametrize("schedule", [zbh1(2, 5), zbv(2, 5), dualpipev(2, 5)], ids=lambda schedule: schedule.name)
def test_what_is_left_for_later_is_counted_as_it_is(schedule: Schedule) -> None:
    count = schedule.num_stages
    parts = tuple(range(0, 2 * count + 1, 2))
    plan = layout(
        [LAYER] * 2 * count, parts, limit_bytes=(inf,) * 2, state_bytes=(0.0,) * 2, routes=(routes_of(schedule)[0],)
    )
    now = replace(costs_of(plan, [1.0] * count), deferred_bytes=tuple(7.0 + stage for stage in range(count)))
    need = plan.need_bytes(now, parts, [live_of(schedule, device) for device in range(2)])
    assert need == simulate(schedule, now).peak_bytes


def test_what_stays_on_a_device_is_not_sent() -> None:
    plan = shared("dualpipev", [LAYER] * 8, (0, 2, 4, 6, 8))
    assert plan.sent_bytes((0, 2, 3, 6, 8)) == (0.0, 0.0), "from stage 1 to 2, which are on one device"
    assert plan.sent_bytes((0, 1, 4, 6, 8)) == (1200.0, 0.0)
    both_ways = replace(plan, routes=((0, 1, 1, 0), (1, 0, 0, 1)))
    assert both_ways.sent_bytes((0, 1, 4, 6, 8)) == (0.0, 0.0), "both devices have all of it"


def test_the_weights_part_of_a_backward_goes_with_it() -> None:
    plan = layout([LAYER] * 4, (0, 3, 4))
    now = replace(costs_of(plan, (1.0, 1.0)), weight_s=(3.0, 0.5), ahead_s=(3.0, 0.5))
    moved = plan.costs(now, (0, 1, 4))
    assert (moved.backward_s, moved.weight_s) == ((2.0, 6.0), (1.0, 1.5))
    assert moved.ahead_s == moved.weight_s
    plain = plan.costs(costs_of(plan, (1.0, 1.0)), (0, 1, 4))
    assert plain.weight_s == plain.ahead_s == ()
