"""Schedules of several directions, and of one that passes a rank more than once: the same laws as for all others."""

from collections import Counter, defaultdict
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules import Costs, Link, Op, Schedule, families, from_text, lower, simulate, to_text, verify
from paceline.schedules.schedule import Action, backward, forward
from paceline.schedules.verify import replay_blocking
from support.schedule_cases import TWO_DIRECTIONS, has_backwards, places_of, routed

BY_HAND = from_text(TWO_DIRECTIONS)
CASES = st.one_of(
    st.just(BY_HAND), st.builds(families.dualpipev, st.integers(1, 4), st.integers(8, 12)), routed(), routed(False)
)


def replayed(schedule, costs):
    """Rank after rank as far as each gets, from the routes alone: every end is known once its two causes are.

    Returns:
        by rank, (action, start, end) of all actions, and by (kind, direction, stage, micro-batch) when each message
        arrived; None for both if the ranks wait for each other.
    """
    places = places_of(schedule.routes)
    num_directions, last = len(places), len(places[0]) - 1
    cell_of = {place: (j, stage) for j, row in enumerate(places) for stage, place in enumerate(row)}
    done, computed, arrivals, line_free = {}, [[] for _ in schedule.orders], {}, defaultdict(float)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            for kind, micro_batch, chunk in order[len(computed[rank]) :]:
                direction, stage = cell_of[rank, chunk]
                assert direction == micro_batch % num_directions
                lane, step, end_of_line = ("F", 1, last) if kind == "F" else ("B", -1, 0)
                now = computed[rank][-1][2] if computed[rank] else 0.0
                if kind == "W":
                    seconds = costs.seconds[kind][stage]
                    computed[rank].append((Action(kind, micro_batch, chunk), now, now + seconds))
                    moved = True
                    continue
                if kind != "F" and (("F", direction, stage, micro_batch) not in done):
                    break
                if stage != (0 if kind == "F" else last):
                    source = (lane, direction, stage - step, micro_batch)
                    if source not in done:
                        break
                    now = max(now, arrivals.get(source, 0.0))
                end = now + costs.seconds[kind][stage]
                this = (lane, direction, stage, micro_batch)
                done[this] = end
                computed[rank].append((Action(kind, micro_batch, chunk), now, end))
                moved = True
                if stage != end_of_line and places[direction][stage + step][0] != rank:
                    boundary, links = (stage, costs.down) if kind == "F" else (stage - 1, costs.up)
                    line = max(end, line_free[this[:3]]) + costs.message_bytes[boundary] / links[boundary].bytes_per_s
                    line_free[this[:3]] = line
                    arrivals[this] = line + links[boundary].latency_s
    if sum(map(len, computed)) < sum(map(len, schedule.orders)):
        return None, None
    return computed, arrivals


def random_costs(seed, num_stages):
    """Different everywhere, in eighths: sums are exact, and ties are frequent."""
    random = Random(seed)

    def some(count):
        return tuple(random.randrange(0, 24) / 8 for _ in range(count))

    def links(count):
        return tuple(Link(random.choice((0.5, 1.0, 2.0, inf)), random.randrange(0, 8) / 8) for _ in range(count))

    edges = num_stages - 1
    return Costs(
        some(num_stages), some(num_stages), some(edges), links(edges), links(edges), activation_bytes=some(num_stages)
    )


def test_cells_by_hand():
    assert BY_HAND.routes == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert (BY_HAND.num_directions, BY_HAND.num_stages) == (2, 4)
    assert BY_HAND.cells == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert BY_HAND.stages == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert [BY_HAND.rank(stage) for stage in range(4)] == [0, 1, 2, 3]
    assert [BY_HAND.rank(stage, 1) for stage in range(4)] == [3, 2, 1, 0]
    assert BY_HAND.stage(3, forward(1, 1)) == 0
    assert BY_HAND.direction(3, 1) == 1
    there_and_back = families.dualpipev(3, 6)
    assert there_and_back.cells == there_and_back.stages == ((0, 5), (1, 4), (2, 3))
    assert there_and_back.num_directions == 1


@given(st.integers(1, 5), st.integers(1, 4))
def test_without_routes_a_cell_is_its_stage(num_ranks, num_chunks):
    schedule = families.interleaved(num_ranks, num_ranks, num_chunks)
    assert (schedule.num_directions, schedule.num_stages) == (1, num_ranks * num_chunks)
    for rank in range(num_ranks):
        for chunk in range(num_chunks):
            stage = chunk * num_ranks + rank
            assert schedule.cells[rank][chunk] == schedule.stage(rank, forward(0, chunk)) == stage
            assert schedule.places[stage] == (rank, chunk)
            assert schedule.rank(stage) == rank
            assert schedule.direction(rank, chunk) == 0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_routes_of_an_interleaved_schedule_change_nothing(num_ranks, rounds, num_chunks):
    plain = families.interleaved(num_ranks, num_ranks * rounds, num_chunks)
    same = replace(plain, routes=(tuple(range(num_ranks)) * num_chunks,))
    assert verify(same) == verify(plain)
    assert lower(same) == lower(plain)
    assert lower(same, order="paired") == lower(plain, order="paired")
    costs = random_costs(rounds, plain.num_stages)
    assert simulate(same, costs, timeline=True, critical_path=True) == simulate(
        plain, costs, timeline=True, critical_path=True
    )


