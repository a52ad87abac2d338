"""Room for activations that are computed again before their gradient arrives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.measure.clock import Clock
from paceline.runtime.early_room import EarlyRoom, Extent, peak_bytes
from paceline.runtime.meter import Meter
from paceline.schedules import families
from paceline.schedules.lower import Op, lower
from paceline.schedules.split_families import SPLIT_FAMILIES

SIZE, SAVED, AGAIN = 2, 10.0, 100.0
MEASURED = Extent(tokens=32, length=16)
PROGRAM = lower(families.one_f_one_b(4, 8))[0]


def metered() -> Meter:
    device = torch.device("cpu")
    meter = Meter(Clock(device), nn.Identity(), device)
    meter.measures_memory_of = SIZE
    meter.saved_bytes[SIZE] = {0: SAVED}
    meter.recomputed(AGAIN, MEASURED, 0)
    return meter


@pytest.mark.parametrize(
    ("program", "peak"),
    [
        (lower(families.one_f_one_b(4, 8))[0], 4 * SAVED),
        (lower(families.one_f_one_b(4, 8))[3], SAVED),
        (lower(families.gpipe(4, 8))[2], 8 * SAVED),
        (lower(SPLIT_FAMILIES["zbh1"](4, 8))[0], 4 * SAVED),
    ],
    ids=["first stage", "last stage", "gpipe", "split"],
)
def test_what_is_alive_at_a_time(program: tuple[Op, ...], peak: float) -> None:
    assert peak_bytes(program, {0: SAVED}, {}) == peak


def test_what_is_left_for_later_counts_as_it_was_measured() -> None:
    program = lower(SPLIT_FAMILIES["zbh1"](2, 4))[0]
    assert peak_bytes(program, {0: 1.0}, {0: 50.0}) == 1.0 + 50.0


@pytest.mark.parametrize(("room", "suffices"), [(140.0, True), (139.0, False)])
def test_live_micro_batches_leave_room_or_not(room: float, suffices: bool) -> None:
    assert EarlyRoom(metered(), lambda: room).suffices(PROGRAM, MEASURED) is suffices


def test_longer_micro_batches_need_more() -> None:
    """Twice the tokens need twice as much; with twice the length each token also looks at twice as many."""
    for most, need in ((Extent(64, 16), 280.0), (Extent(64, 32), 560.0), (Extent(8, 8), 140.0)):
        assert EarlyRoom(metered(), lambda: need).suffices(PROGRAM, most), need  # noqa: B023
        assert not EarlyRoom(metered(), lambda: need - 1).suffices(PROGRAM, most), need  # noqa: B023


def test_what_is_kept_from_the_forward_on_is_there_beside_the_gradients_of_logits() -> None:
    program, kept = lower(families.one_f_one_b(4, 8))[3], {(0, micro_batch) for micro_batch in range(8)}
    assert EarlyRoom(metered(), lambda: SAVED + AGAIN).suffices(program, MEASURED)
    assert not EarlyRoom(metered(), lambda: SAVED + AGAIN).suffices(program, MEASURED, kept)
    assert EarlyRoom(metered(), lambda: 2 * SAVED + AGAIN).suffices(program, MEASURED, kept)


@pytest.mark.parametrize(
    ("count", "need"), [(0, 8 * SAVED + AGAIN), (1, 9 * SAVED + 2 * AGAIN), (8, 9 * SAVED + 8 * AGAIN)]
)
def test_each_micro_batch_that_is_kept_needs_room(count: int, need: float) -> None:
    """Eight are alive at once; those that are not kept are recomputed one at a time."""
    program, kept = lower(families.gpipe(4, 8))[3], {(0, micro_batch) for micro_batch in range(count)}
    assert EarlyRoom(metered(), lambda: need).suffices(program, MEASURED, kept)
    assert not EarlyRoom(metered(), lambda: need - 1).suffices(program, MEASURED, kept)


def test_the_device_is_asked_again_only_where_more_is_needed() -> None:
    asked: list[float] = []
    meter = metered()

    def room() -> float:
        asked.append(0.0)
        return 1e6

    early = EarlyRoom(meter, room)
    for most in (MEASURED, MEASURED, Extent(16, 8), Extent(64, 16), MEASURED, Extent(64, 16)):
        assert early.suffices(PROGRAM, most)
    assert len(asked) == 2
    assert early.suffices(lower(families.gpipe(4, 8))[0], MEASURED), "another schedule"
    assert len(asked) == 3


def test_nothing_is_early_before_it_is_known_what_it_keeps_or_while_layers_are_timed() -> None:
    def early(meter: Meter) -> bool:
        return EarlyRoom(meter, lambda: 1e9).suffices(PROGRAM, MEASURED)

    assert early(metered())
    fresh = metered()
    fresh.forget_stage()
    assert not early(fresh)
    other = metered()
    other.measures_memory_of = SIZE + 1
    assert not early(other)
    timed = metered()
    timed._layer_timers.append(None)  # type: ignore[arg-type]
    assert not early(timed)
