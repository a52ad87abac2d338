"""Prediction of a step, against published numbers, hand computation and slow references."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules.asynchronous import one_direction
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import eager, forward_only, gpipe, interleaved, kfkb, one_f_one_b
from paceline.schedules.predicted_step import predicted_step
from paceline.schedules.schedule import Schedule, backward, backward_input, backward_weight, forward
from paceline.schedules.simulate import simulate
from paceline.schedules.steady import steady
from paceline.schedules.timeline import Span, Transfer
from paceline.schedules.variation import phases, resampled_s
from paceline.schedules.verify import verify


def predicted(schedule, transfer_s=0.0, latency_s=0.0):
    return simulate(schedule, Costs.uniform(schedule.num_stages, 1.0, 2.0, transfer_s, latency_s))


def random_schedule(random, num_ranks, num_micro_batches, num_chunks=1):
    """Any executable order: actions one by one, each of those whose input is there. Backwards are whole or split."""
    num_stages = num_ranks * num_chunks
    ready = [(0, micro_batch, forward) for micro_batch in range(num_micro_batches)]
    orders = [[] for _ in range(num_ranks)]
    while ready:
        visit, micro_batch, kind = ready.pop(random.randrange(len(ready)))
        stage = min(visit, 2 * num_stages - 1 - visit)
        orders[stage % num_ranks].append(kind(micro_batch, stage // num_ranks))
        if kind is backward_input:
            ready.append((visit, micro_batch, backward_weight))
        if kind is not backward_weight and visit < 2 * num_stages - 1:
            after = forward if visit + 1 < num_stages else random.choice((backward, backward_input))
            ready.append((visit + 1, micro_batch, after))
    return Schedule(tuple(map(tuple, orders)), num_micro_batches, num_chunks)


def random_costs(random, schedule):
    """Different everywhere, and in eighths, so that sums are exact and ties are frequent."""

    def some(count):
        return tuple(random.randrange(0, 24) / 8 for _ in range(count))

    def links(count):
        return tuple(
            Link(random.choice((0.5, 1.0, 2.0, float("inf"))), random.randrange(0, 8) / 8) for _ in range(count)
        )

    stages = schedule.num_stages
    backward_s = some(stages)
    return Costs(
        some(stages), backward_s, some(stages - 1), links(stages - 1), links(stages - 1), step_s=some(1)[0],
        weight_s=tuple(random.randrange(0, 9) / 8 * seconds for seconds in backward_s),
        ahead_s=tuple(random.randrange(0, 9) / 8 * seconds for seconds in backward_s) if random.random() < 0.5 else (),
    )  # fmt: skip


def longest_path(schedule, costs):
    """The end of the step by the definition: the longest chain of what must follow what, found by recursion."""
    num_ranks, num_stages = schedule.num_ranks, schedule.num_stages
    known = {}

    def end(rank, position):
        if position < 0:
            return 0.0
        if (rank, position) not in known:
            action = schedule.orders[rank][position]
            stage = schedule.stage(rank, action)
            whole, weight = costs.backward_s[stage], costs.weight_s[stage]
            seconds = {"F": costs.forward_s[stage], "B": whole, "I": whole - weight, "W": weight}[action.kind]
            ahead = min(costs.ahead_s[stage], seconds) if costs.ahead_s and action.kind in "BI" else 0.0
            known[rank, position] = max(end(rank, position - 1) + ahead, arrival(rank, action)) + seconds - ahead
        return known[rank, position]

    def arrival(rank, action):
        stage = schedule.stage(rank, action)
        if action.kind == "F":
            return sent("F", stage - 1, action.micro_batch) if stage else 0.0
        if action.kind == "W":
            return end(rank, schedule.orders[rank].index(backward_input(action.micro_batch, action.chunk)))
        if stage == num_stages - 1:
            return end(rank, schedule.orders[rank].index(forward(action.micro_batch, action.chunk)))
        return sent("BI", stage + 1, action.micro_batch)

    def sent(kind, stage, micro_batch):
        """Arrival of what a stage sends: its link carries one message after another, in the order of the rank."""
        rank, chunk = stage % num_ranks, stage // num_ranks
        made = [
            (position, action.micro_batch)
            for position, action in enumerate(schedule.orders[rank])
            if action.kind in kind and action.chunk == chunk
        ]
        boundary, links = (stage, costs.down) if kind == "F" else (stage - 1, costs.up)
        busy_until = 0.0
        for position, other in made:
            if num_ranks == 1:
                link, size = Link(), 0.0
                busy_until = end(rank, position)
            else:
                link, size = links[boundary], costs.message_bytes[boundary]
                busy_until = max(busy_until, end(rank, position)) + size / link.bytes_per_s
            if other == micro_batch:
                return busy_until + link.latency_s
        raise AssertionError

    return max(end(rank, len(order) - 1) for rank, order in enumerate(schedule.orders)) + costs.step_s


@pytest.mark.parametrize(("num_stages", "num_micro_batches", "makespan_s"), [(4, 16, 57.0), (8, 32, 117.0)])
def test_free_transfers(num_stages, num_micro_batches, makespan_s):
    for k in range(1, num_micro_batches + 1):
        if num_micro_batches % k == 0:
            step = predicted(kfkb(num_stages, num_micro_batches, k))
            assert step.makespan_s == makespan_s == (num_micro_batches + num_stages - 1) * 3
            assert step.bubble_fraction == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))
            assert step.busy_s == (3.0 * num_micro_batches,) * num_stages
            assert step.idle_s == (3.0 * (num_stages - 1),) * num_stages


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "speed_ups"),
    [(4, 16, (1.038, 1.094, 1.183, 1.349, 1.456, 1.468)), (8, 32, (1.046, 1.112, 1.218, 1.412, 1.542, 1.571))],
)
def test_k_microbatch_hides_transfers(num_stages, num_micro_batches, speed_ups):
    for transfer_s, speed_up in zip((0.1, 0.25, 0.5, 1, 1.5, 2), speed_ups, strict=True):
        plain = predicted(kfkb(num_stages, num_micro_batches, 1), transfer_s).makespan_s
        paired = predicted(kfkb(num_stages, num_micro_batches, 2), transfer_s).makespan_s
        assert plain / paired == pytest.approx(speed_up, abs=6e-4)


@pytest.mark.parametrize(
    ("schedule", "transfer_s", "makespan_s", "peak"),
    [
        (eager(8, 32, 1.0), 1.5, 138.0, 15),
        (kfkb(8, 32, 2), 1.5, 142.0, 16),
        (kfkb(8, 32, 4), 1.5, 139.5, 32),
        (eager(8, 32, 2.0), 2.0, 145.0, 22),
        (kfkb(8, 32, 4), 2.0, 148.0, 32),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_warm_up_instead_of_groups(schedule, transfer_s, makespan_s, peak):
    step = predicted(schedule, transfer_s)
    assert step.makespan_s == makespan_s
    assert max(step.peak_activations) == peak


def test_measured_setting():
    """F 20 ms, B 40 ms, 21 ms a message over four hosts: the replay that was compared with real steps."""
    seconds = [simulate(kfkb(4, 16, k), Costs.uniform(4, 0.02, 0.04, 0.021)).makespan_s for k in (1, 2, 4)]
    assert seconds == pytest.approx([1.728, 1.267, 1.269], abs=5e-4)


def test_latency_does_not_occupy_the_link():
    # One forward a second on both ranks: with latency alone they overlap, with occupation they queue.
    schedule = forward_only(2, 4)
    costs = Costs.uniform(2, 1.0, 1.0)
    assert simulate(schedule, replace(costs, down=(Link(latency_s=3.0),))).makespan_s == 8.0
    assert simulate(schedule, replace(costs, down=(Link(1 / 3),))).makespan_s == 1 + 4 * 3 + 1
    assert simulate(schedule, replace(costs, up=(Link(1 / 3, 3.0),))).makespan_s == 5.0


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)))
def test_longest_path(seed, shape):
    random = Random(seed)
    schedule = random_schedule(random, *shape)
    costs = random_costs(random, schedule)
    step = simulate(schedule, costs, timeline=True, critical_path=True)
    assert step.makespan_s == longest_path(schedule, costs)
    check_timeline(schedule, step)
    check_critical_path(step)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**9), shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 2)))
def test_peak_is_the_verifiers(seed, shape):
    schedule = random_schedule(Random(seed), *shape)
    step, proof = predicted(schedule), verify(schedule)
    assert step.peak_activations == proof.peak_activations
    assert tuple(peak.deferred for peak in step.peaks) == proof.peak_deferred
    assert tuple(peak.held for peak in step.peaks) == proof.peak_held


def check_timeline(schedule, step):
    """Every action starts the moment that its rank is free and its input there, and messages are where they belong."""
    timeline = step.timeline
    assert timeline.end_s == step.makespan_s
    arrivals = {(t.kind, t.target, t.micro_batch, t.chunk): t.end_s for t in timeline.transfers}
    crossings = 2 * (schedule.num_stages - 1) * schedule.num_micro_batches if schedule.num_ranks > 1 else 0
    assert len(arrivals) == len(timeline.transfers) == crossings
    for rank, order in enumerate(schedule.orders):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(step.busy_s[rank])
        computed = [span for span in spans if span.kind in "FBIW"]
        ahead = {(span.micro_batch, span.chunk): span for span in spans if span.kind == "R"}
        assert [(s.kind, s.micro_batch, s.chunk) for s in computed] == [tuple(action) for action in order]
        now = 0.0
        for action, span in zip(order, computed, strict=True):
            down = action.kind == "F"
            stage = schedule.stage(rank, action)
            if action.kind in "BI" and (before := ahead.pop((action.micro_batch, action.chunk), None)):
                assert before.start_s == now
                now = before.end_s
            if action.kind != "W" and schedule.num_ranks > 1 and stage != (0 if down else schedule.num_stages - 1):
                sender = stage - 1 if down else stage + 1
                what = "activation" if down else "gradient"
                now = max(now, arrivals[what, rank, action.micro_batch, sender // schedule.num_ranks])
            assert span.start_s == now
            now = span.end_s
        assert not ahead


def check_critical_path(step):
    path = step.critical_path
    assert path[0].start_s == 0.0
    assert path[-1].end_s == step.makespan_s
    assert all(one.end_s == two.start_s for one, two in pairwise(path))
    assert sum(step.critical_s.values()) == pytest.approx(step.makespan_s)
    whole = {(t.kind, t.source, t.target, t.micro_batch, t.chunk): t for t in step.timeline.transfers}
    for part in path:
        if isinstance(part, Span):
            assert part in step.timeline.spans
        else:
            transfer = whole[part[:5]]
            assert transfer.start_s <= part.start_s <= part.end_s <= transfer.end_s
            assert part.num_bytes == transfer.num_bytes


@pytest.mark.parametrize("transfer_s", [0.0, 1.0])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_what_needs_no_gradient_is_not_waited_for(num_stages, num_micro_batches, transfer_s):
    """A forward takes a second, and a backward three, of which one is a forward that is repeated. In the steady state
    all stages compute; while the pipeline drains, each has repeated its forward when the gradient comes."""
    costs = Costs.uniform(num_stages, 1.0, 3.0, transfer_s)
    ahead = replace(costs, ahead_s=(1.0,) * num_stages)
    order = one_f_one_b(num_stages, num_micro_batches)
    waiting, early = (simulate(order, each).makespan_s for each in (costs, ahead))
    if transfer_s:
        assert waiting - early >= (num_stages - 1) * 1.0
    else:
        assert waiting == (num_micro_batches + num_stages - 1) * 4.0
        assert early == waiting - (num_stages - 1) * 1.0
    assert simulate(order, ahead).busy_s == simulate(order, costs).busy_s


def test_without_a_flush_nothing_runs_ahead():
    costs = Costs.uniform(4, 1.0, 3.0)
    ahead, stream = replace(costs, ahead_s=(1.0,) * 4), one_direction(4, 8)
    assert steady(stream, ahead) == steady(stream, costs)
    assert resampled_s(stream, ahead, phases(2)) == resampled_s(stream, costs, phases(2))
    assert predicted_step(stream, ahead, 3) == predicted_step(stream, costs, 3)


def test_critical_path_of_two_stages():
    costs = Costs((1.0, 1.0), (1.0, 2.0), (4.0,), (Link(1.0, 0.5),), (Link(8.0),), step_s=0.25)
    step = simulate(gpipe(2, 2), costs, timeline=True, critical_path=True)
    # The second activation is there at 2, but the link is busy with the first one until 5.
    assert step.critical_path == (
        Span(0, "F", 0, 0, 0.0, 1.0),
        Transfer("activation", 0, 1, 0, 0, 1.0, 5.0, 4.0),
        Transfer("activation", 0, 1, 1, 0, 5.0, 9.5, 4.0),
        Span(1, "F", 1, 0, 9.5, 10.5),
        Span(1, "B", 0, 0, 10.5, 12.5),
        Span(1, "B", 1, 0, 12.5, 14.5),
        Transfer("gradient", 1, 0, 1, 0, 14.5, 15.0, 4.0),
        Span(0, "B", 1, 0, 15.0, 16.0),
        Span(0, "step", -1, 0, 16.0, 16.25),
    )
    assert step.critical_s == {"compute": 7.0, "transfer": 9.0, "step": 0.25}
    assert step.busy_s == (4.25, 6.25)
    assert step.timeline.transfers[1] == Transfer("activation", 0, 1, 1, 0, 2.0, 9.5, 4.0)
    assert step.timeline.name == "gpipe"


def test_nothing_extra_unless_asked_for():
    step = predicted(one_f_one_b(2, 2))
    assert step.timeline is None
    assert step.critical_path == ()


def test_memory():
    costs = replace(
        Costs.uniform(4, 1.0, 2.0), activation_bytes=(10.0, 20.0, 30.0, 40.0), fixed_bytes=(1.0, 2.0, 3.0, 4.0)
    )
    step = simulate(kfkb(4, 16, 2), costs)
    assert step.peak_activations == (8, 6, 4, 2)
    assert step.peak_bytes == (81.0, 122.0, 123.0, 84.0)
    assert simulate(forward_only(4, 16), costs).peak_bytes == (1.0, 2.0, 3.0, 4.0)
    # Two chunks a rank: what is live of each counts with its own size.
    order = (forward(0), forward(0, 1), backward(0, 1), backward(0), forward(1), backward(1))
    two = Schedule(((*order[:5], forward(1, 1), backward(1, 1), backward(1)),), 2, 2)
    step = simulate(two, Costs((1.0, 1.0), (1.0, 1.0), activation_bytes=(5.0, 7.0)))
    assert step.peak_activations == (2,)
    assert step.peak_bytes == (12.0,)


def test_memory_of_a_split_backward():
    """What the weights' backward needs stays until it has run."""
    order = (forward(0), forward(1), backward_input(0), backward_input(1), backward_weight(0), backward_weight(1))
    schedule = Schedule((order,), 2)
    costs = Costs((1.0,), (2.0,), activation_bytes=(10.0,))
    assert simulate(schedule, costs).peak_bytes == (20.0,)
    assert simulate(schedule, replace(costs, deferred_bytes=(4.0,))).peak_bytes == (20.0,)
    assert simulate(schedule, replace(costs, deferred_bytes=(16.0,))).peak_bytes == (32.0,)
    at_once = (forward(0), backward_input(0), forward(1), backward_weight(0), backward(1))
    assert simulate(Schedule((at_once,), 2), replace(costs, deferred_bytes=(4.0,))).peak_bytes == (14.0,)