@given(CASES)
@settings(max_examples=60, deadline=None)
def test_routed_schedules_are_proven_and_survive_their_text(schedule):
    proof = verify(schedule, forward_only=not has_backwards(schedule))
    assert from_text(to_text(schedule)) == schedule
    for order, peak in zip(schedule.orders, proof.peak_activations, strict=True):
        live = [
            sum({"F": 1, "W": 0}.get(a.kind, -1) for a in order[: i + 1]) + (order[i].kind in "BI")
            for i in range(len(order))
        ]
        assert peak == (max(live, default=0) if has_backwards(schedule) else 0)


@given(CASES, st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_simulation_is_the_slow_replay(schedule, seed):
    costs = random_costs(seed, schedule.num_stages)
    step = simulate(schedule, costs, timeline=True, critical_path=True)
    computed, arrivals = replayed(schedule, costs)
    ends = [end for row in computed for _, _, end in row]
    assert step.makespan_s == max(ends)
    for rank, row in enumerate(computed):
        spans = [s for s in step.timeline.spans if s.rank == rank]
        assert [(Action(s.kind, s.micro_batch, s.chunk), s.start_s, s.end_s) for s in spans] == row
        assert step.busy_s[rank] == pytest.approx(sum(end - start for _, start, end in row))
    places = places_of(schedule.routes)
    expected = Counter()
    for (kind, direction, stage, micro_batch), arrival in arrivals.items():
        source, chunk = places[direction][stage]
        target, _ = places[direction][stage + (1 if kind == "F" else -1)]
        expected["activation" if kind == "F" else "gradient", source, target, micro_batch, chunk, arrival] += 1
    assert Counter((*t[:5], t.end_s) for t in step.timeline.transfers) == expected
    check_critical_path(step)


def check_critical_path(step):
    path = step.critical_path
    assert (path[0].start_s, path[-1].end_s) == (0.0, step.makespan_s)
    assert sum(step.critical_s.values()) == pytest.approx(step.makespan_s)
    whole = {t[:5]: t for t in step.timeline.transfers}
    for part in path:
        if part[:5] in whole:
            assert whole[part[:5]].start_s <= part.start_s <= part.end_s <= whole[part[:5]].end_s
        else:
            assert part in step.timeline.spans


@given(CASES, st.integers(0, 10**9))
@settings(max_examples=30, deadline=None)
def test_peak_memory_is_of_the_stages_that_are_live(schedule, seed):
    costs = random_costs(seed, schedule.num_stages)
    places = places_of(schedule.routes)
    stage_of = {place: stage for row in places for stage, place in enumerate(row)}
    for rank, peak in enumerate(simulate(schedule, costs).peak_bytes):
        held = most = 0.0
        for kind, _, chunk in schedule.orders[rank] if has_backwards(schedule) else ():
            held += costs.activation_bytes[stage_of[rank, chunk]] * {"F": 1, "I": 0}.get(kind, -1)
            most = max(most, held)
        assert peak == most


def test_two_directions_by_hand():
    """F = 1, B = 2, no transfers; the two directions are each other's mirror image."""
    step = simulate(BY_HAND, Costs.uniform(4, 1.0, 2.0), timeline=True)
    starts = [[s.start_s for s in step.timeline.spans if s.rank == rank] for rank in range(4)]
    assert starts[0] == starts[3] == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0, 10.0, 14.0]
    assert starts[1] == starts[2] == [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert step.makespan_s == 16.0
    assert step.peak_activations == verify(BY_HAND).peak_activations == (3, 4, 4, 3)


def test_directions_have_links_of_their_own():
    """Both of rank 0's directions to rank 1 send at once; only a host's limit makes them share."""
    orders = (
        (forward(0), forward(1, 1), forward(2, 2), forward(3, 3)),
        (forward(2, 2), forward(3, 3), forward(0), forward(1, 1)),
    )
    schedule = Schedule(orders, 4, 4, routes=((0, 1), (0, 1), (1, 0), (1, 0)))
    costs = Costs((1.0, 1.0), (1.0, 1.0), (4.0,), (Link(1.0),), (Link(1.0),))
    ends = {t.micro_batch: t.end_s for t in simulate(schedule, costs, timeline=True).timeline.transfers}
    assert ends == {0: 5.0, 1: 6.0, 2: 5.0, 3: 6.0}
    shared = replace(costs, hosts=(0, 1), egress_bytes_per_s=(1.0, inf))
    ends = {t.micro_batch: t.end_s for t in simulate(schedule, shared, timeline=True).timeline.transfers}
    # From rank 0: the first alone until 2, both at half the rate until it is through at 8, the second alone again.
    assert ends == {0: 8.0, 1: 9.0, 2: 5.0, 3: 6.0}


def test_neighbours_on_one_rank_have_no_message():
    schedule = families.dualpipev(2, 4)
    costs = Costs((1.0,) * 4, (2.0,) * 4, (8.0,) * 3, (Link(2.0),) * 3, (Link(2.0),) * 3)
    crossings = {(t.source, t.target, t.chunk) for t in simulate(schedule, costs, timeline=True).timeline.transfers}
    assert crossings == {(0, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0)}
    first, last = lower(schedule)
    assert {op.kind for op in first if op.chunk == 0} == {
        "load", "forward", "send_activation", "post_gradient", "wait_gradient", "backward"
    }  # fmt: skip
    assert {op.kind for op in last if op.chunk == 0} == {
        "post_activation", "wait_activation", "forward", "backward", "send_gradient"
    }  # fmt: skip
    assert {op.chunk for op in first if op.kind == "load"} == {0, 1}


def test_dualpipev_by_hand():
    rows = [" ".join(map(str, order)) for order in families.dualpipev(2, 4).orders]
    assert rows == [
        "F0 F1 F2 F0.1 B0.1 F1.1 F3 B1.1 F2.1 B0 B2.1 F3.1 B1 B3.1 B2 B3",
        "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 B2.1 B2 B3.1 B3",
    ]


@pytest.mark.parametrize(("num_micro_batches", "makespan_s"), [(8, 29.5), (16, 53.5), (32, 101.5)])
def test_dualpipev_without_waiting_for_messages(num_micro_batches, makespan_s):
    """Half stages of F = 1 and B = 2. DeepSpeed's engine, which waits between computes, takes 1.5 more of each."""
    schedule = families.dualpipev(4, num_micro_batches)
    assert simulate(schedule, Costs.uniform(8, 0.5, 1.0)).makespan_s == makespan_s
    assert verify(schedule).peak_activations == (9, 9, 9, 9)


def test_dualpipev_needs_two_micro_batches_a_rank():
    with pytest.raises(ValueError, match=r"num_micro_batches=7 is less than 2 · num_ranks=8: .* give more"):
        families.dualpipev(4, 7)


def with_order(schedule, rank, order):
    return replace(schedule, orders=(*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]))


