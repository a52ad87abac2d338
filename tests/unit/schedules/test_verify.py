"""What verify accepts can be executed, what it refuses cannot, and the error shows why."""

import time

import pytest
from hypothesis import given, settings

from paceline.schedules import Op, Proof, Schedule, families, lower, verify
from paceline.schedules.dependencies import unit_starts
from paceline.schedules.schedule import Action, backward, forward
from paceline.schedules.verify import replay_blocking
from support.schedule_cases import executed, shuffled


def schedule_of(*rows, chunks=1):
    """From rows such as ``F0 B0.1``, without the checks of the text form."""

    def action(word):
        micro_batch, _, chunk = word[1:].partition(".")
        return Action(word[0], int(micro_batch), int(chunk or 0))

    orders = tuple(tuple(map(action, row.split())) for row in rows)
    return Schedule(orders, 2, chunks)


def runs_to_its_end(schedule):
    """By trying every rank again until none gets on."""
    done, positions, moved = set(), [0] * schedule.num_ranks, True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            if positions[rank] == len(order):
                continue
            action = order[positions[rank]]
            stage = schedule.stage(rank, action)
            if action.kind == "F":
                needs = [("F", stage - 1)] if stage else []
            elif action.kind == "W":
                needs = [("gradient", stage)]
            else:
                needs = [("F", stage)] + ([("gradient", stage + 1)] if stage < schedule.num_stages - 1 else [])
            if all((kind, at, action.micro_batch) in done for kind, at in needs):
                done.add(("F" if action.kind == "F" else "gradient", stage, action.micro_batch))
                positions[rank] += 1
                moved = True
    return all(position == len(order) for position, order in zip(positions, schedule.orders, strict=True))


@given(shuffled())
@settings(max_examples=200, deadline=None)
def test_accepts_what_runs_and_refuses_what_does_not(schedule):
    if runs_to_its_end(schedule):
        verify(schedule)
    else:
        with pytest.raises(ValueError, match=r"wait for each other|runs before "):
            verify(schedule)


def kept(order, position, begin, end):
    """Pairs of chunk and micro-batch that are between two kinds of actions while the one at a position runs."""
    begun = {a[1:] for a in order[: position + 1] if a.kind in begin}
    return len(begun - {a[1:] for a in order[:position] if a.kind in end})


@given(executed())
@settings(max_examples=60, deadline=None)
def test_proof_of_any_execution(schedule):
    proof = verify(schedule)
    for order, peak in zip(schedule.orders, proof.peak_activations, strict=True):
        assert peak == max(kept(order, i, "F", "BI") for i in range(len(order)))
    for order, peak in zip(schedule.orders, proof.peak_deferred, strict=True):
        assert peak == max(kept(order, i, "I", "W") for i in range(len(order)))
    for order, peak in zip(schedule.orders, proof.peak_held, strict=True):
        assert peak == max(kept(order, i, "F", "BW") for i in range(len(order)))
    in_order = all(
        [a.micro_batch for a in order if a.kind in adds and a.chunk == chunk] == list(range(schedule.num_micro_batches))
        for order in schedule.orders
        for chunk in range(schedule.num_chunks)
        for adds in ("BW", "BI")
    )
    assert proof.backward_in_order == in_order


@given(executed(backwards=False))
@settings(max_examples=20, deadline=None)
def test_forward_only(schedule):
    assert verify(schedule, forward_only=True) == Proof(none := (0,) * schedule.num_ranks, True, none, none)
    with pytest.raises(ValueError, match=r"rank 0 never runs B0; add it"):
        verify(schedule)


def test_backwards_out_of_order_are_reported():
    assert not verify(schedule_of("F0 F1 B1 B0", "F0 F1 B1 B0")).backward_in_order
    assert not verify(schedule_of("F0 F1 I0 I1 W1 W0")).backward_in_order
    assert not verify(schedule_of("F0 F1 I1 I0 W0 W1")).backward_in_order
    assert not verify(schedule_of("F0 F1 I0 B1 W0")).backward_in_order
    assert verify(schedule_of("F0 F1 B0 I1 W1")).backward_in_order


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(4, 16), (8, 32)])
def test_unit_times_without_transfers(num_stages, num_micro_batches):
    """(M+S−1)(F+B) for every k that divides M."""
    for k in (1, 2, 4, 8, 16):
        starts = unit_starts(families.kfkb(num_stages, num_micro_batches, k))
        assert max(ends[-1] for ends in starts) + 2 == (num_micro_batches + num_stages - 1) * 3


