"""Candidates against the verifier's count and against a search that builds every schedule."""

import re
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning import Candidate, candidates, memory_curve
from paceline.planning.candidates import SLACKS
from paceline.schedules import families
from paceline.schedules.verify import verify

STAGES = st.integers(1, 5)
SLACK = st.sampled_from([*SLACKS, 0.1, 7.0])


@given(STAGES, st.integers(1, 10), st.integers(1, 12), SLACK)
def test_peak_is_the_verifiers(num_stages, count, k, slack):
    candidate = Candidate(2, k, slack)
    proof = verify(candidate.schedule(num_stages, 2 * count))
    assert candidate.peak_activations(num_stages, 2 * count) == proof.peak_activations


@given(STAGES, st.integers(1, 12), st.integers(1, 12), SLACK)
def test_members_of_the_named_families(num_stages, count, k, slack):
    assert Candidate(1, k).schedule(num_stages, count).orders == families.kfkb(num_stages, count, k).orders
    assert Candidate(1, 1, slack).schedule(num_stages, count).orders == families.eager(num_stages, count, slack).orders


def test_rounding_adds_no_warmup():
    first = Candidate(1, 1, 0.1).schedule(11, 32).orders[0]  # 10 * 1.1 is a little more than 11
    assert "".join(action.kind for action in first).index("B") == 11 + 1
    assert Candidate(1, 1, 0.1).peak_activations(11, 32)[0] == 11 + 1


def test_slack_counts_groups():
    # Stage 0 of 2 begins with ceil(1 * 1.5) = 2 groups of 2.
    first, last = Candidate(1, 2, 0.5).schedule(2, 8).orders
    assert " ".join(map(str, first)) == "F0 F1 F2 F3 F4 F5 B0 B1 F6 F7 B2 B3 B4 B5 B6 B7"
    assert " ".join(map(str, last)) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5 F6 F7 B6 B7"


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        (Candidate(4), "1f1b, micro-batch 4"),
        (Candidate(1, 1, 0.5), "eager slack=0.5, micro-batch 1"),
        (Candidate(4, 2), "kfkb k=2, micro-batch 4"),
        (Candidate(2, 3, 1.0), "kfkb k=3 slack=1, micro-batch 2"),
    ],
)
def test_name(candidate, name):
    assert candidate.name == name
    assert candidate.schedule(2, 12).name == name


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def clusters(draw):
    num_stages, samples = draw(STAGES), draw(st.integers(1, 12))
    stage_lists = st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages)
    sizes = draw(st.lists(st.sampled_from(divisors(samples)), min_size=1, unique=True))
    room = draw(st.lists(st.integers(-1, 60) | st.just(inf), min_size=num_stages, max_size=num_stages))
    return num_stages, samples, sizes, {size: draw(stage_lists) for size in sizes}, room


def fits(candidate, num_stages, samples, activation_bytes, room):
    peaks = candidate.peak_activations(num_stages, samples)  # proven above to be the verifier's
    each = activation_bytes[candidate.micro_batch_size]
    return all(peak * kept <= max(left, 0) for peak, kept, left in zip(peaks, each, room, strict=True))


@given(clusters())
def test_curve_is_the_search_by_increasing_k(cluster):
    num_stages, samples, sizes, activation_bytes, room = cluster
    want = {}
    for size in sizes:
        want[size] = 0
        while want[size] < samples // size:
            if not fits(Candidate(size, want[size] + 1), num_stages, samples, activation_bytes, room):
                break
            want[size] += 1
    assert memory_curve(*cluster) == want


