"""Every element that is wanted is sent once, from the nearest rank that has it, in rounds of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.state.exchange import (
    VALUE,
    Held,
    Move,
    Wanted,
    cover,
    in_rounds,
    plan_moves,
    sent_bytes,
    stretch,
    without,
)

KINDS = ("master", "exp_avg", "step")
COUNT = (2,)
"""Shape of what is whole."""


@dataclass(frozen=True)
class Case:
    held: list[list[Held]]
    wanted: list[list[Wanted]]
    replicas: list[int]


def held(name: str, kind: str, start: int, stop: int, *, is_whole: bool = False) -> Held:
    return Held(name, kind, start, stop, torch.float32, COUNT if is_whole else None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Parameters whose rows are spread over ranks: values whole on some, states by rows, a step count beside them."""
    num_ranks = draw(st.integers(1, 4))
    ranks = st.integers(0, num_ranks - 1)
    found = Case([[] for _ in range(num_ranks)], [[] for _ in range(num_ranks)], [])
    found.replicas.extend(draw(st.lists(st.integers(0, 1), min_size=num_ranks, max_size=num_ranks)))
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        rows = draw(st.integers(1, 8))
        for rank in draw(st.sets(ranks, min_size=1)):
            found.held[rank].append(held(name, VALUE, 0, rows))
        for _ in range(draw(st.integers(1, 2))):  # as often as there are complete sets of states
            cuts = sorted({0, rows, *draw(st.sets(st.integers(1, rows), max_size=2))})
            for start, stop in pairwise(cuts):
                own = found.held[draw(ranks)]
                own.extend(held(name, kind, start, stop) for kind in KINDS[:2])
                own.append(held(name, "step", 0, 2, is_whole=True))
        for rank in draw(st.sets(ranks, min_size=1)):
            start = draw(st.integers(0, rows - 1))
            found.wanted[rank].append(Wanted(name, 0, rows, VALUE))
            found.wanted[rank].append(Wanted(name, start, draw(st.integers(start + 1, rows)), None))
    return found


def moves_of(case: Case, moves: Sequence[Move], rank: int, place: int) -> list[tuple[Held, Move]]:
    return [(case.held[m.source][m.held], m) for m in moves if (m.target, m.wanted) == (rank, place)]


def distance(case: Case, source: int, target: int) -> int:
    if source == target:
        return 0
    return 1 if case.replicas[source] == case.replicas[target] else 2


@given(cases())
def test_every_wanted_element_of_every_kind_comes_exactly_once(case: Case) -> None:
    moves = plan_moves(case.held, case.wanted, case.replicas)
    for rank, wishes in enumerate(case.wanted):
        for place, wish in enumerate(wishes):
            rows: Counter[tuple[str, int]] = Counter()
            for entry, move in moves_of(case, moves, rank, place):
                assert entry.name == wish.name
                assert entry.start <= move.start < move.stop <= entry.stop
                assert move.num_bytes == (move.stop - move.start) * 4
                rows.update((entry.kind, row) for row in range(move.start, move.stop))
            kinds = [VALUE] if wish.kind == VALUE else KINDS[:2]
            expected = {(kind, row) for kind in kinds for row in range(wish.start, wish.stop)}
            expected |= set() if wish.kind == VALUE else {("step", 0), ("step", 1)}
            assert rows == dict.fromkeys(expected, 1)


@given(cases())
def test_every_element_comes_from_the_nearest_rank_that_has_it(case: Case) -> None:
    """From the rank itself, else from one of its replica, else from any."""
    moves = plan_moves(case.held, case.wanted, case.replicas)
    for rank, wishes in enumerate(case.wanted):
        for place, _ in enumerate(wishes):
            for entry, move in moves_of(case, moves, rank, place):
                for row in range(move.start, move.stop):
                    having = [
                        source
                        for source, entries in enumerate(case.held)
                        for other in entries
                        if (other.name, other.kind) == (entry.name, entry.kind) and other.start <= row < other.stop
                    ]
                    assert distance(case, move.source, rank) == min(distance(case, source, rank) for source in having)


@given(cases())
def test_bytes_are_those_that_leave_a_rank(case: Case) -> None:
    moves = plan_moves(case.held, case.wanted, case.replicas)
    sent = sent_bytes(moves, len(case.held))
    for rank in range(len(case.held)):
        entries = [(case.held[rank][move.held], move) for move in moves if move.source == rank != move.target]
        tensors = [(torch.empty(entry.stop - entry.start), entry.start, move) for entry, move in entries]
        assert sent[rank] == sum(stretch(t, first, move.start, move.stop).nbytes for t, first, move in tensors)


