"""Which device of a stage counts, from what the ranks have measured."""

from __future__ import annotations

import pytest

from paceline.measure.profile_file import DeviceProfile
from paceline.runtime.hetero import _devices, _Look

GIB = 1 << 30


def look(seconds: float, free_bytes: int = 8 * GIB) -> _Look:
    return _Look(DeviceProfile("a device", 1.0, 16 * GIB, free_bytes), "a host", seconds)


def test_a_stage_is_as_fast_as_its_slowest_replica_and_has_the_room_of_the_fullest() -> None:
    """Rank = 2 * stage + replica. Speeds are relative to rank 0's."""
    first, second = _devices([look(1.0), look(1.0), look(1.0, 3 * GIB), look(4.0)], 2, None)
    assert (first.speed, second.speed) == (1.0, pytest.approx(0.25))
    assert (first.free_bytes, second.free_bytes) == (8 * GIB, 3 * GIB)


def test_rank_0_may_be_one_of_the_slow_ones() -> None:
    first, second = _devices([look(2.0), look(1.0), look(1.0), look(1.0)], 2, None)
    assert (first.speed, second.speed) == (1.0, pytest.approx(2.0))
