"""Lowered programs of every executable schedule end, on transports that are stricter than any real one."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules import Schedule, families, lower, verify
from paceline.schedules.schedule import backward, forward
from paceline.schedules.verify import replay_blocking
from support.schedule_cases import FAMILY_CASES, executed, routed

# Families, and orders that none of them has: backwards and forwards in any order, with and without backwards, with and
# without several directions.
SCHEDULES = st.one_of(*FAMILY_CASES.values(), executed(), executed(backwards=False), routed(), routed(backwards=False))
WINDOWS = st.one_of(st.none(), st.integers(1, 4))


def lane(schedule, rank, op):
    """The lane of a send, post or wait: what it carries and the cell that sends."""
    verb, what = op.kind.split("_")
    cell = schedule.cells[rank][op.chunk]
    if verb != "send":
        cell += -1 if what == "activation" else 1
    return what, cell


def run_with_lanes(schedule, programs):
    """Run programs whose sends never block and whose messages move when their receive is posted, first in first out.

    Returns:
        how many ranks came to their end.
    """
    sent, posted = defaultdict(list), defaultdict(list)
    positions, moved = [0] * len(programs), True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            for position in range(positions[rank], len(program)):
                op = program[position]
                verb = op.kind.split("_")[0]
                if verb == "send":
                    sent[lane(schedule, rank, op)].append(op.micro_batch)
                elif verb == "post":
                    posted[lane(schedule, rank, op)].append(op.micro_batch)
                elif verb == "wait":
                    at = lane(schedule, rank, op)
                    place = posted[at].index(op.micro_batch)  # it has been posted
                    if place >= len(sent[at]):
                        break
                    assert sent[at][place] == op.micro_batch, f"{at}: {sent[at]} sent, {posted[at]} posted"
                positions[rank] = position + 1
                moved = True
    assert sent == posted
    return sum(position == len(program) for position, program in zip(positions, programs, strict=True))


@given(SCHEDULES, WINDOWS)
@settings(max_examples=120, deadline=None)
def test_free_programs_run_with_any_window(schedule, window):
    assert run_with_lanes(schedule, lower(schedule, receives_ahead=window)) == schedule.num_ranks


@given(SCHEDULES)
@settings(max_examples=120, deadline=None)
def test_paired_programs_run_on_every_transport(schedule):
    programs = lower(schedule, order="paired")
    replay_blocking(schedule, programs)
    assert run_with_lanes(schedule, programs) == schedule.num_ranks


@given(SCHEDULES)
@settings(max_examples=80, deadline=None)
def test_both_ends_of_a_pair_see_the_same_sequence(schedule):
    programs = lower(schedule, order="paired")
    seen = defaultdict(list)
    for rank, program in enumerate(programs):
        for op in program:
            verb, _, what = op.kind.partition("_")
            if verb in ("send", "post"):
                down = (what == "activation") == (verb == "send")
                peer, _ = schedule.places[schedule.cells[rank][op.chunk] + (1 if down else -1)]
                seen[rank, peer].append((*lane(schedule, rank, op), op.micro_batch))
    for (rank, peer), messages in seen.items():
        assert messages == seen[peer, rank]


def expected_steps(schedule, rank, micro_batch, chunk):
    """The ops of one micro-batch in a chunk, in their order."""
    direction, stage = divmod(schedule.cells[rank][chunk], schedule.num_stages)
    above = stage > 0 and schedule.rank(stage - 1, direction) != rank
    below = stage < schedule.num_stages - 1 and schedule.rank(stage + 1, direction) != rank
    steps = ["load"] if stage in (0, schedule.num_stages - 1) else []
    steps += ["post_activation", "wait_activation"] if above else []
    steps += ["forward"] + (["send_activation"] if below else [])
    kinds = {a.kind for a in schedule.orders[rank] if (a.micro_batch, a.chunk) == (micro_batch, chunk)}
    if kinds != {"F"}:
        steps += ["post_gradient", "wait_gradient"] if below else []
        steps += ["backward" if "B" in kinds else "backward_input"] + (["send_gradient"] if above else [])
        steps += ["backward_weight"] if "W" in kinds else []
    return steps


@given(SCHEDULES, st.sampled_from(["free", "paired"]))
@settings(max_examples=100, deadline=None)
def test_programs_hold_what_a_micro_batch_needs_and_no_more(schedule, order):
    for rank, program in enumerate(lower(schedule, order=order)):
        by_micro_batch = defaultdict(list)
        for op in program:
            by_micro_batch[op.chunk, op.micro_batch].append(op.kind)
        assert set(by_micro_batch) == {
            (chunk, micro_batch)
            for chunk in range(schedule.num_chunks)
            for micro_batch in range(schedule.num_micro_batches)
            if micro_batch % schedule.num_directions == schedule.direction(rank, chunk)
        }
        for (chunk, micro_batch), kinds in by_micro_batch.items():
            # Labels are loaded before their forward, it does not matter whether before or after a post.
            steps = expected_steps(schedule, rank, micro_batch, chunk)
            assert Counter(kinds) == Counter(steps)
            without_load = [kind for kind in kinds if kind != "load"]
            assert without_load == [step for step in steps if step != "load"]
            assert "load" not in kinds or kinds.index("load") < kinds.index("forward")


@given(SCHEDULES, st.sampled_from(["free", "paired"]))
@settings(max_examples=80, deadline=None)
def test_waits_and_sends_stand_next_to_their_compute(schedule, order):
    for rank, program in enumerate(lower(schedule, order=order)):
        for position, op in enumerate(program):
            if op.kind in ("forward", "backward", "backward_input"):
                what = "activation" if op.kind == "forward" else "gradient"
                steps = expected_steps(schedule, rank, op.micro_batch, op.chunk)
                before = position - 1
                while order == "free" and before >= 0 and program[before].kind == "post_activation":
                    before -= 1  # the window, filled up again
                if f"wait_{what}" in steps:
                    assert program[before] == op._replace(kind=f"wait_{what}")
                if f"send_{what}" in steps and order == "free":
                    assert program[position + 1] == op._replace(kind=f"send_{what}")


@given(st.one_of(*(FAMILY_CASES[name] for name in ("1f1b", "kfkb", "eager", "interleaved"))), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_window_is_kept_and_filled(schedule, window):
    """Where activations are used in the order in which they are sent: filled up behind each forward's own message."""
    for program in lower(schedule, receives_ahead=window):
        outstanding, left = Counter(), Counter(op.chunk for op in program if op.kind == "post_activation")
        for op in program:
            if op.kind in ("wait_activation", "backward"):
                assert outstanding[op.chunk] == min(window, outstanding[op.chunk] + left[op.chunk])
            if op.kind == "post_activation":
                outstanding[op.chunk] += 1
                left[op.chunk] -= 1
            if op.kind == "wait_activation":
                outstanding[op.chunk] -= 1
            assert outstanding[op.chunk] <= window


