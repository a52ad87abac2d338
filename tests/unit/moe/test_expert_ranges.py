"""Each element that a rank is to have comes to it once, from the nearest rank, and swaps are safe part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.moe.expert_ranges import Holding, Part, Told, Weight, check, holdings, parts, routes
from paceline.planning.experts import Placement
from paceline.state.exchange import plan_moves
from paceline.state.named import MASTER, VALUE

NUMEL = 4
STATES = (MASTER, "exp_avg")


@dataclass(frozen=True)
class Case:
    weights: list[Weight]
    old: Placement
    new: Placement
    told: list[Told]


def placement(experts: list[int], num_devices: int) -> Placement:
    slots = len(experts) // num_devices
    return Placement(tuple(tuple(experts[d * slots : (d + 1) * slots]) for d in range(num_devices)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Weights stacked or not; masters and states whole on every rank, or cut anywhere over the replicas."""
    num_devices, slots, num_replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = list(range(num_devices * slots))
    is_stacked = draw(st.booleans())
    places = tuple((0, NUMEL * slot) if is_stacked else (slot, 0) for slot in range(slots))
    numel = NUMEL * slots if is_stacked else NUMEL
    sizes = [numel] * (1 if is_stacked else slots)
    kinds = draw(st.sampled_from([(), STATES[1:], STATES]))
    is_cut = draw(st.booleans())
    told: dict[tuple[int, int], list[tuple[Holding, ...]]] = {}
    for device in range(num_devices):
        for size in sizes:
            inner = draw(st.lists(st.integers(0, size), min_size=num_replicas - 1, max_size=num_replicas - 1))
            cuts = [0, *sorted(inner), size]
            for replica, (start, stop) in enumerate(pairwise(cuts)):
                span = (start, stop) if is_cut else (0, size)
                mine = [Holding(VALUE, torch.bfloat16, 0, size)]
                if span[0] < span[1]:
                    mine += [Holding(kind, torch.float32, *span) for kind in kinds]
                told.setdefault((replica, device), []).append(tuple(mine))
    ranks = [Told(device, replica, 0, tuple(told[replica, device])) for replica, device in sorted(told)]
    old, new = (placement(draw(st.permutations(experts)), num_devices) for _ in range(2))
    return Case([Weight("w", NUMEL, places)], old, new, ranks)


class Piece(NamedTuple):
    """Elements of one weight of an expert, from slot to slot."""

    source: int
    target: int
    from_slot: int
    to_slot: int
    start: int
    stop: int
    num_bytes: int


def pieces(case: Case, kind: str, rank: int) -> list[Piece]:
    """Moves from and to a rank, as that rank plans them from the ranges of all."""
    found = routes(case.old, case.new)
    held, wanted = holdings(case.weights[0], kind, found, case.told, rank)
    slots = {route.expert: (route.slot, route.new_slot) for route in found}
    return [
        Piece(m.source, m.target, *slots[held[m.source][m.held].name], m.start, m.stop, m.num_bytes)
        for m in plan_moves(held, wanted, [entry.replica for entry in case.told])
        if rank in (m.source, m.target)
    ]


def parts_of(case: Case) -> Sequence[Part]:
    return parts(case.weights, routes(case.old, case.new), case.told)


Memory = list[dict[tuple[str, int, int], tuple[int, int]]]
"""Of each rank, by kind, parameter and element: the expert and the element of its weight that lie there."""


def memory_of(case: Case, placed: Placement) -> Memory:
    found: Memory = []
    for rank in case.told:
        mine = {}
        for slot, (number, first) in enumerate(case.weights[0].places):
            for holding in rank.parameters[number]:
                for element in range(max(first, holding.start), min(first + NUMEL, holding.stop)):
                    mine[holding.kind, number, element] = (placed.devices[rank.device][slot], element - first)
        found.append(mine)
    return found


