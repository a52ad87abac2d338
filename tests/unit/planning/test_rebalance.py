"""Which layers are placed anew, and that it is worth what it takes."""

from __future__ import annotations

import pytest

from paceline.planning.experts import Placement, device_loads
from paceline.planning.rebalance import LayerLoad, Times, candidates, num_copies, overheads, propose, step_saved_s

CONTIGUOUS = Placement.contiguous(8, 4)
SKEWED = (90.0, 80.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0)
EVEN = (10.0,) * 8
FREE = Times(row_s=1e-3, bytes_per_s=1e12, fixed_s=0.0, expert_s=0.0)


def seconds(placement: Placement, loads: tuple[float, ...]) -> float:
    return max(device_loads(placement, loads)) * FREE.row_s


def test_a_skewed_layer_is_placed_anew_and_an_even_one_is_not() -> None:
    layers = [LayerLoad(EVEN, CONTIGUOUS, 1.0), LayerLoad(SKEWED, CONTIGUOUS, 1.0)]
    found = propose(layers, FREE, horizon_steps=10)
    assert list(found.placements) == [1]
    assert found.now_s == pytest.approx(0.02 + 0.17)
    assert found.best_s == pytest.approx(0.02 + seconds(found.placements[1], SKEWED))
    assert found.best_s == pytest.approx(0.02 + 0.1)  # the hottest, and one beside it


def test_what_is_best_already_stays() -> None:
    layer = LayerLoad(SKEWED, CONTIGUOUS, 1.0)
    best = propose([layer], FREE, horizon_steps=10).placements[0]
    again = propose([LayerLoad(SKEWED, best, 1.0)], FREE, horizon_steps=10)
    assert (again.placements, again.switch_s, again.best_s) == ({}, 0.0, again.now_s)


@pytest.mark.parametrize("num_replicas", [0, 1])
def test_a_device_may_own_fewer_than_it_has_room_for(num_replicas: int) -> None:
    layer = LayerLoad((80.0, 10.0, 10.0, 10.0, 10.0), Placement.contiguous(5, 3), 1.0)
    assert seconds(layer.placement, layer.loads) == pytest.approx(0.09)
    found = candidates(layer, num_replicas=num_replicas)
    assert min(seconds(placement, layer.loads) for placement in found) <= 0.08  # alone, or with copies
    for placement in found:
        assert max(placement.owned) <= 2
        copied = [len(held) - own for held, own in zip(placement.devices, placement.owned, strict=True)]
        assert max(copied) <= num_replicas


def test_a_small_gain_is_none() -> None:
    nearly = (10.1, 10.0, 10.0, 10.0, 10.0, 10.0, 9.95, 9.95)
    assert propose([LayerLoad(nearly, CONTIGUOUS, 0.0)], FREE, horizon_steps=1000).placements == {}


def test_a_small_gain_of_a_placement_that_others_found_is_none() -> None:
    """The search leaves out layers with little to gain; a placement of it may still gain little."""
    loads = (90.0, 80.0, 79.0, 89.0, 10.0, 10.0, 10.0, 10.0)
    swapped = Placement(((0, 2), (1, 3), (4, 5), (6, 7)))  # 169 instead of 170
    assert seconds(swapped, loads) < seconds(CONTIGUOUS, loads)
    layer = LayerLoad(loads, CONTIGUOUS, 0.0)
    assert propose([layer], FREE, horizon_steps=1000, found=[[swapped]]).placements == {}


def test_layers_that_do_not_pay_stay_out_while_others_do() -> None:
    dear = Times(row_s=1e-3, bytes_per_s=1.0, fixed_s=0.3, expert_s=0.01)
    layers = [LayerLoad(SKEWED, CONTIGUOUS, 1e-3), LayerLoad(SKEWED, CONTIGUOUS, 100.0)]
    found = propose(layers, dear, horizon_steps=10)
    assert list(found.placements) == [0]
    changed = [a != b for a, b in zip(CONTIGUOUS.owners, found.placements[0].owners, strict=True)]
    pairs = [p for p in zip(CONTIGUOUS.owners, found.placements[0].owners, strict=True) if p[0] != p[1]]
    busiest = max(max([pair[end] for pair in pairs].count(device) for device in range(4)) for end in range(2))
    assert found.switch_s == pytest.approx(0.3 + 0.01 * sum(changed) + busiest * 1e-3)
    # If no layer pays for itself in one period, all that gain are there: the loss may add up.
    layers = [LayerLoad(SKEWED, CONTIGUOUS, 100.0)] * 2
    found = propose(layers, dear, horizon_steps=10)
    assert list(found.placements) == [0, 1]
    assert found.switch_s > (found.now_s - found.best_s) * 10


def test_copies_come_first_without_moving_owners() -> None:
    """Copies alone even the devices out, and cost no move."""
    dear = Times(row_s=1e-3, bytes_per_s=1.0, fixed_s=0.0, expert_s=0.0)
    loads = (40.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0)
    found = propose([LayerLoad(loads, CONTIGUOUS, 1e6)], dear, num_replicas=1, horizon_steps=10)
    (placement,) = found.placements.values()
    assert placement.owners == CONTIGUOUS.owners
    assert num_copies(placement) > 0
    assert found.switch_s == 0
    assert found.best_s < found.now_s


