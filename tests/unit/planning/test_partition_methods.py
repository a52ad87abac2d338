"""Boundaries and weights by class name, over layers without a model."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning.partition_methods import by_work, by_work_of_devices, checked_boundaries, weights_by_class


def test_boundaries_that_fit() -> None:
    assert checked_boundaries((0, 1, 4), 4, 2) == [0, 1, 4]
    assert checked_boundaries([0, 4], 4, 1) == [0, 4]


@pytest.mark.parametrize(
    "boundaries",
    [[], [0], [0, 4], [0, 1, 2, 4], [1, 2, 4], [0, 2, 5], [0, 0, 4], [0, 4, 4], [0, 3.0, 4], [False, 1, 4]],
)
def test_boundaries_that_do_not(boundaries: list[int]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        checked_boundaries(boundaries, 4, 2, "the loaf")
    assert str(error.value) == (
        f"partition {boundaries} does not cut the loaf into 2 stages: give 3 rising boundaries from 0 to 4."
    )


def test_the_first_match_counts_in_any_case_and_anywhere() -> None:
    names = ["Embedding", "LlamaDecoderLayer", "Head", "lambda", ""]
    assert weights_by_class({"decoder": 1, "^HEAD$": 3, "d": 0.5}, names) == [0.5, 1, 3, 0.5, 0]
    assert weights_by_class({"": 2}, names) == [2] * 5
    with pytest.raises(ValueError, match=r"^partition weights \{'x': 1\} match no layer class with a weight; the "):
        weights_by_class({"x": 1}, names)
    with pytest.raises(ValueError, match=r"the classes are \['A', 'B'\]: correct the regular expressions\.$"):
        weights_by_class({"A": 0}, ["B", "A", "A"])


def test_no_work_is_even_work() -> None:
    assert by_work([0, 0, 0, 0], [1, 1]) == [0, 2, 4]
    assert by_work([0, 0, 0, 0], [3, 1]) == [0, 3, 4]


def test_a_stage_needs_a_layer() -> None:
    with pytest.raises(ValueError, match=r"^3 stages are more than the 2 layers: choose at most 2 stages\.$"):
        by_work([1, 1], [1, 1, 1])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_slowest_stage_is_as_fast_as_can_be(work: list[int], data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=len(work)))
    loads = work if any(work) else [1] * len(work)

    def slowest(cuts: list[int]) -> float:
        return max(sum(loads[a:b]) / speed for (a, b), speed in zip(pairwise(cuts), speeds, strict=True))

    every = [[0, *cuts, len(work)] for cuts in combinations(range(1, len(work)), len(speeds) - 1)]
    found = by_work(work, speeds)
    assert found in every
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_devices_with_several_stages_have_equal_sums() -> None:
    """A head as long as five layers: the stages beside it on its device get fewer."""
    work = [1.0] * 7 + [6.0]
    assert by_work(work, [1.0] * 4) == [0, 2, 4, 7, 8]  # in V the first device has eight layers' work, the other five
    assert by_work_of_devices(work, (0, 1, 1, 0)) == [0, 1, 4, 7, 8]
    assert by_work_of_devices(work, (0, 1, 0, 1)) == [0, 3, 4, 7, 8]
    assert by_work_of_devices([0.0] * 8, (0, 1, 1, 0)) == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="4 stages are more than the 3 layers"):
        by_work_of_devices([1.0] * 3, (0, 1, 1, 0))


@given(st.lists(st.integers(0, 9), min_size=4, max_size=9), st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1)]))
def test_no_device_gets_more_than_with_equal_stages(work: list[int], route: tuple[int, ...]) -> None:
    def most(cuts: list[int]) -> float:
        sums = [0.0, 0.0]
        for device, (first, end) in zip(route, pairwise(cuts), strict=True):
            sums[device] += sum(work[first:end])
        return max(sums)

    found = by_work_of_devices(work, route)
    assert (found[0], found[-1]) == (0, len(work))
    assert all(first < end for first, end in pairwise(found))
    assert most(found) <= most(by_work(work, [1.0] * 4))
