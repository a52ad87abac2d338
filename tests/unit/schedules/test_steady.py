"""Steps of the steady state, against closed forms, published numbers and the definition."""

from __future__ import annotations

import time
from random import Random

import pytest

from paceline.schedules.asynchronous import multidirection, one_direction
from paceline.schedules.costs import Costs, Link
from paceline.schedules.simulate import simulate
from paceline.schedules.steady import drained_s, period, steady


def uniform(num_stages, backward_s=2.0, transfer_s=0.0, latency_s=0.0):
    return Costs.uniform(num_stages, 1.0, backward_s, transfer_s, latency_s)


@pytest.mark.parametrize("num_devices", [4, 8, 12, 16, 32])
@pytest.mark.parametrize("backward_s", [0.5, 1.0, 1.5, 2.0, 3.5])
def test_multidirection_period(num_devices, backward_s):
    """Per round of d micro-batches d(F+B) + (B−F), as published, where F ≤ B ≤ 2F; elsewhere a device waits longer."""
    idle = max(2 * (1 - backward_s), backward_s - 1, 2 * backward_s - 3)
    for rounds in (1, 2, 4) if num_devices <= 8 else (1,):
        found = steady(multidirection(num_devices, rounds * num_devices), uniform(num_devices, backward_s))
        busy = num_devices * (1 + backward_s)
        assert found.period_s == pytest.approx(rounds * (busy + idle), rel=1e-12)
        assert found.busy_s == (rounds * busy,) * num_devices
        assert found.idle_s == pytest.approx([rounds * idle] * num_devices, rel=1e-9)


@pytest.mark.parametrize(("num_devices", "bubble"), [(4, 0.077), (8, 0.040), (16, 0.020)])
def test_published_bubbles(num_devices, bubble):
    found = steady(multidirection(num_devices, num_devices), uniform(num_devices))
    assert found.bubble_fraction == pytest.approx(bubble, abs=5e-4)


def test_published_bubbles_with_slow_links():
    for num_devices in (4, 8):
        found = steady(multidirection(num_devices, num_devices), uniform(num_devices, transfer_s=0.5))
        assert 0.22 < found.bubble_fraction < 0.245


def test_two_devices_have_no_bubble():
    assert steady(multidirection(2, 4), uniform(2)).period_s == 4 * 3.0


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 4), (2, 1), (4, 1), (4, 3), (8, 2), (16, 20)])
def test_one_direction_never_waits(stages, micro_batches):
    found = steady(one_direction(stages, micro_batches), uniform(stages))
    assert found.period_s == pytest.approx(micro_batches * 3.0, rel=1e-12)
    assert found.bubble_fraction == pytest.approx(0, abs=1e-12)
    assert found.first_s == (micro_batches + stages - 1) * 3.0


@pytest.mark.parametrize("stream", [multidirection(4, 8), multidirection(8, 8), one_direction(4, 2)])
def test_memory_is_that_of_the_run(stream):
    stages = stream.num_ranks
    costs = Costs((1.0,) * stages, (2.0,) * stages, activation_bytes=(3.0,) * stages, fixed_bytes=(5.0,) * stages)
    found = steady(stream, costs)
    run = simulate(stream.unrolled(6), costs)
    assert found.peak_activations == run.peak_activations
    assert found.peak_bytes == tuple(3.0 * peak + 5.0 for peak in run.peak_activations)


def test_what_a_step_costs_besides_is_added():
    costs = Costs((1.0,) * 4, (2.0,) * 4, step_s=0.5)
    found = steady(multidirection(4, 4), costs)
    assert (found.period_s, found.first_s, found.busy_s[0]) == (13.5, 16.5, 12.5)


def random_costs(random, stages):
    links = tuple(Link(random.choice((0.5, 1.0, 2.0)), random.randrange(0, 8) / 8) for _ in range(stages - 1))
    shared = random.random() < 0.3
    return Costs(
        tuple(random.randrange(4, 24) / 8 for _ in range(stages)),
        tuple(random.randrange(4, 24) / 8 for _ in range(stages)),
        (1.0,) * (stages - 1),
        links,
        links,
        hosts=tuple(rank // 2 for rank in range(stages)) if shared else (),
        egress_bytes_per_s=(1.5,) * stages if shared else (),
    )


@pytest.mark.parametrize("seed", range(12))
def test_is_the_rate_of_a_long_run(seed):
    random = Random(seed)
    stages = random.choice((4, 8))
    costs = random_costs(random, stages)
    for stream in (multidirection(stages, stages), one_direction(stages, 3)):
        lengths = 40, 80
        ends = [simulate(stream.unrolled(length), costs).makespan_s for length in lengths]
        assert period(stream, costs) == pytest.approx((ends[1] - ends[0]) / 40, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_rounds_add_up(seed):
    """The order of a run does not depend on how many rounds, or micro-batches, a step has."""
    costs = random_costs(Random(seed), 4)
    one = period(multidirection(4, 4), costs)
    assert period(multidirection(4, 12), costs) == pytest.approx(3 * one, rel=1e-9)
    one = period(one_direction(4, 2), costs)
    assert period(one_direction(4, 6), costs) == pytest.approx(3 * one, rel=1e-9)


def test_costs_nothing():
    found = steady(multidirection(4, 4), Costs((0.0,) * 4, (0.0,) * 4))
    assert (found.period_s, found.bubble_fraction) == (0.0, 0.0)


def test_costs_must_fit():
    with pytest.raises(ValueError, match="the costs are of 3 stages and the schedule has 4"):
        steady(multidirection(4, 4), uniform(3))


def test_is_quick():
    begin = time.process_time()
    steady(multidirection(32, 64), uniform(32))
    assert time.process_time() - begin < 10  # 0.9 s of one core


def test_a_drain_costs_the_bubble_that_a_flush_has() -> None:
    """(S−1)(F+B), of which the stream has nothing."""
    assert drained_s(one_direction(4, 8), Costs.uniform(4, 1.0, 2.0)) == pytest.approx(3 * 3.0)
