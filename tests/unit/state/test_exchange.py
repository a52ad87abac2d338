"""Every row that is wanted is sent once, from the nearest rank that has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.state.exchange import VALUE, Held, Move, Wanted, part, plan_moves, sent_bytes

WIDTH, KINDS = 3, ("master", "exp_avg", "step")


@dataclass(frozen=True)
class Case:
    held: list[list[Held]]
    wanted: list[list[Wanted]]
    replicas: list[int]


def held(name: str, kind: str, start: int, stop: int, *, is_whole: bool = False) -> Held:
    shape = () if is_whole else (stop - start, WIDTH)
    return Held(name, kind, start, stop, shape, torch.float32, is_whole)


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
                own.append(held(name, "step", 0, 1, is_whole=True))
        for rank in draw(st.sets(ranks, min_size=1)):
            start = draw(st.integers(0, rows - 1))
            found.wanted[rank].append(Wanted(name, 0, rows, True))
            found.wanted[rank].append(Wanted(name, start, draw(st.integers(start + 1, rows)), False))
    return found


def moves_of(case: Case, moves: Sequence[Move], rank: int, place: int) -> list[tuple[Held, Move]]:
    return [(case.held[m.source][m.held], m) for m in moves if (m.target, m.wanted) == (rank, place)]


def distance(case: Case, source: int, target: int) -> int:
    if source == target:
        return 0
    return 1 if case.replicas[source] == case.replicas[target] else 2


@given(cases())
def test_every_wanted_row_of_every_kind_comes_exactly_once(case: Case) -> None:
    moves = plan_moves(case.held, case.wanted, case.replicas)
    for rank, wishes in enumerate(case.wanted):
        for place, wish in enumerate(wishes):
            rows: Counter[tuple[str, int]] = Counter()
            for entry, move in moves_of(case, moves, rank, place):
                assert entry.name == wish.name
                assert entry.start <= move.start < move.stop <= entry.stop
                assert move.num_bytes == (4 if entry.is_whole else (move.stop - move.start) * WIDTH * 4)
                rows.update((entry.kind, row) for row in range(move.start, move.stop))
            kinds = [VALUE] if wish.is_value else KINDS[:2]
            expected = {(kind, row) for kind in kinds for row in range(wish.start, wish.stop)}
            expected |= set() if wish.is_value else {("step", 0)}
            assert rows == dict.fromkeys(expected, 1)


@given(cases())
def test_every_row_comes_from_the_nearest_rank_that_has_it(case: Case) -> None:
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
        sizes = [
            part(torch.empty(case.held[rank][move.held].shape), case.held[rank][move.held], move).nbytes
            for move in moves
            if move.source == rank != move.target
        ]
        assert sent[rank] == sum(sizes)


def test_what_stays_is_not_sent() -> None:
    have = [[held("a", VALUE, 0, 4), held("a", "exp_avg", 0, 4)]]
    moves = plan_moves(have, [[Wanted("a", 0, 4, False)]], [0])
    assert moves == [Move(0, 0, 1, 0, 0, 4, 4 * WIDTH * 4)]
    assert sent_bytes(moves, 1) == [0]


def test_rows_that_change_owner_come_from_several_ranks() -> None:
    """Two replicas with half of the rows each; the new cut is elsewhere."""
    have = [[held("a", "exp_avg", 0, 4)], [held("a", "exp_avg", 4, 8)], [], []]
    want = [[], [], [Wanted("a", 0, 6, False)], [Wanted("a", 6, 8, False)]]
    found = [(m.source, m.target, m.start, m.stop) for m in plan_moves(have, want, [0, 1, 0, 1])]
    assert found == [(0, 2, 0, 4), (1, 2, 4, 6), (1, 3, 6, 8)]


def test_a_parameter_that_was_never_stepped_has_no_states_to_move() -> None:
    assert plan_moves([[held("a", VALUE, 0, 4)], []], [[], [Wanted("a", 0, 4, False)]], [0, 0]) == []


@pytest.mark.parametrize(
    ("have", "message"),
    [
        ([], "rank 1 is to have a, which no rank has"),
        ([held("b", VALUE, 0, 4)], "rank 1 is to have a, which no rank has"),
        ([held("a", "exp_avg", 0, 4)], "rank 1 is to have a, which no rank has"),
        ([held("a", VALUE, 0, 3)], r"rank 1 is to have rows \[\(3, 4\)\] of a, which no rank has"),
    ],
)
def test_what_nobody_has_is_an_error(have: list[Held], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_moves([have, []], [[], [Wanted("a", 0, 4, True)]], [0, 0])