def elements(case: Case, piece: Piece, slot: int) -> list[tuple[int, int]]:
    number, first = case.weights[0].places[slot]
    return [(number, first + element) for element in range(piece.start, piece.stop)]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_all_get_what_the_new_placement_gives_them(case: Case) -> None:
    """Part by part, all read before any is written; values that follow from masters are made in the end."""
    check("layer", case.weights, case.told)
    memory = memory_of(case, case.old)
    for part in parts_of(case):
        plans = [pieces(case, part.kind, rank) for rank in range(len(case.told))]
        moves = sorted({piece for plan in plans for piece in plan})
        for rank, plan in enumerate(plans):  # both sides see the same, in the same order
            for other in range(len(plans)):
                between = [p for p in plan if {p.source, p.target} == {rank, other}]
                assert between == [p for p in plans[other] if {p.source, p.target} == {rank, other}]
            assert sum(p.num_bytes for p in plan if p.source == rank != p.target) <= part.most_bytes
            assert sum(p.num_bytes for p in plan if p.target == rank != p.source) <= part.most_bytes
        read = [[memory[p.source][(part.kind, *at)] for at in elements(case, p, p.from_slot)] for p in moves]
        written: Counter[tuple[int, int, int]] = Counter()
        for piece, values in zip(moves, read, strict=True):
            for at, value in zip(elements(case, piece, piece.to_slot), values, strict=True):
                written[(piece.target, *at)] += 1
                memory[piece.target][(part.kind, *at)] = value
        assert set(written.values()) <= {1}
    for mine in memory:
        mine |= {(VALUE, *at): value for (kind, *at), value in mine.items() if kind == MASTER}
    assert memory == memory_of(case, case.new)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_nothing_comes_from_further_away_than_it_must(case: Case) -> None:
    for part in parts_of(case):
        for rank, target in enumerate(case.told):
            for piece in pieces(case, part.kind, rank):
                if piece.target != rank:
                    continue
                source = case.told[piece.source]
                number, first = case.weights[0].places[piece.from_slot]
                low, high = first + piece.start, first + piece.stop
                nearer = [
                    other
                    for other, entry in enumerate(case.told)
                    if entry.device == source.device
                    and (other != rank, entry.replica != target.replica)
                    < (piece.source != rank, source.replica != target.replica)
                    and any(h.kind == part.kind and h.start < high and low < h.stop for h in entry.parameters[number])
                ]
                assert not nearer, piece


def test_only_what_moves_is_sent() -> None:
    told = [Told(device, 0, 0, ((Holding(VALUE, torch.float32, 0, 8),),)) for device in range(2)]
    weights = [Weight("w", 4, ((0, 0), (0, 4)))]
    old, new = Placement(((0, 1), (2, 3))), Placement(((0, 3), (1, 2)))
    case = Case(weights, old, new, told)
    assert pieces(case, VALUE, 0) == [Piece(1, 0, 1, 1, 0, 4, 16), Piece(0, 1, 1, 0, 0, 4, 16)]
    assert pieces(case, VALUE, 1) == [
        Piece(1, 0, 1, 1, 0, 4, 16),
        Piece(0, 1, 1, 0, 0, 4, 16),
        Piece(1, 1, 0, 1, 0, 4, 16),
    ]
    assert pieces(Case(weights, old, old, told), VALUE, 0) == []


def test_copies_are_no_reason_to_move() -> None:
    old = Placement(((0, 1, 2), (2, 3, 0)), owned=(2, 2))
    assert routes(old, Placement(((0, 1, 3), (2, 3, 1)), owned=(2, 2))) == []
    assert routes(old, Placement(((1, 0, 3), (2, 3, 1)), owned=(2, 2))) == [("0", 0, 0, 0, 1), ("1", 0, 1, 0, 0)]


WHOLE = Holding(VALUE, torch.float32, 0, 8)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, (WHOLE,)), (1, (WHOLE,)), "ranks 0 and 1 of its group have or ask for different placements"),
        (
            (0, (WHOLE, Holding("exp_avg", torch.float32, 0, 8))),
            (0, (WHOLE, Holding("exp_avg", torch.float32, 0, 7))),
            "layer: device 1 has no exp_avg of w, or not all of it, and others have: experts can move when",
        ),
        (
            (0, (WHOLE,)),
            (0, (Holding(VALUE, torch.bfloat16, 0, 8),)),
            r"layer: value of w is of \['torch.bfloat16', 'torch.float32'\] on different ranks",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    first: tuple[int, tuple[Holding, ...]], second: tuple[int, tuple[Holding, ...]], message: str
) -> None:
    told = [Told(device, 0, asked, (held,)) for device, (asked, held) in enumerate((first, second))]
    with pytest.raises(ValueError, match=message):
        check("layer", [Weight("w", 4, ((0, 0), (0, 4)))], told)
