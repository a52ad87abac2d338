"""Exchanges of experts: as even as a placement from nothing, with a few moves."""

from __future__ import annotations

import random
import statistics
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from paceline.planning.experts import Placement, device_loads, imbalance, moved
from paceline.planning.placement import greedy
from paceline.planning.swaps import GOOD_ENOUGH, swapped

TRACE = Path(__file__).parents[2] / "golden" / "moe_trace.npz"


def drawn(seed: int, num_experts: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.lognormvariate(0, 1) for _ in range(num_experts)]


def test_one_exchange_is_made_where_one_is_enough() -> None:
    current = Placement.contiguous(4, 2)
    found = swapped([5.0, 4.0, 1.0, 2.0], current)
    assert device_loads(found, [5.0, 4.0, 1.0, 2.0]) == (6.0, 6.0)
    assert moved(current, found) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_single_exchange_is_left_that_helps(seed: int) -> None:
    """Tried one by one; and the load is never more than it was."""
    loads, current = drawn(seed, 12), Placement.contiguous(12, 4)
    found = swapped(loads, current)
    most = max(device_loads(found, loads))
    assert most <= max(device_loads(current, loads))
    assert sorted(expert for own in found.devices for expert in own) == list(range(12))
    assert all(len(own) == 3 for own in found.devices)
    for a, b in permutations(range(12), 2):
        other = {a: b, b: a}
        changed = Placement(tuple(tuple(other.get(e, e) for e in own) for own in found.devices), found.owned)
        assert max(device_loads(changed, loads)) >= most * (1 - GOOD_ENOUGH) - 1e-12


def test_free_slots_are_used() -> None:
    """Five experts on two devices of three slots."""
    current = Placement(((0, 1, 2), (3, 4)), (3, 2))
    found = swapped([3.0, 3.0, 3.0, 1.0, 1.0], current)
    assert device_loads(found, [3.0, 3.0, 3.0, 1.0, 1.0]) == (6.0, 5.0)
    assert moved(current, found) == 1


def test_experts_stay_in_their_node() -> None:
    loads = [9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    current = Placement.contiguous(8, 4)
    found = swapped(loads, current, nodes=2)
    assert [device // 2 for device in found.owners] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert device_loads(found, loads) == (10.0, 10.0, 2.0, 2.0)


def test_what_is_even_stays() -> None:
    current = Placement.contiguous(8, 4)
    assert swapped([1.0] * 8, current) == current
    assert swapped([0.0] * 8, current) == current
    # The exchange that is left gains a thousandth.
    assert swapped([1.0, 1.0, 1.0, 0.998], Placement.contiguous(4, 2)) == Placement.contiguous(4, 2)


def test_wrong_placements_are_refused() -> None:
    with pytest.raises(ValueError, match="the current placement is of 4 experts"):
        swapped([1.0] * 8, Placement.contiguous(4, 2))


@pytest.mark.parametrize("devices", [4, 8])
def test_a_real_run_is_as_even_with_a_third_of_the_moves(devices: int) -> None:
    """Every hundred iterations of the recorded run, by the loads before."""
    with np.load(TRACE) as trace:
        layers = trace["loads"].transpose(1, 0, 2).tolist()
    evenness: dict[str, list[float]] = {"greedy": [], "swaps": []}
    moves = {"greedy": 0, "swaps": 0}
    for samples in layers:
        placed = dict.fromkeys(evenness, Placement.contiguous(len(samples[0]), devices))
        for index, loads in enumerate(samples[1:], 1):
            if index % 10 == 0:
                known = samples[index - 1]
                new = {
                    "greedy": greedy(known, devices, current=placed["greedy"]),
                    "swaps": swapped(known, placed["swaps"]),
                }
                for name in moves:
                    moves[name] += moved(placed[name], new[name])
                placed = new
            for name, placement in placed.items():
                evenness[name].append(imbalance(placement, loads))
    means = {name: statistics.fmean(values) for name, values in evenness.items()}
    assert means["swaps"] <= means["greedy"] * 1.005
    assert moves["swaps"] <= moves["greedy"] / 3