def test_default_window_is_what_the_sender_keeps_alive():
    schedule = families.kfkb(4, 12, 2)
    peaks = verify(schedule).peak_activations
    for rank, program in enumerate(lower(schedule)):
        first = next(position for position, op in enumerate(program) if op.kind in ("wait_activation", "forward"))
        posts = [op.micro_batch for op in program[:first] if op.kind == "post_activation"]
        assert posts == (list(range(peaks[rank - 1])) if rank else [])


def test_default_window_of_evaluation_is_two():
    _, second = lower(families.forward_only(2, 4))
    assert [op[:2] for op in second[:2]] == [("post_activation", 0), ("post_activation", 1)]
    assert second[2].kind == "load"


def ops(program):
    return " ".join(f"{op.kind}:{op.micro_batch}" for op in program)


def test_free_by_hand():
    first, second = lower(families.one_f_one_b(2, 3))
    assert ops(first) == (
        "load:0 forward:0 send_activation:0 post_gradient:0 load:1 forward:1 send_activation:1"
        " post_gradient:1 wait_gradient:0 backward:0 load:2 forward:2 send_activation:2 post_gradient:2"
        " wait_gradient:1 backward:1 wait_gradient:2 backward:2"
    )
    assert ops(second) == (
        "post_activation:0 post_activation:1 load:0 wait_activation:0 forward:0 post_activation:2"
        " backward:0 send_gradient:0 load:1 wait_activation:1 forward:1 backward:1 send_gradient:1"
        " load:2 wait_activation:2 forward:2 backward:2 send_gradient:2"
    )


def test_paired_by_hand():
    """Activation 0 is made at 1, activation 1 at 2, gradient 0 at 4, gradient 1 at 7 units of time."""
    first, second = lower(families.one_f_one_b(2, 2), order="paired")
    assert ops(first) == (
        "load:0 forward:0 send_activation:0 load:1 forward:1 send_activation:1 post_gradient:0"
        " wait_gradient:0 backward:0 post_gradient:1 wait_gradient:1 backward:1"
    )
    assert ops(second) == (
        "post_activation:0 load:0 wait_activation:0 forward:0 post_activation:1 backward:0"
        " send_gradient:0 load:1 wait_activation:1 forward:1 backward:1 send_gradient:1"
    )


def test_messages_made_at_the_same_moment_do_not_wait_in_a_chain():
    """In evaluation stage s sends micro-batch m at moment s + m: first those with an even s, then the others."""
    schedule = families.forward_only(6, 8)
    for rank, program in enumerate(lower(schedule, order="paired")):
        stages = [(lane(schedule, rank, op)[1], op) for op in program if op.kind.startswith(("send", "post"))]
        places = [(stage + op.micro_batch, stage % 2) for stage, op in stages]
        assert places == sorted(places)


def test_gradients_are_posted_in_the_order_in_which_they_come():
    order = (forward(0), forward(1), backward(1), backward(0))
    first, second = lower(Schedule((order, order), 2))
    assert [op.micro_batch for op in first if op.kind == "post_gradient"] == [1, 0]
    assert [op.micro_batch for op in second if op.kind == "send_gradient"] == [1, 0]


def test_activations_used_in_another_order_are_posted_as_they_come():
    first = (forward(0), forward(1), backward(1), backward(0))
    second = (forward(1), backward(1), forward(0), backward(0))
    program = lower(Schedule((first, second), 2), receives_ahead=1)[1]
    assert [op[:2] for op in program[:4]] == [
        ("post_activation", 0), ("load", 1), ("post_activation", 1), ("wait_activation", 1)
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["free", "paired"])
def test_chunks_of_one_rank_do_not_communicate(order):
    (program,) = lower(families.interleaved(1, 2, 2), order=order)
    assert {op.kind for op in program} == {"load", "forward", "backward"}
    assert {op.chunk for op in program if op.kind == "load"} == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "fifo"}, r"order='fifo' is unknown: choose 'free' or 'paired'"),
        ({"receives_ahead": 0}, r"receives_ahead=0 must be 1 or more"),
        ({"order": "paired", "receives_ahead": 2}, r"receives_ahead=2 .* belongs to order='free'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lower(families.gpipe(2, 2), **options)


def test_what_cannot_be_executed_is_refused():
    order = families.one_f_one_b(2, 3).orders
    with pytest.raises(ValueError, match=r"wait for each other"):
        lower(Schedule(order[::-1], 3))
    with pytest.raises(ValueError, match=r"rank 1 never runs B2"):
        lower(Schedule((order[0], order[1][:-1]), 3))