SOUND = st.sampled_from([BY_HAND, families.dualpipev(2, 5), families.dualpipev(3, 6)])


@given(SOUND, st.data())
@settings(max_examples=60, deadline=None)
def test_a_missing_or_second_action_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.orders[rank])
    position = data.draw(st.integers(0, len(order) - 1))
    action = order[position]
    twice = [*order[:position], action, *order[position:]]
    with pytest.raises(ValueError, match=rf"{action} runs a second time"):
        verify(with_order(schedule, rank, twice))
    without = [*order[:position], *order[position + 1 :]]
    missing = rf"rank {rank} never runs {action}; add it" if action.kind == "B" else "runs before its forward"
    with pytest.raises(ValueError, match=missing):
        verify(with_order(schedule, rank, without))


@given(SOUND, st.data())
@settings(max_examples=150, deadline=None)
def test_swapped_actions_are_refused_if_they_cannot_run(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.orders[rank])
    one, two = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    order[one], order[two] = order[two], order[one]
    swapped = with_order(schedule, rank, order)
    computed, _ = replayed(swapped, random_costs(0, schedule.num_stages))
    if computed:
        verify(swapped)
    else:
        with pytest.raises(ValueError, match=r"wait for each other|runs before its forward"):
            verify(swapped)


@given(st.integers(0, 3), st.data())
def test_a_micro_batch_in_a_chunk_of_another_direction_is_refused(rank, data):
    order = list(BY_HAND.orders[rank])
    position = data.draw(st.integers(0, len(order) - 1))
    kind, micro_batch, chunk = order[position]
    order[position] = Action(kind, micro_batch, 1 - chunk)
    message = (
        rf"takes direction {chunk} \(micro-batch % 2\), and chunk {1 - chunk} of rank {rank} is of direction"
        rf" {1 - chunk}; run it in a chunk of its own direction\.\nrank {rank}: [^^]*\^ position {position}"
    )
    with pytest.raises(ValueError, match=message):
        verify(with_order(BY_HAND, rank, order))