@settings(max_examples=30)
@given(clusters(), st.data())
def test_all_that_fit_and_each_order_once(cluster, data):
    num_stages, samples, sizes, activation_bytes, room = cluster
    configured = data.draw(st.sampled_from(sizes))

    def order(candidate):
        return candidate.micro_batch_size, candidate.schedule(num_stages, samples).orders

    got = candidates(*cluster, configured=configured)
    assert len({order(c) for c in got}) == len(got)
    assert got[0] == Candidate(configured)
    want = {
        order(c)
        for size in sizes
        for k in [*range(1, 9), samples // size]
        for slack in SLACKS
        if fits(c := Candidate(size, k, slack), num_stages, samples, activation_bytes, room)
    }
    # Between 8 and the largest that fits not every k is tried.
    found = {order(c) for c in got if c.k <= 8 or c.k == samples // c.micro_batch_size}
    assert found == want | {order(Candidate(configured))}
    assert all(fits(c, num_stages, samples, activation_bytes, room) for c in got[1:])


def test_a_larger_micro_batch_leaves_smaller_groups():
    bytes_of = {size: [size * 10.0] * 4 for size in (1, 2, 4, 8)}
    assert memory_curve(4, 64, [1, 2, 4, 8], bytes_of, [320.0] * 4) == {1: 8, 2: 4, 4: 2, 8: 1}


def test_the_fullest_stage_decides():
    # Stage 3 keeps k micro-batches alive and stage 0 keeps 4 k.
    assert memory_curve(4, 64, [1], {1: [1, 1, 1, 1]}, [inf, inf, inf, 5]) == {1: 5}
    assert memory_curve(4, 64, [1], {1: [1, 1, 1, 1]}, [11, inf, inf, 5]) == {1: 2}


def test_what_is_configured_runs_where_nothing_fits():
    assert candidates(4, 16, [1, 2], {1: [1] * 4, 2: [2] * 4}, [0] * 4, configured=2) == (Candidate(2),)


def test_without_limits_every_slack_and_gpipe():
    got = candidates(4, 16, [1], {1: [1.0] * 4}, [inf] * 4, configured=1)
    assert {c.slack for c in got if c.k == 1} == set(SLACKS)
    assert {c.k for c in got} == {*range(1, 9), 16}
    assert [c for c in got if c.k == 16] == [Candidate(1, 16)]


@pytest.mark.parametrize(
    ("samples", "room", "want"),
    [
        (4096, inf, [*range(1, 9), 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]),
        (4096, 100, [*range(1, 9), 16, 32, 64, 100]),
        (360, inf, [*range(1, 9), 15, 30, 60, 120, 180, 360]),
        (97, inf, [*range(1, 9), 16, 32, 64, 97]),  # a prime has no divisors to prefer
        (9, inf, [*range(1, 10)]),
    ],
)
def test_few_groups_of_many_micro_batches(samples, room, want):
    got = candidates(1, samples, [1], {1: [1.0]}, [room], configured=1)
    assert [c.k for c in got] == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_sizes": [3]}, "a micro-batch size of 3 does not divide the 16 samples of a step"),
        ({"configured": 0}, "a micro-batch size of 0 does not divide the 16 samples"),
        (
            {"micro_batch_sizes": [2]},
            "micro-batch size 2 has no activation_bytes (there are [1]): measure it, or leave",
        ),
        ({"room_bytes": [1.0]}, "room_bytes has 1 values for 2 stages: give one for each stage."),
        ({"activation_bytes": {1: [1.0] * 3}}, "activation_bytes has 3 values for 2 stages"),
        ({"activation_bytes": {1: [1.0, -1.0]}}, "stage 1 keeps -1.0 bytes for a micro-batch of 1"),
        ({"room_bytes": [float("nan"), 1.0]}, "stage 0 keeps 1.0 bytes for a micro-batch of 1 and has room for nan"),
        ({"slacks": [-1.0]}, "slack=-1.0 must be a number from 0 upwards"),
        ({"slacks": [inf]}, "slack=inf must be a number from 0 upwards"),
    ],
)
def test_refusals(changes, message):
    arguments = {
        "num_stages": 2,
        "samples": 16,
        "micro_batch_sizes": [1],
        "activation_bytes": {1: [1.0, 1.0]},
        "room_bytes": [100.0, 100.0],
        "configured": 1,
    }
    assert len(candidates(**arguments)) > 1
    with pytest.raises(ValueError, match=re.escape(message)):
        candidates(**{**arguments, **changes})
