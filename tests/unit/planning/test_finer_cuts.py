"""Whether cuts within decoder layers, or through the head, make stages more alike."""

from __future__ import annotations

import pytest

from paceline.planning.finer_cuts import halves_may_gain, slices_may_gain


@pytest.mark.parametrize(
    ("seconds", "stages", "halves", "slices"),
    [
        ([0.0, *[1.0] * 4, 0.0], 2, False, False),  # two layers each
        ([0.0, *[1.0] * 3, 0.0], 2, True, False),  # two and one
        ([0.0, *[1.0] * 3, 5.0], 2, False, True),  # three layers and a head of five: four each
        ([0.0, *[1.0] * 3, 2.0], 2, True, False),  # three and two: the larger one is without the head
        ([0.0, *[1.0] * 3, 5.0], 1, False, False),
        ([0.0, *[1.0] * 3, 5.0], 4, False, False),  # more stages than whole layers
    ],
)
def test_what_may_gain(seconds: list[float], stages: int, halves: bool, slices: bool) -> None:
    assert halves_may_gain(seconds, stages) == halves
    assert slices_may_gain(seconds, stages) == slices


def test_stages_of_several_chunks_do_not_share_the_head() -> None:
    assert slices_may_gain([0.0, *[1.0] * 4, 5.0], 2)
    assert not slices_may_gain([0.0, *[1.0] * 4, 5.0], 2, 2)