def test_what_waits_for_each_other_is_shown():
    orders = ((forward(1, 1), forward(0)), (forward(0), forward(1, 1)))
    schedule = Schedule(orders, 2, 2, routes=((0, 1), (1, 0)))
    with pytest.raises(ValueError, match=r"rank 0 waits at F1\.1 for rank 1:\n.*\n.*\nrank 1 waits at F0 for rank 0"):
        verify(schedule, forward_only=True)
    itself = Schedule(((forward(0, 1), forward(0)),), 1, 2, routes=((0, 0),))
    with pytest.raises(ValueError, match=r"rank 0 waits at F0\.1 for rank 0"):
        verify(itself, forward_only=True)


@pytest.mark.parametrize(
    ("routes", "num_chunks", "message"),
    [
        (((0, 1), (1,)), 1, r"routes\[1\] has 1 stages and routes\[0\] has 2: .* give routes of one length"),
        (((0, 2),), 1, r"routes\[0\]\[1\]=2 is no rank of 0…1: name the rank of each stage"),
        (((0, 1), (-1, 0)), 2, r"routes\[1\]\[0\]=-1 is no rank of 0…1"),
        (((0, 0, 1),), 1, r"the routes give rank 0 2 stages and rank 1 1: name every rank equally often"),
        (((0, 0),), 1, r"the routes give rank 0 2 stages and rank 1 0: name every rank equally often"),
        (((), (0, 1)), 1, r"routes\[0\] is empty: name the rank of each stage"),
        (((0, 1), (1, 0)), 1, r"the routes give each rank 2 stages and num_chunks=1: set it to 2"),
    ],
)
def test_wrong_routes_are_refused(routes, num_chunks, message):
    orders = tuple((forward(0), backward(0)) for _ in range(2))
    for check in (verify, lower, lambda schedule: simulate(schedule, Costs.uniform(2, 1.0, 2.0))):
        with pytest.raises(ValueError, match=message):
            check(Schedule(orders, 1, num_chunks, routes=routes))


def test_text_by_hand():
    assert to_text(BY_HAND) == TWO_DIRECTIONS
    assert " routes=" not in to_text(families.one_f_one_b(2, 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3,2,1,0", "3,2,1,4", "row 1, column 64: 4 is not one of 4 ranks: they count from 0."),
        ("3,2,1,0", "3,2,1,", "row 1, column 64: expected the rank of a stage."),
        ("3,2,1,0", "3,2,01,0", "row 1, column 63: expected ' name='"),
        ("3,2,1,0", "", "row 1, column 58: expected the rank of a stage."),
        ("0,1,2,3/3,2,1,0", "", "row 1, column 50: expected the rank of a stage."),
        ("routes", "route", "row 1, column 42: expected ' name='"),
        ("chunks=2 routes=", "chunks=2  routes=", "row 1, column 42: expected ' name='"),
        ("F1.1", "F1.2", "row 2, column 15: 'F1.2' is not in one of 2 chunks: they count from 0."),
    ],
)
def test_faults_of_the_text_are_shown(old, new, message):
    with pytest.raises(ValueError, match=r"row") as caught:
        from_text(TWO_DIRECTIONS.replace(old, new, 1))
    assert str(caught.value).startswith(message)


def test_routes_that_a_text_can_name_and_verify_refuses():
    schedule = from_text(TWO_DIRECTIONS.replace("/3,2,1,0", "/3,2,1,1"))
    with pytest.raises(ValueError, match=r"the routes give rank 1 3 stages and rank 0 1"):
        verify(schedule)


@given(st.integers(0, 60), st.integers(0, 3), st.sampled_from(["", " ", "0", ",", "/", "3", "01"]))
@settings(max_examples=200, deadline=None)
def test_what_is_accepted_is_the_only_text_of_its_schedule(at, removed, inserted):
    text = TWO_DIRECTIONS[:at] + inserted + TWO_DIRECTIONS[at + removed :]
    try:
        schedule = from_text(text)
    except ValueError as error:
        assert str(error).startswith("row ")  # noqa: PT017 (either outcome is right)
    else:
        assert to_text(schedule) == text


def test_blocking_messages_of_directions_are_not_mixed_up():
    """The same stage of two directions sends: only the cell tells the two messages apart."""
    schedule = Schedule(((forward(0), forward(1, 1)),) * 2, 2, 2, routes=((0, 1), (0, 1)))
    sends = [Op("send_activation", 0, 0, 0), Op("send_activation", 0, 1, 0)]
    posts = [Op("post_activation", 0, 1, 0), Op("post_activation", 0, 0, 0)]
    with pytest.raises(ValueError, match=r"do not come to an end"):
        replay_blocking(schedule, [sends, posts])
    replay_blocking(schedule, [sends, posts[::-1]])
