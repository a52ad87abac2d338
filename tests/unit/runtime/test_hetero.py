"""Which device of a stage counts, from what the ranks have measured."""

from __future__ import annotations

import pytest
import torch

from paceline.measure.profile_file import DeviceProfile, ItemProfile
from paceline.runtime.hetero import Shape, _devices, _Look, _memory
from support.expert_pipelines import model_config

EACH = 3 * 32 * 48
"""Parameters of an expert."""

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


@pytest.mark.parametrize(
    ("ranks", "elsewhere", "empty"), [(1, 0, 0), (2, 2 * EACH, 0), (3, 2 * EACH, 2 * EACH), (4, 3 * EACH, 0)]
)
def test_a_rank_has_a_share_of_the_experts(ranks: int, elsewhere: int, empty: int) -> None:
    """Three matrices each; the other items are whole."""
    items = [ItemProfile(f"{n}", "", 0.0, 0.0, 0, 0, 10**6) for n in range(5)]
    found = _memory(model_config("mixtral"), Shape(torch.float32, 1, 8), items, ranks)
    assert [item.elsewhere for item in found] == [0, elsewhere, elsewhere, elsewhere, 0]
    assert [item.empty for item in found] == [0, empty, empty, empty, 0]
    copied = [item.copied for item in _memory(model_config("mixtral"), Shape(torch.float32, 1, 8), items, ranks, 2)]
    assert copied == [0, *[2 * EACH if ranks > 1 else 0] * 3, 0]