@pytest.mark.parametrize(
    ("schedule", "fault", "order", "column"),
    [
        (schedule_of("F0 F1 B0", "F0 B0 F1 B1"), "rank 0 never runs B1; add it", "F0 F1 B0 ", 9),
        (schedule_of("F0 F1 B0 F0 B1"), "F0 runs a second time; take one of the two out", "F0 F1 B0 F0 B1", 9),
        (schedule_of("F0 B0 B1 F1"), "B1 runs before its forward; put F1 before it", "F0 B0 B1 F1", 6),
        (schedule_of("F0 F2 B0 B2"), "F2 has no micro-batch of 0…1; take it out", "F0 F2 B0 B2", 3),
        (schedule_of("F0 F0.1 B0 B1"), "F0.1 has no chunk of 0…0; take it out", "F0 F0.1 B0 B1", 3),
        (
            schedule_of("F0 X0 B0 B1"),
            "X0 is of kind 'X', this schedule may hold F, B, I, W; take it out",
            "F0 X0 B0 B1",
            3,
        ),
        (schedule_of("W0 F0 I0 F1 B1"), "W0 runs before its forward; put F0 before it", "W0 F0 I0 F1 B1", 0),
        (schedule_of("F0 W0 I0"), "W0 runs before the backward of the inputs; put I0 before it", "F0 W0 I0", 3),
        (schedule_of("F0 B0 W0"), "W0 is part of B0, which ran before it; take one of the two out", "F0 B0 W0", 6),
        (schedule_of("F0 B0 I0"), "I0 is part of B0, which ran before it; take one of the two out", "F0 B0 I0", 6),
        (schedule_of("F0 I0 B0"), "B0 repeats I0, which ran before it; take one of the two out", "F0 I0 B0", 6),
        (schedule_of("F0 I0 W0 W0"), "W0 runs a second time; take one of the two out", "F0 I0 W0 W0", 9),
        (schedule_of("F0 I0 F1 B1"), "rank 0 never runs W0; add it", "F0 I0 F1 B1 ", 12),
    ],
)
def test_faults_are_shown(schedule, fault, order, column):
    with pytest.raises(ValueError, match=r".") as caught:
        verify(schedule)
    position = order[:column].count(" ")
    marker = " " * (len("rank 0: ") + column) + f"^ position {position}"
    assert str(caught.value) == f"{fault}.\nrank 0: {order}\n{marker}"


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (Schedule((), 1), "0 ranks"),
        (Schedule(((),), 0), "0 micro-batches"),
        (Schedule(((),), 1, 0), "0 chunks"),
    ],
)
def test_empty_schedules_are_refused(schedule, what):
    with pytest.raises(ValueError, match=f"a schedule of {what} computes nothing"):
        verify(schedule)


def test_a_circle_is_shown():
    with pytest.raises(ValueError, match=r"wait for each other") as caught:
        verify(schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1"))
    assert str(caught.value) == (
        "the schedule cannot be executed, these ranks wait for each other; run one of the marked actions later.\n"
        "rank 0 waits at B0 for rank 1:\n"
        "rank 0: F0 B0 F1 B1\n"
        "           ^ position 1\n"
        "rank 1 waits at F1 for rank 0:\n"
        "rank 1: F0 F1 B0 B1\n"
        "           ^ position 1"
    )


def test_a_long_order_is_shown_near_its_fault():
    order = (*families.one_f_one_b(1, 30).orders[0], forward(3))
    with pytest.raises(ValueError, match=r"rank 0: … F26 B26 F27 B27 F28 B28 F29 B29 F3\n {42}\^ position 60"):
        verify(Schedule((order,), 30))


def naive(schedule):
    """Receive directly before use, send directly after compute."""
    programs = []
    for rank, order in enumerate(schedule.orders):
        program = []
        for action in order:
            stage = schedule.stage(rank, action)
            name = "activation" if action.kind == "F" else "gradient"
            source, target = (stage > 0, stage < schedule.num_stages - 1)[:: 1 if action.kind == "F" else -1]
            kinds = [f"post_{name}", f"wait_{name}"] if source else []
            kinds += ["forward" if action.kind == "F" else "backward"] + ([f"send_{name}"] if target else [])
            program += [Op(kind, action.micro_batch, action.chunk, 0) for kind in kinds]
        programs.append(program)
    return programs


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_naive_order_of_1f1b_hangs_where_the_paired_one_runs(num_stages):
    schedule = families.one_f_one_b(num_stages, 8)
    with pytest.raises(ValueError, match=r"do not come to an end; .*\n") as caught:
        replay_blocking(schedule, naive(schedule))
    assert "send_activation of micro-batch" in str(caught.value)
    assert "send_gradient of micro-batch" in str(caught.value)
    replay_blocking(schedule, lower(schedule, order="paired"))


def test_a_naive_order_of_gpipe_runs():
    schedule = families.gpipe(4, 8)
    replay_blocking(schedule, naive(schedule))


def test_a_message_that_nobody_takes_hangs():
    schedule = families.one_f_one_b(2, 2)
    programs = lower(schedule, order="paired")
    dropped = [op for op in programs[1] if op[:2] != ("post_activation", 1)]
    with pytest.raises(ValueError, match=r"rank 0, op 5: send_activation of micro-batch 1.0"):
        replay_blocking(schedule, [programs[0], dropped])


def test_large_schedules_are_verified_quickly():
    schedule = families.kfkb(64, 1024, 2)
    started = time.process_time()
    verify(schedule, paired=False)
    assert time.process_time() - started < 5  # 0.2 s of a core that is not slow


def test_actions_without_families():
    """Actions that are equal but not the shared objects."""
    orders = ((Action("F", 0), Action("B", 0)),)
    assert orders == ((forward(0), backward(0)),)
    assert verify(Schedule(orders, 1)) == Proof((1,), True, (0,), (1,))
