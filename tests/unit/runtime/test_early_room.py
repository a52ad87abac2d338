"""Steps whose activations have room: what is decided before each of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.measure.clock import Clock
from paceline.planning.strategy_costs import UNEVEN
from paceline.runtime.early_room import EarlyRoom, Extent
from paceline.runtime.meter import Meter
from paceline.schedules import families
from paceline.schedules.keeping import NOTHING, Keeping
from paceline.schedules.lower import lower

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


def chosen(early: EarlyRoom, meter: Meter, most: Extent) -> tuple[Keeping, dict[int, float]]:
    """Choice of the last stage in a step, and the shares that are recorded with its times."""
    meter.recorder.begin()
    found = early.choose(STAGES[3], most)
    meter.recorder.end()
    return found, meter.recorder.steps()[-1].kept_shares


@pytest.mark.parametrize("is_much", [False, True])
def test_what_much_longer_micro_batches_need_is_measured_if_it_matters(is_much: bool) -> None:
    """They may need less than it seems: whether it grows with the square of their length depends on the attention."""
    meter, most = metered(), Extent(32, 24 if is_much else 23)
    room = 4 * (SAVED + AGAIN) + SAVED
    assert EarlyRoom(meter, lambda: 2 * room).choose(STAGES[0], most).kept == ALL
    assert not meter.lacks_memory_of(0, splits=False, recomputes=True)
    found = EarlyRoom(meter, lambda: room).choose(STAGES[0], most)
    assert (found is NOTHING) == is_much
    assert meter.lacks_memory_of(0, splits=False, recomputes=True) == is_much


def test_steps_alike_are_measured_once() -> None:
    """Micro-batches of as many tokens, few long samples or many short ones: the measured one is not the longest."""
    meter, most = metered(), Extent(32, 64)
    early = EarlyRoom(meter, lambda: 6 * (SAVED + AGAIN))
    assert early.choose(STAGES[0], most) is NOTHING
    assert meter.lacks_memory_of(0, splits=False, recomputes=True)
    for _ in range(2):
        meter.saved_bytes[SIZE] = {0: SAVED}
        meter.recomputed(AGAIN, MEASURED, 0, LAYERS)
        assert early.choose(STAGES[0], most).kept
        assert not meter.lacks_memory_of(0, splits=False, recomputes=True)


@pytest.mark.parametrize(("most", "factor"), [(Extent(64, 16), 2), (Extent(64, 32), 4), (Extent(8, 8), 0.25)])
def test_longer_micro_batches_need_more(most: Extent, factor: float) -> None:
    """Twice the tokens need twice as much; with twice the length each token also looks at twice as many. What shorter
    ones than those that were measured need falls with their tokens: a long one that came once is long past."""
    need = factor * (4 * (SAVED + AGAIN) + SAVED)
    assert EarlyRoom(metered(), lambda: need).choose(STAGES[0], most) == Keeping(True, ALL)
    assert EarlyRoom(metered(), lambda: need - 1).choose(STAGES[0], most).kept != ALL, "some of it, or it is measured"


def test_it_is_known_how_much_is_kept_in_how_much_room() -> None:
    """For the tuner. The last stage has one micro-batch at a time; half of what twice as long ones have is theirs."""
    meter = metered()
    assert chosen(EarlyRoom(meter, lambda: 2 * MUCH), meter, Extent(64, 16))[1] == {0: 1.0}
    assert meter.again_room_bytes == MUCH
    assert chosen(EarlyRoom(meter, lambda: 2 * SAVED + 2 * LAYER), meter, MEASURED)[1] == {0: 0.25}
    assert chosen(EarlyRoom(meter, lambda: 0.0), meter, MEASURED)[1] == {0: 0.0}
    meter.forget_stage()
    assert chosen(EarlyRoom(meter, lambda: MUCH), meter, MEASURED)[1] == {}, "a step that measures it keeps nothing"


def test_ranks_whose_layers_are_collective_keep_all_or_nothing_together() -> None:
    """Each is asked in each step, also while it does not know what it takes. Experts may be busier in a later step."""
    all_of_it = 2 * SAVED + AGAIN
    for others in (True, False):
        asked = list[bool]()

        def agree(wants: bool, others: bool = others) -> bool:
            asked.append(wants)  # noqa: B023
            return wants and others

        meter = metered()
        rooms = iter((UNEVEN * all_of_it, UNEVEN * all_of_it - 1))
        early = EarlyRoom(meter, lambda: next(rooms), agree=agree)  # noqa: B023
        found, shares = chosen(early, meter, MEASURED)
        assert found.kept == (ALL if others else {})
        assert shares == {0: float(others)}
        found, shares = chosen(early, meter, Extent(32, 17))
        assert found is NOTHING, "too long"
        assert shares == {0: 0.0}
        meter.forget_stage()
        assert early.choose(STAGES[3], MEASURED) is NOTHING
        assert asked == [True, False, False]
        assert meter.keeps_all_or_nothing


def test_one_line_says_how_much_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    for logs in (False, True):
        early = EarlyRoom(metered(), lambda: 2 * SAVED + 2 * LAYER, logs=logs)
        for most in (MEASURED, Extent(16, 8)):
            early.choose(STAGES[3], most)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "memory for 25 %" in line
    assert "PACELINE_RECOMPUTE_EARLY=0" in line


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
    own_checkpoints = metered()
    own_checkpoints.recomputed(0.0, MEASURED, 0)
    assert choice(own_checkpoints) is NOTHING
    timed = metered()
    timed._layer_timers.append(None)  # type: ignore[arg-type]
    assert choice(timed) is NOTHING
