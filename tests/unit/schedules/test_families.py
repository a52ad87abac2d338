"""Every family goes through one table of checks; beyond that, orders written by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules import FAMILIES, families, from_text, lower, make, to_text, verify
from paceline.schedules.verify import replay_blocking
from support.schedule_cases import FAMILY_CASES, has_backwards

COMPUTES = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def is_proven(schedule):
    verify(schedule, forward_only=not has_backwards(schedule))


def sums_gradients_in_micro_batch_order(schedule):
    assert verify(schedule, forward_only=not has_backwards(schedule)).backward_in_order
    for chunk in range(schedule.num_chunks):
        for order in schedule.orders:
            for adds in ("BW", "BI"):
                backwards = [action.micro_batch for action in order if action.kind in adds and action.chunk == chunk]
                assert backwards == sorted(backwards)


def survives_its_text(schedule):
    assert from_text(to_text(schedule)) == schedule


def shares_its_actions(schedule):
    """Millions of actions fit into memory because equal ones are one object, on every rank."""
    objects = {}
    for order in schedule.orders:
        for action in order:
            assert objects.setdefault(action, action) is action


def lowers_to_its_own_computes(schedule):
    for order in ("free", "paired"):
        for program, actions in zip(lower(schedule, order=order), schedule.orders, strict=True):
            computes = [(COMPUTES[op.kind], op.micro_batch, op.chunk) for op in program if op.kind in COMPUTES]
            assert computes == list(actions)


def runs_when_messages_block(schedule):
    replay_blocking(schedule, lower(schedule, order="paired"))


CHECKS = [
    is_proven,
    sums_gradients_in_micro_batch_order,
    survives_its_text,
    shares_its_actions,
    lowers_to_its_own_computes,
    runs_when_messages_block,
]


@pytest.mark.parametrize("family", FAMILY_CASES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_family_passes_every_check(family, data):
    schedule = data.draw(FAMILY_CASES[family])
    for check in CHECKS:
        check(schedule)


def test_every_configured_family_is_checked():
    assert set(FAMILIES) <= set(FAMILY_CASES)


def rows(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_group_sizes():
    assert [families.group_sizes(count) for count in (1, 2, 3, 4, 5, 16, 17)] == [
        *((), (), (2,), (2,), (2, 4), (2, 4, 8), (2, 4, 8, 16))
    ]


def test_kfkb_by_hand():
    assert rows(families.kfkb(4, 8, 2)) == [
        "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 F5 B0 B1 F6 F7 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 B0 B1 F4 F5 B2 B3 F6 F7 B4 B5 B6 B7",
        "F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5 F6 F7 B6 B7",
    ]


def test_ragged_last_group_by_hand():
    assert rows(families.kfkb(3, 5, 2)) == [
        "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        "F0 F1 F2 F3 B0 B1 F4 B2 B3 B4",
        "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4",
    ]


def test_eager_by_hand():
    assert rows(families.eager(3, 6, 1)) == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_interleaved_by_hand():
    assert rows(families.interleaved(2, 4, 2)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_forward_only_by_hand():
    assert rows(families.forward_only(2, 3)) == ["F0 F1 F2"] * 2


@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 30))
def test_kfkb_between_1f1b_and_gpipe(num_stages, num_micro_batches, k):
    schedule = families.kfkb(num_stages, num_micro_batches, k)
    live = tuple(min(num_micro_batches, k * (num_stages - stage)) for stage in range(num_stages))
    assert verify(schedule).peak_activations == live
    if k == 1:
        assert schedule.orders == families.one_f_one_b(num_stages, num_micro_batches).orders
    if k >= num_micro_batches:
        assert schedule.orders == families.gpipe(num_stages, num_micro_batches).orders
    assert (
        families.eager(num_stages, num_micro_batches, 0).orders
        == families.kfkb(num_stages, num_micro_batches, 1).orders
    )


def test_no_slack_is_too_large():
    assert families.eager(3, 8, 1e308).orders == families.grouped(3, 8, 1, [8, 8, 0]).orders


def test_slack_is_not_rounded_up_twice():
    assert 25 * (1 + 1.2) > 55
    assert families.eager(26, 80, 1.2).orders[0][:57] == families.one_f_one_b(56, 80).orders[0][:57]


def test_make_gives_the_family_that_is_named():
    assert make("1f1b", 4, 8) == families.one_f_one_b(4, 8)
    assert make("gpipe", 4, 8) == families.gpipe(4, 8)
    assert make("kfkb", 4, 8, k=2) == families.kfkb(4, 8, 2)
    assert make("eager", 4, 8, slack=0.5) == families.eager(4, 8, 0.5)
    assert make("kfkb", 3, 8, k=2, warmup=[3, 2, 0]).orders == families.grouped(3, 8, 2, [3, 2, 0]).orders
    assert make("eager", 3, 8, warmup=[3, 2, 0]).orders == families.grouped(3, 8, 1, [3, 2, 0]).orders


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: families.kfkb(4, 8, 0), r"k=0 must be 1 or more"),
        (lambda: families.one_f_one_b(0, 8), r"num_stages=0 must be 1 or more"),
        (lambda: families.gpipe(4, 0), r"num_micro_batches=0 must be 1 or more"),
        (lambda: families.forward_only(4, -1), r"num_micro_batches=-1 must be"),
        (lambda: families.eager(4, 8, -0.5), r"slack=-0.5 must be a number from 0 upwards"),
        (lambda: families.eager(4, 8, float("nan")), r"slack=nan must be"),
        (lambda: families.grouped(2, 8, 1, [1]), r"has 1 numbers for 2 stages: give one for each stage"),
        (lambda: families.grouped(2, 8, 1, [1, -1]), r"warmup\[1\]=-1 is negative"),
        (
            lambda: families.grouped(3, 8, 1, [2, 0, 1]),
            r"from 0 on stage 1 to 1 on stage 2: .*lower warmup\[2\] to 0",
        ),
        (
            lambda: families.gpipe(4, 2**31),
            r"^2147483648 micro-batches on 4 stages are more than 33554432 forwards and",
        ),
        (lambda: families.eager(2**40, 1, 1.0), r"fewer micro-batches, or fewer stages\.$"),
        (lambda: families.interleaved(4, 2**24, 4), r"16777216 micro-batches on 16 stages are more than"),
        (lambda: families.dualpipev(4, 2**30), r"1073741824 micro-batches on 8 stages are more than"),
        (lambda: families.interleaved(4, 6, 2), r"num_micro_batches=6 is no multiple of num_ranks=4"),
        (
            lambda: make("zbh1", 4, 8),
            r"'zbh1' has a function of its own: call paceline\.schedules\.split_families\.zbh1\.$",
        ),
        (
            lambda: make("interleaved", 4, 8),
            r"a function of its own: call paceline\.schedules\.families\.interleaved\.$",
        ),
        (lambda: make("1F1B", 4, 8), r"schedule type '1F1B' is unknown: choose one of 1f1b, gpipe, kfkb, eager"),
        (lambda: make("gpipe", 4, 8, k=2), r"k=2 has no meaning for the schedule 'gpipe': leave it out"),
        (lambda: make("kfkb", 4, 8), r"'kfkb' needs k"),
        (lambda: make("eager", 4, 8), r"'eager' takes slack or warmup, got slack=None and warmup=None"),
        (lambda: make("eager", 4, 8, slack=1, warmup=[0] * 4), r"'eager' takes slack or warmup"),
    ],
)
def test_wrong_shapes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_growing_warmup_that_all_groups_cap_is_none():
    assert families.grouped(2, 3, 2, [2, 7]) == families.grouped(2, 3, 2, [2, 2])
