"""Options of a run's start, compared again when links and devices have changed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import ceil, inf

import pytest

from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.memory import ItemMemory, States
from paceline.planning.stage_choice import Option, Stages
from paceline.planning.stage_pool import Entry, StagePool, rate_of, seconds_of
from paceline.planning.workload import Item, Workload
from paceline.schedules.costs import Costs, Link

MIB = 2.0**20


def pool(mbit: float, stages: int, samples: int = 2) -> StagePool:
    """Two devices, 80 M parameters, and 0.24 s a micro-batch."""
    layer = Item(ItemMemory("layer", 10_000_000, 40 * MIB, MIB), 0.01, 0.02)
    ends = Item(ItemMemory("end", 1_000_000, 0.0, MIB), 0.0, 0.0)
    work = Workload((ends, *(layer,) * 8, ends), 8, 8, 1, samples, States(weight_bytes=4, shard=True))
    cluster = Cluster(2, 1, 2**40, state_bytes_per_s=1e12, across=Fabric(mbit * 125_000, 1e-4))
    entries = (Entry(Option(1, 2, 1, samples // 2), work), Entry(Option(2, 1, 1, samples), work))
    return StagePool(entries, cluster, Stages(stages))


def test_a_restart_is_worth_it_when_links_have_become_fast() -> None:
    slow = pool(100, stages=2)
    assert slow.advice(1.0, 1.0, 60.0) is None
    assert slow.advice(2.0, 1.0, 60.0) is None
    found = slow.advice(1000.0, 1.0, 60.0)
    assert found is not None
    fast = pool(100_000, stages=1)
    now, better = (entry.predicted(fast.cluster) for entry in fast.entries[::-1])
    assert found.better.step_s == pytest.approx(better.step_s)
    assert found.now.step_s == pytest.approx(now.step_s)
    assert found.steps == ceil(60.0 / (now.step_s - better.step_s))
    # With slower devices the bubble is longer, and a restart pays earlier.
    slower = slow.advice(1000.0, 2.0, 60.0)
    assert slower is not None
    assert slower.steps < found.steps


def test_another_process_can_be_asked() -> None:
    slow = pool(100, stages=2)
    found = slow.advice(1000.0, 1.0, 60.0)
    assert found is not None
    assert pickle.loads(pickle.dumps(slow)).advice(1000.0, 1.0, 60.0) == found


def test_and_back() -> None:
    fast = pool(100_000, stages=1)
    assert fast.advice(1.0, 1.0, 60.0) is None
    found = fast.advice(0.001, 1.0, 60.0)
    assert found is not None
    assert found.better.stages == 2


def test_a_little_is_not_worth_it() -> None:
    """With eight micro-batches a pipeline over a fast link loses only its bubble, a ninth."""
    even = pool(1e9, stages=2, samples=8)
    now, better = (entry.predicted(even.cluster) for entry in even.entries[::-1])
    assert 0.03 < 1 - better.step_s / now.step_s < 0.2
    assert even.advice(1.0, 1.0, 60.0) is None


def test_chunks_are_compared_too() -> None:
    """Links have become slow, and chunks send twice as much."""
    layer = Item(ItemMemory("layer", 1_000_000, 40 * MIB, 8 * MIB), 0.01, 0.02)
    ends = Item(ItemMemory("end", 1_000, 0.0, 8 * MIB), 0.0, 0.0)
    work = Workload((ends, *(layer,) * 8, ends), 8, 8, 1, 4, States(weight_bytes=4, shard=True))
    cluster = Cluster(4, 1, 2**40, across=Fabric(2e10, 1e-4))
    entries = tuple(Entry(Option(4, 1, 1, 4, chunks=chunks), work, tuned=True) for chunks in (1, 2))
    pool = StagePool(entries, cluster, Stages(4, 2))
    assert pool.advice(1.0, 1.0, 60.0) is None
    found = pool.advice(0.005, 1.0, 60.0)
    assert found is not None
    assert (found.now.shape, found.better.shape) == (Stages(4, 2), Stages(4))
    assert replace(pool, stages=Stages(4)).advice(0.005, 1.0, 60.0) is None


def test_measured_collectives_become_faster_too() -> None:
    slow = pool(100, stages=2)
    measured = replace(slow.cluster.across, all_reduce_bytes_per_s=12.5e6, all_to_all_bytes_per_s=12.5e6)
    known = replace(slow, cluster=replace(slow.cluster, across=measured))
    assert known.advice(1000.0, 1.0, 60.0) == slow.advice(1000.0, 1.0, 60.0)


def test_what_is_read_off_costs() -> None:
    links = (Link(4.0, 0.0), Link(inf, 0.0))
    costs = Costs((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (1.0, 1.0), links, (Link(1.0, 0.0), Link(2.0, 0.0)))
    assert rate_of(costs) == 1.0
    assert rate_of(replace(costs, hosts=(0, 1, 2), egress_bytes_per_s=(0.5, inf, inf))) == 0.5
    assert seconds_of(costs) == 18.0
    assert rate_of(replace(costs, down=(links[1],) * 2, up=(links[1],) * 2)) is None