@given(cases(), st.integers(1, 40))
def test_rounds_keep_the_order_of_a_pair_and_bound_what_a_rank_buffers(case: Case, limit: int) -> None:
    moves = plan_moves(case.held, case.wanted, case.replicas)
    rounds = in_rounds(moves, limit)
    flat = [move for found in rounds for move in found]
    assert Counter(flat) == Counter(moves)
    for pair in {(move.source, move.target) for move in moves}:
        assert [m for m in flat if (m.source, m.target) == pair] == [m for m in moves if (m.source, m.target) == pair]
    for found in rounds:
        away = [move for move in found if move.source != move.target]
        for rank in range(len(case.held)):
            for sizes in (
                [m.num_bytes for m in away if m.source == rank],
                [m.num_bytes for m in away if m.target == rank],
            ):
                assert len(sizes) == 1 or sum(sizes) <= limit


def test_pairs_without_a_common_rank_share_a_round() -> None:
    moves = [
        Move(0, 1, 0, 0, 0, 8, 8),
        Move(0, 1, 0, 0, 8, 16, 8),
        Move(2, 3, 0, 0, 0, 8, 8),
        Move(1, 0, 0, 0, 0, 8, 8),
    ]
    assert in_rounds(moves, 8) == [[moves[0], moves[2], moves[3]], [moves[1]]]


Spans = list[tuple[int, int]]
ends = st.tuples(st.integers(0, 12), st.integers(0, 12))
spans = st.lists(ends.map(lambda pair: (min(pair), max(pair))), max_size=4)


@given(spans, spans)
def test_what_is_covered_and_what_is_missing_are_all_that_is_wanted(wanted: Spans, others: Spans) -> None:
    apart = without(wanted[:1], [])  # one range: wanted ranges are disjoint
    found, missing = cover(apart, list(enumerate(others)))
    taken = [element for _, start, stop in found for element in range(start, stop)]
    left = [element for start, stop in missing for element in range(start, stop)]
    assert sorted(taken + left) == [element for start, stop in apart for element in range(start, stop)]
    for source, start, stop in found:
        assert others[source][0] <= start < stop <= others[source][1]
        assert not any(low < stop and start < high for low, high in others[:source])


def test_a_stretch_of_what_is_not_contiguous_is_cut_between_rows() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()  # [4, 3], rows 2 to 5 of a parameter
    found = stretch(tensor, 6, 9, 15)
    assert torch.equal(found, tensor[1:3])
    assert found.data_ptr() == tensor[1].data_ptr()
    flat = stretch(tensor.contiguous(), 6, 9, 15)
    assert torch.equal(flat, tensor[1:3].reshape(-1))


def test_what_stays_is_not_sent() -> None:
    have = [[held("a", VALUE, 0, 4), held("a", "exp_avg", 0, 4)]]
    moves = plan_moves(have, [[Wanted("a", 0, 4, None)]], [0])
    assert moves == [Move(0, 0, 1, 0, 0, 4, 16)]
    assert sent_bytes(moves, 1) == [0]


def test_elements_that_change_owner_come_from_several_ranks() -> None:
    """Two replicas with half of the rows each; the new cut is elsewhere."""
    have = [[held("a", "exp_avg", 0, 4)], [held("a", "exp_avg", 4, 8)], [], []]
    want = [[], [], [Wanted("a", 0, 6, None)], [Wanted("a", 6, 8, None)]]
    found = [(m.source, m.target, m.start, m.stop) for m in plan_moves(have, want, [0, 1, 0, 1])]
    assert found == [(0, 2, 0, 4), (1, 2, 4, 6), (1, 3, 6, 8)]


def test_a_parameter_that_was_never_stepped_has_no_states_to_move() -> None:
    assert plan_moves([[held("a", VALUE, 0, 4)], []], [[], [Wanted("a", 0, 4, None)]], [0, 0]) == []


@pytest.mark.parametrize(
    ("have", "message"),
    [
        ([], "rank 1 is to have a, which no rank has"),
        ([held("b", VALUE, 0, 4)], "rank 1 is to have a, which no rank has"),
        ([held("a", "exp_avg", 0, 4)], "rank 1 is to have a, which no rank has"),
        ([held("a", VALUE, 0, 3)], r"rank 1 is to have elements \[\(3, 4\)\] of a, which no rank has"),
    ],
)
def test_what_nobody_has_is_an_error(have: list[Held], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_moves([have, []], [[], [Wanted("a", 0, 4, VALUE)]], [0, 0])
