"""Blocks out of layers: as many as asked for, about equal, never cut inside a run."""

import re
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning import merge

WEIGHTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 6.0]), min_size=1, max_size=20)
RUNS = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 4)), max_size=3)


@given(WEIGHTS, st.integers(1, 12), RUNS)
def test_as_many_blocks_as_there_are_places_for(weights, num_blocks, runs):
    together = [(first, min(first + more, len(weights) - 1)) for first, more in runs if first < len(weights)]
    places = [place for place in range(len(weights) + 1) if not any(first < place <= last for first, last in together)]
    boundaries = merge(weights, num_blocks, together=together)
    assert (boundaries[0], boundaries[-1]) == (0, len(weights))
    assert all(first < end for first, end in pairwise(boundaries))
    assert set(boundaries) <= set(places)
    assert len(boundaries) - 1 == min(num_blocks, len(places) - 1)


@pytest.mark.parametrize(("num_layers", "num_blocks"), [(24, 6), (100, 40), (26, 24), (7, 3), (5, 5)])
def test_equal_layers_make_blocks_that_differ_by_one_layer(num_layers, num_blocks):
    boundaries = merge([0.1] * num_layers, num_blocks)
    sizes = {end - first for first, end in pairwise(boundaries)}
    assert sizes <= {num_layers // num_blocks, -(-num_layers // num_blocks)}


def test_a_heavy_layer_is_a_block_and_the_rest_is_shared_out():
    assert merge([1] * 8 + [12], 5) == [0, 2, 4, 6, 8, 9]
    assert merge([12] + [1] * 8, 5) == [0, 1, 3, 5, 7, 9]


def test_runs_that_stay_together():
    assert merge([1] * 6, 6, together=[(1, 2), (2, 3)]) == [0, 1, 4, 5, 6]
    assert merge([1] * 6, 2, together=[(0, 5)]) == [0, 6]
    assert merge([1] * 6, 2, together=[(3, 3)]) == [0, 3, 6]


@pytest.mark.parametrize(
    ("weights", "num_blocks", "together", "message"),
    [
        ([], 1, [], "there are no layers: give one weight at least."),
        ([1.0], 0, [], "num_blocks=0 must be 1 or more."),
        ([1.0, -1.0], 1, [], "weights[1] is -1.0: give a number from 0 upwards."),
        ([nan], 1, [], "weights[0] is nan: give a number from 0 upwards."),
        ([inf], 1, [], "weights[0] is inf: give a number from 0 upwards."),
        ([1.0] * 3, 1, [(1, 3)], "(1, 3) is no run of 3 layers: give the first and the last, from 0 to 2."),
        ([1.0] * 3, 1, [(2, 1)], "(2, 1) is no run of 3 layers"),
        ([1.0] * 3, 1, [(-1, 1)], "(-1, 1) is no run of 3 layers"),
    ],
)
def test_what_cannot_be(weights, num_blocks, together, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        merge(weights, num_blocks, together=together)
