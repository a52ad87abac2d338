"""Activations that are kept as memory allows, counted again by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.schedules import families
from paceline.schedules.keeping import NOTHING, Keeping, Layers, keeping, kept_shares
from paceline.schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from paceline.schedules.split_families import SPLIT_FAMILIES

SAVED, LAYERS, LAYER = 10.0, 4, 25.0
AGAIN = LAYERS * LAYER
ONE_F_ONE_B = families.one_f_one_b(4, 8)
ALL = {(0, number): LAYERS for number in range(8)}
MUCH = 1e9


def waiting(schedule: Schedule, rank: int) -> list[int]:
    return [chunk for chunk, stage in enumerate(schedule.stages[rank]) if stage < schedule.num_stages - 1]


def kept(rank: int, room: float, deferred: float = SAVED, schedule: Schedule = ONE_F_ONE_B) -> Keeping:
    chunks = range(schedule.num_chunks)
    again = dict.fromkeys(chunks, Layers(AGAIN, LAYERS))
    saved, later = dict.fromkeys(chunks, SAVED), dict.fromkeys(chunks, deferred)
    found = keeping(schedule.orders[rank], waiting(schedule, rank), saved, later, again, room)
    if found != NOTHING:
        assert_fits(schedule, rank, room, found, deferred)
    return found


def assert_fits(schedule: Schedule, rank: int, room: float, found: Keeping, deferred: float) -> None:
    """Count the bytes again, at each moment at which something is there that need not be."""
    waits = waiting(schedule, rank)
    alive, later = dict[tuple[int, int], float](), 0.0
    for kind, number, chunk in schedule.orders[rank]:
        cell, beside = (chunk, number), 0.0
        layers = found.kept.get(cell, 0)
        if kind == FORWARD:
            alive[cell] = SAVED + LAYER * layers
        is_backward = kind in (BACKWARD, BACKWARD_INPUT)
        if is_backward:
            left = LAYERS - layers
            beside = LAYER * (left if found.is_early and chunk in waits else min(left, 1)) + SAVED * (layers > 0)
        if (is_backward and found.is_early and chunk in waits) or any(found.kept.get(each) for each in alive):
            assert sum(alive.values()) + later + beside <= room + 1e-6
        if is_backward:
            del alive[cell]
        later += {BACKWARD_INPUT: deferred, BACKWARD_WEIGHT: -deferred}.get(kind, 0.0)


def test_all_that_has_room_is_kept() -> None:
    """The first stage of four has four micro-batches at a time, and the gradients of what one keeps anyway."""
    need = 4 * (SAVED + AGAIN) + SAVED
    assert kept(0, need) == Keeping(True, ALL)
    fewer = kept(0, need - 1)
    assert fewer.is_early
    assert 0 < sum(fewer.kept.values()) < sum(ALL.values())


def test_the_last_stage_needs_room_for_one_micro_batch() -> None:
    assert kept(3, 2 * SAVED + AGAIN) == Keeping(True, ALL)


@pytest.mark.parametrize(
    ("layers", "room"), [(0, 2 * SAVED + 2 * LAYER - 1), (1, 2 * SAVED + 2 * LAYER), (3, 2 * SAVED + 4 * LAYER)]
)
def test_a_stage_that_waits_for_nobody_keeps_as_many_layers_as_it_can(layers: int, room: float) -> None:
    """The others are whole again one at a time: room for all four layers is room for three and that one."""
    expected = dict.fromkeys(ALL, layers) if layers < 3 else ALL
    assert kept(3, room).kept == ({} if not layers else expected)


def test_what_is_computed_again_early_has_room_first() -> None:
    """With room for one micro-batch that is whole beside four that are not, nearly all are computed again early."""
    assert kept(0, 4 * SAVED + AGAIN).is_early
    assert kept(0, 4 * SAVED + AGAIN - 1).is_early is False
    one, two = (len(kept(0, 4 * SAVED + AGAIN * more + SAVED).kept) for more in (1, 2))
    assert one <= 2 < two


def test_a_share_of_the_layers_is_kept_where_a_whole_micro_batch_has_no_room() -> None:
    """Beside a layer that is whole again, and the gradients of what is saved anyway, two layers have room here."""
    assert kept(0, 4 * SAVED + 0.9 * AGAIN) == Keeping(False, {(0, 0): 2, (0, 4): 2})


@pytest.mark.parametrize("room", [0.0, SAVED, 4 * SAVED])
def test_without_room_nothing_changes(room: float) -> None:
    assert kept(0, room) is NOTHING


def test_what_is_left_for_later_takes_room_as_it_was_measured() -> None:
    split = SPLIT_FAMILIES["zbh1"](2, 4)
    rooms = [100.0 * number for number in range(1, 40)]
    least = {
        deferred: next(r for r in rooms if len(kept(0, r, deferred, split).kept) == 4) for deferred in (1.0, 500.0)
    }
    assert least[500.0] >= least[1.0] + 400


def test_more_room_never_keeps_less() -> None:
    drawn = random.Random(0)
    schedules = [families.gpipe(4, 6), ONE_F_ONE_B, SPLIT_FAMILIES["zbh1"](4, 8), families.interleaved(2, 4, 2)]
    for schedule in schedules:
        for rank in range(schedule.num_ranks):
            rooms = sorted(drawn.uniform(0, 1500) for _ in range(20))
            for is_early in (False, True):
                found = [kept(rank, room, schedule=schedule) for room in rooms]
                counts = [sum(each.kept.values()) for each in found if each.is_early is is_early]
                # Layers are given up one by one, so what is left over may differ by one.
                assert all(more >= fewer - LAYERS for fewer, more in pairwise(counts))
            whole = kept(rank, MUCH, schedule=schedule)
            assert set(whole.kept.values()) == {LAYERS}


def test_shares_are_of_each_chunk() -> None:
    schedule, again = families.interleaved(2, 4, 2), dict.fromkeys((0, 1), Layers(AGAIN, LAYERS))
    found = Keeping(False, {(0, 0): LAYERS, (0, 1): 2, (1, 3): 1})
    assert kept_shares(found, schedule.orders[0], again) == {0: 6 / 16, 1: 1 / 16}
    assert kept_shares(NOTHING, schedule.orders[0], {}) == {}