def test_halves_of_a_backward():
    order = (forward(0), backward_input(0), backward_weight(0))
    schedule = Schedule((order, order), 1)
    # The first stage goes on as soon as the second has its inputs' gradient: half of the backward, unless told.
    assert simulate(schedule, Costs((1.0, 1.0), (2.0, 2.0))).makespan_s == 1 + 1 + 1 + 2
    assert simulate(schedule, Costs((1.0, 1.0), (2.0, 2.0), weight_s=(0.5, 1.5))).makespan_s == 1 + 1 + 0.5 + 2
    assert simulate(schedule, Costs.uniform(2, 1.0, 2.0, weight_s=0.0)).makespan_s == 1 + 1 + 2 + 2


def test_interleaving_shrinks_the_bubble():
    whole = simulate(one_f_one_b(4, 8), Costs.uniform(4, 1.0, 2.0))
    halves = simulate(interleaved(4, 8, 2), Costs.uniform(8, 0.5, 1.0))
    assert whole.makespan_s == 24 + 9
    assert halves.makespan_s == 24 + 4.5


def test_forward_only():
    step = predicted(forward_only(4, 6), 0.5)
    assert step.makespan_s == 6 + 3 * 1.5
    assert step.peak_activations == (0, 0, 0, 0)


def test_free_step():
    assert simulate(one_f_one_b(2, 3), Costs.uniform(2, 0.0, 0.0)).bubble_fraction == 0.0


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (
            [(forward(0), backward(0), forward(1), backward(1)), (forward(0), forward(1), backward(0), backward(1))],
            r"rank 0 waits at B0 for rank 1",
        ),
        ([(forward(0), forward(1), backward(0)), (forward(0), backward(0))], r"rank 0 never runs B1"),
        ([(forward(2),), ()], r"F2 has no micro-batch of 0…1"),
    ],
)
def test_cannot_be_executed(orders, message):
    with pytest.raises(ValueError, match=message):
        predicted(Schedule(tuple(orders), 2))


