"""Room for activations that are kept, and for those that are computed again before their gradient arrives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn

from paceline.measure.clock import Clock
from paceline.runtime.early_room import NOTHING, EarlyRoom, Extent, Keeping, Recomputed, keeping
from paceline.runtime.meter import Meter
from paceline.schedules import families
from paceline.schedules.lower import (
    RUN_BACKWARD,
    RUN_BACKWARD_INPUT,
    RUN_BACKWARD_WEIGHT,
    RUN_FORWARD,
    WAIT_GRADIENT,
    Op,
    lower,
)
from paceline.schedules.split_families import SPLIT_FAMILIES

SIZE, SAVED, LAYERS, LAYER = 2, 10.0, 4, 25.0
AGAIN = LAYERS * LAYER
MEASURED = Extent(tokens=32, length=16)
STAGES = lower(families.one_f_one_b(4, 8))
ALL = {(0, number): LAYERS for number in range(8)}
MUCH = 1e9


def metered() -> Meter:
    device = torch.device("cpu")
    meter = Meter(Clock(device), nn.Identity(), device)
    meter.measures_memory_of = SIZE
    meter.saved_bytes[SIZE] = {0: SAVED}
    meter.recomputed(AGAIN, MEASURED, 0, LAYERS)
    return meter


def kept(program: Sequence[Op], room: float, deferred: float = SAVED, chunks: int = 1) -> Keeping:
    of_chunks = range(chunks)
    again = {chunk: Recomputed(MEASURED, AGAIN, LAYERS) for chunk in of_chunks}
    saved, later = dict.fromkeys(of_chunks, SAVED), dict.fromkeys(of_chunks, deferred)
    found = keeping(program, saved, later, again, room)
    if found != NOTHING:
        assert_fits(program, room, found, deferred)
    return found


def assert_fits(program: Sequence[Op], room: float, found: Keeping, deferred: float) -> None:
    """Count the bytes again, at each moment at which something is there that need not be."""
    waited = {(op.chunk, op.micro_batch) for op in program if op.kind == WAIT_GRADIENT}
    alive, later = dict[tuple[int, int], float](), 0.0
    for kind, number, chunk, _ in program:
        cell, beside = (chunk, number), 0.0
        layers = found.kept.get(cell, 0)
        if kind == RUN_FORWARD:
            alive[cell] = SAVED + LAYER * layers
        is_backward = kind in (RUN_BACKWARD, RUN_BACKWARD_INPUT)
        if is_backward:
            left = LAYERS - layers
            beside = LAYER * (left if found.is_early and cell in waited else min(left, 1)) + SAVED * (layers > 0)
        if (is_backward and found.is_early and cell in waited) or any(found.kept.get(each) for each in alive):
            assert sum(alive.values()) + later + beside <= room + 1e-6
        if is_backward:
            del alive[cell]
        later += {RUN_BACKWARD_INPUT: deferred, RUN_BACKWARD_WEIGHT: -deferred}.get(kind, 0.0)


def test_all_that_has_room_is_kept() -> None:
    """The first stage of four has four micro-batches at a time, and the gradients of what one keeps anyway."""
    need = 4 * (SAVED + AGAIN) + SAVED
    assert kept(STAGES[0], need) == Keeping(True, ALL)
    fewer = kept(STAGES[0], need - 1)
    assert fewer.is_early
    assert 0 < sum(fewer.kept.values()) < sum(ALL.values())


def test_the_last_stage_needs_room_for_one_micro_batch() -> None:
    assert kept(STAGES[3], 2 * SAVED + AGAIN) == Keeping(True, ALL)


@pytest.mark.parametrize(
    ("layers", "room"), [(0, 2 * SAVED + 2 * LAYER - 1), (1, 2 * SAVED + 2 * LAYER), (3, 2 * SAVED + 4 * LAYER)]
)
def test_a_stage_that_waits_for_nobody_keeps_as_many_layers_as_it_can(layers: int, room: float) -> None:
    """The others are whole again one at a time: room for all four layers is room for three and that one."""
    expected = dict.fromkeys(ALL, layers) if layers < 3 else ALL
    assert kept(STAGES[3], room).kept == ({} if not layers else expected)


def test_what_is_computed_again_early_has_room_first() -> None:
    """With room for one micro-batch that is whole beside four that are not, nearly all are computed again early."""
    assert kept(STAGES[0], 4 * SAVED + AGAIN).is_early
    assert kept(STAGES[0], 4 * SAVED + AGAIN - 1).is_early is False
    one, two = (len(kept(STAGES[0], 4 * SAVED + AGAIN * more + SAVED).kept) for more in (1, 2))
    assert one <= 2 < two


def test_a_share_of_the_layers_is_kept_where_a_whole_micro_batch_has_no_room() -> None:
    """Beside a layer that is whole again, and the gradients of what is saved anyway, two layers have room here."""
    assert kept(STAGES[0], 4 * SAVED + 0.9 * AGAIN) == Keeping(False, {(0, 0): 2, (0, 4): 2})


@pytest.mark.parametrize("room", [0.0, SAVED, 4 * SAVED])
def test_without_room_nothing_changes(room: float) -> None:
    assert kept(STAGES[0], room) is NOTHING


def test_what_is_left_for_later_takes_room_as_it_was_measured() -> None:
    program = lower(SPLIT_FAMILIES["zbh1"](2, 4))[0]
    rooms = [100.0 * number for number in range(1, 40)]
    least = {deferred: next(r for r in rooms if len(kept(program, r, deferred).kept) == 4) for deferred in (1.0, 500.0)}
    assert least[500.0] >= least[1.0] + 400


def test_more_room_never_keeps_less() -> None:
    drawn = random.Random(0)
    programs = [(lower(families.gpipe(4, 6)), 1), (lower(families.one_f_one_b(4, 8)), 1)]
    programs += [(lower(SPLIT_FAMILIES["zbh1"](4, 8)), 1), (lower(families.interleaved(2, 4, 2)), 2)]
    for stages, chunks in programs:
        for program in stages:
            rooms = sorted(drawn.uniform(0, 1500) for _ in range(20))
            for is_early in (False, True):
                found = [kept(program, room, chunks=chunks) for room in rooms]
                counts = [sum(each.kept.values()) for each in found if each.is_early is is_early]
                # Layers are given up one by one, so what is left over may differ by one.
                assert all(more >= fewer - LAYERS for fewer, more in pairwise(counts))
            whole = kept(program, MUCH, chunks=chunks)
            assert set(whole.kept.values()) == {LAYERS}


@pytest.mark.parametrize(("most", "factor"), [(Extent(64, 16), 2), (Extent(64, 32), 4), (Extent(8, 8), 1)])
def test_longer_micro_batches_need_more(most: Extent, factor: int) -> None:
    """Twice the tokens need twice as much; with twice the length each token also looks at twice as many."""
    need = factor * (4 * (SAVED + AGAIN) + SAVED)
    assert EarlyRoom(metered(), lambda: need).choose(STAGES[0], most) == Keeping(True, ALL)
    assert EarlyRoom(metered(), lambda: need - 1).choose(STAGES[0], most).kept != ALL


def test_what_was_decided_stays_until_more_is_needed() -> None:
    """Memory that is free at the moment is asked for once a size, so that steps of one size are alike."""
    asked: list[float] = []
    meter = metered()

    def room() -> float:
        asked.append(0.0)
        return MUCH

    early = EarlyRoom(meter, room)
    for most in (MEASURED, MEASURED, Extent(16, 8), Extent(64, 16), MEASURED, Extent(60, 16), Extent(64, 16)):
        assert early.choose(STAGES[0], most).kept == ALL
    assert len(asked) == 2
    assert early.choose(lower(families.gpipe(4, 8))[0], MEASURED).kept == ALL, "another schedule"
    assert len(asked) == 3
    early = EarlyRoom(meter, lambda: asked.append(0.0) or 0.0)
    assert [early.choose(STAGES[0], MEASURED) for _ in range(2)] == [NOTHING] * 2
    assert len(asked) == 5, "room that is not there now may be there later"


def test_nothing_is_kept_before_it_is_known_what_that_takes_or_while_layers_are_timed() -> None:
    def choice(meter: Meter) -> Keeping:
        return EarlyRoom(meter, lambda: MUCH).choose(STAGES[0], MEASURED)

    assert choice(metered()).kept
    fresh = metered()
    fresh.forget_stage()
    assert choice(fresh) is NOTHING
    other = metered()
    other.measures_memory_of = SIZE + 1
    assert choice(other) is NOTHING
    timed = metered()
    timed._layer_timers.append(None)  # type: ignore[arg-type]
    assert choice(timed) is NOTHING
