"""The terms of a step: the predictor of MoE layers, the formula for pipelines, what follows them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.gradient_costs import state_bytes_per_parameter
from paceline.planning.memory import ItemMemory, States
from paceline.planning.strategy import Plan, Strategy, plan_of
from paceline.planning.strategy_costs import one_f_one_b_s
from paceline.planning.strategy_times import item_times
from paceline.planning.workload import Item, StageTimes, Workload
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import one_f_one_b
from paceline.schedules.simulate import simulate

HIDDEN, ALPHA, EXPERTS, TOP_K, TOKENS = 512, 2, 8, 2, 1024
FLOPS_PER_S, BYTES_PER_S = 1e12, 1e9


def moe(matrices: int, **changes: Any) -> Workload:
    """One layer of experts of so many matrices, in bf16, by FLOP/s."""
    parameters = matrices * HIDDEN * ALPHA * HIDDEN
    rows = float(TOKENS * TOP_K)
    forward_s = 2 * parameters * rows / FLOPS_PER_S
    layer = Item(
        ItemMemory("layer", EXPERTS * parameters, 1e6, 2 * TOKENS * HIDDEN),
        0.0,
        0.0,
        EXPERTS * parameters,
        (forward_s, 2 * forward_s),
    )
    end = Item(ItemMemory("end", 0, 0.0, 2 * TOKENS * HIDDEN), 0.0, 0.0)
    return Workload(
        (end, layer, end),
        num_heads=4,
        num_kv_heads=4,
        micro_batch_size=1,
        train_batch_size=8,
        rows=rows,
        row_bytes=2 * HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        **changes,
    )


@pytest.mark.parametrize("matrices", [2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("level", [(1.0,) * 8, (5.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)])
def test_an_moe_layer_is_affine_in_the_busiest_devices_rows(matrices: int, ep: int, level: tuple[float, ...]) -> None:
    latency_s = 1e-4
    cluster = Cluster(8, 8, inside=Fabric(BYTES_PER_S, latency_s))
    given = moe(matrices, loads=(level,))
    time = item_times(Strategy(1, 1, 8, ep), given, cluster)[1]
    local = EXPERTS // ep
    busiest = max(sum(level[first : first + local]) for first in range(0, EXPERTS, local)) / sum(level) * ep
    b_max = TOKENS * TOP_K * busiest
    computing = 3 * 2 * matrices * ALPHA * HIDDEN**2 / FLOPS_PER_S * b_max
    hops = {1: 0, 2: 1, 4: 2, 8: 3}[ep]
    exchanging = 4 * (HIDDEN * 2 / BYTES_PER_S * b_max * (ep - 1) / ep + latency_s * hops)
    assert sum(time.experts) == pytest.approx(computing)
    assert time.all_to_all == pytest.approx(exchanging)
    assert time.total_s == pytest.approx(computing + exchanging)


def test_tensor_parallel_layers_reduce_four_times() -> None:
    items = tuple(Item(ItemMemory(name, 1000, 0.0, 1e6), 0.1, 0.2) for name in ("embedding", "layer", "layer", "head"))
    given = Workload(items, num_heads=4, num_kv_heads=4, micro_batch_size=1, train_batch_size=4)
    cluster = Cluster(4, 4, inside=Fabric(1e8))
    embedding, layer, _, head = item_times(Strategy(4, 1, 1, 1), given, cluster)
    assert layer.tensor == pytest.approx(4 * 2 * 3 / 4 * 1e6 / 1e8)
    assert layer.dense == pytest.approx((0.025, 0.05))
    assert embedding.dense == (0.1, 0.2)
    assert head.dense == pytest.approx((0.025, 0.05))
    assert embedding.tensor == head.tensor == 0


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7, 16, 64])
def test_the_bubble_of_equal_stages_is_the_simulators(stages: int, micro_batches: int) -> None:
    costs = Costs.uniform(stages, 1.0, 2.0)
    formula = one_f_one_b_s(costs, micro_batches)
    assert formula == pytest.approx(simulate(one_f_one_b(stages, micro_batches), costs).makespan_s)
    assert formula == pytest.approx(3.0 * (micro_batches + stages - 1))
    early = replace(costs, ahead_s=(0.5,) * stages)
    assert one_f_one_b_s(early, micro_batches) == pytest.approx(formula - 0.5 * (stages - 1))
    assert simulate(one_f_one_b(stages, micro_batches), early).makespan_s == pytest.approx(formula - 0.5 * (stages - 1))


def test_the_formula_is_near_the_simulator_where_stages_and_messages_differ() -> None:
    """It is used for many micro-batches only."""
    draw = random.Random(0)
    errors, of_many = [], []
    for _ in range(300):
        stages, micro_batches = draw.randint(2, 12), draw.choice([1, 2, 4, 8, 16, 32, 64])
        forward = [draw.uniform(0.8, 1.2) for _ in range(stages)]
        links = tuple(Link(1.0, draw.choice([0.0, 0.01])) for _ in range(stages - 1))
        costs = Costs(
            tuple(forward),
            tuple(2 * seconds for seconds in forward),
            (draw.choice([0.0, 0.05, 0.2]),) * (stages - 1),
            links,
            links,
        )
        simulated = simulate(one_f_one_b(stages, micro_batches), costs).makespan_s
        errors.append(abs(one_f_one_b_s(costs, micro_batches) / simulated - 1))
        if micro_batches >= 2 * stages:
            of_many.append(errors[-1])
    assert max(of_many) < 0.05 < max(errors) < 0.12
    assert sum(errors) / len(errors) < 0.02


def dense(zero: bool = True, **changes: Any) -> Workload:
    items = tuple(Item(ItemMemory(name, 1_000_000, 0.0, 1000.0), 0.01, 0.02) for name in "abcdef")
    states = States(weight_bytes=2, shard=zero, overlaps=False, sent_bytes=4)
    return Workload(
        items, num_heads=1, num_kv_heads=1, micro_batch_size=1, train_batch_size=8, states=states, **changes
    )


def test_gradients_and_states() -> None:
    cluster = Cluster(4, 4, state_bytes_per_s=1e9, inside=Fabric(1e9))

    def terms(strategy: Strategy, given: Workload) -> Any:
        return plan_of(strategy, given, cluster).terms  # type: ignore[union-attr]

    plain, sharded = terms(Strategy(1, 1, 4, 1), dense(False)), terms(Strategy(1, 1, 4, 1), dense())
    ring = 3 / 4 / 1e9
    assert plain["gradients"] == pytest.approx(2 * 4 * 6e6 * ring)
    assert sharded["gradients"] == pytest.approx((4 + 2) * 6e6 * ring)  # fp32 to owners, bf16 back
    assert plain["optimizer"] == pytest.approx(6e6 * state_bytes_per_parameter() / 1e9)
    assert sharded["optimizer"] == pytest.approx(plain["optimizer"] / 4)
    alone = terms(Strategy(1, 4, 1, 1), dense())
    assert alone["gradients"] == 0
    tied = terms(Strategy(1, 4, 1, 1), dense(tied_parameters=500_000))
    assert tied["gradients"] == pytest.approx(4 * 500_000 / 1e9)


def test_long_pipelines_follow_the_formula() -> None:
    items = (dense().items[0], *(dense().items[1],) * 16, dense().items[3])
    given = Workload(items, num_heads=1, num_kv_heads=1, micro_batch_size=1, train_batch_size=512)
    plan = plan_of(Strategy(1, 16, 1, 1), given, Cluster(16, 16))
    assert not plan.simulated  # type: ignore[union-attr]
    short = plan_of(Strategy(1, 16, 1, 1), dense_of(items, 64), Cluster(16, 16))
    assert short.simulated  # type: ignore[union-attr]
    assert plan.terms["bubble"] == pytest.approx(short.terms["bubble"])  # type: ignore[union-attr]


def dense_of(items: tuple[Item, ...], samples: int) -> Workload:
    return Workload(items, num_heads=1, num_kv_heads=1, micro_batch_size=1, train_batch_size=samples)


def test_each_stage_has_what_it_takes_beside_its_items() -> None:
    """The trunk's share, once for each stage, whatever it holds."""
    layer = Item(ItemMemory("layer", 1000, 1e6, 1e4), 0.01, 0.02)
    end = Item(ItemMemory("end", 1000, 1e6, 1e4), 0.0, 0.0)
    plain = Workload((end, *[layer] * 4, end), 1, 1, 1, 8, States(weight_bytes=4))
    beside = replace(plain, stage=StageTimes(0.001, 0.003))
    for stages in (1, 2, 4):
        where = Cluster(stages, 1)
        free, found = (plan_of(Strategy(1, stages, 1, 1), each, where) for each in (plain, beside))
        assert isinstance(free, Plan)
        assert isinstance(found, Plan)
        turns = 8 + stages - 1
        assert found.step_s - free.step_s == pytest.approx(0.004 * turns)
        assert found.terms["dense"] - free.terms["dense"] == pytest.approx(0.004 * 8)