def test_costs_of_another_shape():
    with pytest.raises(ValueError, match=r"the costs are of 3 stages and the schedule has 4: give one value a stage"):
        simulate(one_f_one_b(4, 4), Costs.uniform(3, 1.0, 2.0))
    costs = replace(Costs.uniform(4, 1.0, 2.0), fixed_bytes=(1.0,))
    with pytest.raises(ValueError, match=r"fixed_bytes has 1 values and there are 4 ranks: give one a rank"):
        simulate(one_f_one_b(4, 4), costs)
    costs = replace(Costs.uniform(4, 1.0, 2.0), hosts=(0, 1, 2))
    with pytest.raises(ValueError, match=r"hosts has 3 values and there are 4 ranks: give one a rank"):
        simulate(one_f_one_b(4, 4), costs)


def test_64_stages_take_a_moment():
    schedule, costs = kfkb(64, 1024, 2), Costs.uniform(64, 1.0, 2.0, 0.5)

    def seconds():
        begin = time.process_time()  # of this process: what else runs here counts little
        simulate(schedule, costs)
        return time.process_time() - begin

    assert any(seconds() < 3.0 for _ in range(3))  # 0.3 s of a core that is not slow


def test_imports_nothing_heavy():
    code = (
        "import sys, paceline.schedules.simulate;"
        "print([m for m in ('torch', 'deepspeed', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert done.stdout.strip() == "[]"