def test_the_busiest_device_counts_by_where_it_sends() -> None:
    sent = [(0, 1), (0, 1), (1, 2), (3, 0)]
    times = Times(1.0, bytes_per_s=10.0, fixed_s=0.0, expert_s=0.0)
    assert times.sending_s(sent, 5.0, 4) == pytest.approx(2 * 5 / 10)
    assert times.sending_s([], 5.0, 4) == 0.0
    two = Times(1.0, 10.0, 0.0, 0.0, nodes=2, inside_bytes_per_s=1000.0)
    assert two.sending_s(sent, 5.0, 4) == pytest.approx(5 / 10)
    assert two.sending_s(sent[:2], 5.0, 4) == pytest.approx(2 * 5 / 1000)


def test_copies_cost_what_they_are_sent_in_each_step() -> None:
    """Over slow links experts that change places are better than copies, and copies are given up."""
    loads = (60.0, 40.0, 10.0, 10.0, 5.0, 5.0, 5.0, 5.0)
    slow = Times(row_s=1e-3, bytes_per_s=1e5, fixed_s=0.0, expert_s=0.0)
    free, dear = (LayerLoad(loads, CONTIGUOUS, 1.0, value_bytes=size) for size in (0.0, 3000.0))
    for layer, has_copies in ((free, True), (dear, False)):
        found = propose([layer], slow, num_replicas=1, horizon_steps=1000)
        assert (num_copies(found.placements[0]) > 0) == has_copies
        if has_copies:
            now = LayerLoad(loads, found.placements[0], 1.0, value_bytes=3000.0)
            (placement,) = propose([now], slow, num_replicas=1, horizon_steps=1000).placements.values()
            assert num_copies(placement) == 0


def test_where_a_node_is_enough_experts_and_copies_stay_in_it() -> None:
    loads = (30.0, 30.0, 10.0, 10.0, 30.0, 30.0, 10.0, 10.0)
    layer = LayerLoad(loads, CONTIGUOUS, 1e5, value_bytes=1e4)
    far = Times(1e-3, 1e6, 0.0, 0.0, nodes=2, inside_bytes_per_s=1e9)
    for replicas in (0, 1):
        found = propose([layer], far, num_replicas=replicas, horizon_steps=10).placements[0]
        for devices in ((0, 1), (2, 3)):
            here = {expert for device in devices for expert in found.devices[device]}
            assert here == {expert for device in devices for expert in CONTIGUOUS.devices[device]}, replicas


def test_a_node_that_is_not_enough_is_left() -> None:
    layer = LayerLoad((30.0, 30.0, 30.0, 30.0, 1.0, 1.0, 1.0, 1.0), CONTIGUOUS, 1.0)
    far = Times(1e-3, 1e6, 0.0, 0.0, nodes=2, inside_bytes_per_s=1e9)
    assert len(candidates(layer, nodes=2)) == 4
    found = propose([layer], far, horizon_steps=10)
    assert found.best_s == pytest.approx(31e-3)


def test_what_moving_takes_is_learned_from_moves() -> None:
    guess = (0.02, 1e-3)
    assert overheads([(10, 0.06)], guess) == pytest.approx((0.04, 2e-3))  # one move: all is twice as slow
    moves = [(number, 0.05 + number * 3e-3) for number in (5, 40, 90)]
    assert overheads(moves, guess) == pytest.approx((0.05, 3e-3))
    fixed_s, expert_s = overheads([(5, 0.2), (90, 0.1)], guess)  # a larger move took less: noise
    assert fixed_s / expert_s == pytest.approx(20)
    assert fixed_s + 47.5 * expert_s == pytest.approx(0.15)


def test_only_the_slowest_stage_shortens_the_step() -> None:
    busy = [4.0, 10.0, 4.0]
    assert step_saved_s(busy, [0.0, 2.0, 0.0], 1, 8) == pytest.approx(2.0)
    # The others are waited for once in a step: with one of eight micro-batches.
    assert step_saved_s(busy, [2.0, 0.0, 0.0], 0, 8) == pytest.approx(2.0 / 8)
    # The slowest one counts until another is slower: seven micro-batches at 4 instead of 10, and one at 1.
    assert step_saved_s(busy, [0.0, 9.0, 0.0], 1, 8) == pytest.approx(7 / 8 * 6.0 + 9.0 / 8)


def test_stages_that_are_equally_slow_count_if_all_of_them_save() -> None:
    busy = [10.0, 10.0]
    assert step_saved_s(busy, [2.0, 0.0], 0, 8) == pytest.approx(2.0 / 8)
    for stage in (0, 1):
        assert step_saved_s(busy, [2.0, 2.0], stage, 8) == pytest.approx(2.0)


def test_one_stage_alone_saves_what_it_saves() -> None:
    assert step_saved_s([3.0], [1.0], 0, 4) == pytest.approx(1.0)
    assert step_saved_s([3.0], [0.0], 0, 4) == 0.0
