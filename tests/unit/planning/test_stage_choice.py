"""Number of stages for a cluster: what the links and the memory allow, and what is trained, decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.planning.candidates import Candidate, candidates
from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.memory import ItemMemory, States
from paceline.planning.stage_choice import NEAR, Option, choose, predicted, scaled, slowdown, with_best_schedule
from paceline.planning.strategy import Dropped, Plan, plan_of
from paceline.planning.strategy_costs import pipeline_costs
from paceline.planning.strategy_shape import Strategy
from paceline.planning.strategy_times import item_times
from paceline.planning.workload import Item, Workload
from paceline.schedules.simulate import simulate

MIB = 2.0**20
DEVICES = 4


def workload(trained: float = 1.0, micro_batches: int = 16) -> Workload:
    """Eight layers of 10 M parameters and 30 ms, which pass 4 MiB on; micro-batches of a pipeline of all devices."""
    layer = Item(ItemMemory("layer", 10_000_000, 40 * MIB, 4 * MIB), 0.01, 0.02)
    first = Item(ItemMemory("embedding", 1_000_000, 0.0, 4 * MIB), 0.0, 0.0)
    last = Item(ItemMemory("head", 1_000_000, 8 * MIB, 0.0), 0.005, 0.01)
    states = States(weight_bytes=4, shard=True, trained=trained)
    items = (first, *(layer,) * 8, last)
    return Workload(items, 8, 8, micro_batch_size=1, train_batch_size=micro_batches, states=states)


def cluster(mbit: float, memory_gib: float = 80.0) -> Cluster:
    return Cluster(DEVICES, 1, memory_gib * 2**30, state_bytes_per_s=1e12, across=Fabric(mbit * 125_000, 1e-4))


def options(work: Workload, where: Cluster, *, tuned: bool = False) -> dict[int, Option]:
    found = {}
    for stages in (1, 2, 4):
        option = Option(stages, DEVICES // stages, 1, work.train_batch_size * stages // DEVICES)
        found[stages] = predicted(option, work, where, tuned=tuned)
    return found


def best(work: Workload, where: Cluster, usual: int = 2) -> int:
    found = choose(list(options(work, where).values()), usual)
    assert found is not None
    return found.stages


def test_slow_links_make_pipelines_and_fast_ones_replicas() -> None:
    work = workload()
    assert [best(work, cluster(mbit)) for mbit in (100, 1_000_000)] == [4, 1]


def test_with_adapters_only_replicas_send_next_to_nothing() -> None:
    where = cluster(1000)
    assert best(workload(), where) == 4
    assert best(workload(trained=0.001), where) == 1
    light, full = options(workload(trained=0.001), where)[1], options(workload(), where)[1]
    spared = (4 + 8 / DEVICES) * 82_000_000 * 0.999  # gradients, and the share of the moments
    assert full.memory_bytes - light.memory_bytes == pytest.approx(spared)
    assert light.step_s < full.step_s


def test_what_does_not_fit_is_not_taken() -> None:
    work, fast = workload(), cluster(1_000_000)
    fits = options(work, fast)
    memory_gib = fits[1].memory_bytes / 2**30 * 0.9
    found = options(work, cluster(1_000_000, memory_gib))
    assert "GiB" in found[1].why_not
    assert found[2].step_s == pytest.approx(fits[2].step_s)
    assert choose([found[1]], 2) is None
    assert best(work, cluster(1_000_000, memory_gib)) == 2


def test_experts_need_replicas_to_be_spread_over() -> None:
    found = predicted(Option(4, 1, 1, 16), workload(), cluster(100), expert=2)
    assert "cannot share experts" in found.why_not


def test_among_nearly_equal_ones_the_usual_is_taken() -> None:
    def option(stages: int, step_s: float) -> Option:
        return Option(stages, 4 // stages, 1, 1, step_s=step_s)

    near, far = 1 + 0.9 * NEAR, 1 + 1.1 * NEAR
    assert choose([option(1, 1.0), option(2, near), option(4, near)], usual=2) == option(2, near)
    assert choose([option(1, 1.0), option(2, far), option(4, near)], usual=2) == option(1, 1.0)
    assert choose([option(1, far), option(2, 1.0), option(4, near)], usual=8) == option(2, 1.0)


def test_the_best_schedule_is_that_of_the_tuners_candidates() -> None:
    """By the simulator, of every one of them that fits."""
    work, where = workload(), cluster(200)
    strategy = Strategy(1, 4, 1, 1)
    plan = plan_of(strategy, work, where)
    assert isinstance(plan, Plan)
    found, name = with_best_schedule(plan, work, where)
    times = item_times(strategy, work, where)
    held = [times[first:end] for first, end in zip(plan.boundaries, plan.boundaries[1:], strict=False)]
    costs = pipeline_costs(strategy, work, where, plan.boundaries, held)
    known = candidates(4, 16, [1], {1: [0.0] * 4}, [1.0] * 4, configured=1)
    steps = {each.name: simulate(each.schedule(4, 16), costs).makespan_s for each in known}
    shortest = min(steps.values())
    first = steps[Candidate(1).name]
    assert shortest < 0.95 * first  # or there is nothing to be seen
    assert found.step_s == pytest.approx(plan.step_s - first + shortest)
    assert steps[f"{name}, micro-batch 1"] == pytest.approx(shortest)
    assert found.schedule.to_dict() == {"type": "adaptive"}
    # What it keeps alive is in its memory.
    peaks = next(each for each in known if each.name == f"{name}, micro-batch 1").peak_activations(4, 16)
    for need, before, peak, live in zip(found.memory, plan.memory, peaks, (4, 3, 2, 1), strict=True):
        assert need.activations == pytest.approx(before.activations / live * peak)
        assert need.states == before.states
    # Room for two micro-batches more than 1F1B has: longer warm-ups are out.
    tight = max(need.total for need in plan.memory) * 1.01
    squeezed = replace(where, memory_bytes=tight)
    narrow = plan_of(strategy, work, squeezed)
    assert not isinstance(narrow, Dropped)
    assert shortest < with_best_schedule(narrow, work, squeezed)[0].step_s - (plan.step_s - first)


def test_devices_of_different_speed() -> None:
    """One of four takes twice as long: replicas wait for it, stages that follow the speeds lose a seventh."""
    seconds = [1.0, 1.0, 1.0, 2.0]
    mean = 5 / 4
    assert slowdown(seconds, 1, follows_speed=True) == pytest.approx(2 / mean)
    assert slowdown(seconds, 4, follows_speed=False) == pytest.approx(2 / mean)
    assert slowdown(seconds, 4, follows_speed=True) == pytest.approx(4 / 3.5 / mean)
    assert slowdown(seconds, 2, follows_speed=True) == pytest.approx(2 / 1.5 / mean)  # the slow one's stage is slow
    assert slowdown([3.0] * 4, 2, follows_speed=True) == pytest.approx(1.0)
    # With shares by speed, replicas lose nothing but what their own stages wait for each other.
    assert slowdown(seconds, 1, follows_speed=True, shares_by_speed=True) == pytest.approx(4 / 3.5 / mean)
    assert slowdown(seconds, 2, follows_speed=False, shares_by_speed=True) == pytest.approx(2 / 1.5 / mean)
    assert slowdown([1.0, 3.0, 1.0, 3.0], 2, follows_speed=True, shares_by_speed=True) == pytest.approx(1.5 / 2)
    assert slowdown(seconds, 4, follows_speed=True, shares_by_speed=True) == pytest.approx(4 / 3.5 / mean)
    work = workload()
    assert scaled(work, 2.0).items[1].backward_s == pytest.approx(2 * work.items[1].backward_s)


def test_a_line_for_people() -> None:
    assert Option(1, 4, 2, 8, why_not="too large").text == "1 stage x 4 replicas: too large"
    line = Option(4, 1, 2, 8, 1.25, "eager slack=1", 2**30).text
    assert line == "4 stages: 1.25 s a step of 8 micro-batches of 2, eager slack=1, 1 GiB"
