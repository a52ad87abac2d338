"""Shares of a step's micro-batches: the best there are, and evenly dealt."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.unequal_replicas import MicroBatchCounts, ReplicaTimes, dealt, fastest_shares, slowest_s

SECONDS = st.floats(0.01, 10.0)
TIMES = st.lists(st.builds(ReplicaTimes, SECONDS, st.floats(0.0, 20.0)), min_size=1, max_size=4)


@given(TIMES, st.integers(0, 6), st.integers(1, 3), st.integers(1, 2))
def test_no_other_shares_are_faster(times: list[ReplicaTimes], more: int, least: int, unit: int) -> None:
    least *= unit
    total = least * len(times) + more * unit
    shares = fastest_shares(times, total, MicroBatchCounts(least, unit))
    possible = range(least, total + 1, unit)
    every = (each for each in product(possible, repeat=len(times)) if sum(each) == total)
    assert sum(shares) == total
    assert all(share in possible for share in shares)
    assert slowest_s(times, shares) == min(slowest_s(times, each) for each in every)


def test_shares_follow_the_speeds() -> None:
    assert fastest_shares([ReplicaTimes(1.0), ReplicaTimes(2.0), ReplicaTimes(4.0)], 14) == (8, 4, 2)
    assert fastest_shares([ReplicaTimes(1.0)] * 3, 12) == (4, 4, 4)
    # The fill of a long pipeline counts as well.
    assert fastest_shares([ReplicaTimes(1.0, 6.0), ReplicaTimes(1.0)], 8) == (1, 7)


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="2 micro-batches for 3 replicas: each needs 1 at least"):
        fastest_shares([ReplicaTimes(1.0)] * 3, 2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_micro_batches_are_dealt_evenly(shares: list[int]) -> None:
    order = dealt(shares)
    assert [order.count(replica) for replica in range(len(shares))] == shares
    for replica, share in enumerate(shares):  # about as many of any part of a step as of the whole
        for end in range(len(order) + 1):
            assert abs(order[:end].count(replica) - share * end / len(order)) <= len(shares)


@given(st.integers(1, 6), st.integers(1, 6))
def test_equal_shares_take_turns(replicas: int, share: int) -> None:
    assert dealt([share] * replicas) == tuple(range(replicas)) * share
