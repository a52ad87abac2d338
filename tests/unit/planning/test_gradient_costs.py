"""What replicas exchange behind the last backward, and what of it is hidden."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.gradient_costs import LEAST_BUCKET, GradientCosts
from paceline.planning.memory import ItemMemory, States
from paceline.planning.strategy import Plan, plan_of
from paceline.planning.strategy_memory import share_of
from paceline.planning.strategy_shape import Strategy
from paceline.planning.strategy_times import item_times
from paceline.planning.workload import Item, Workload

BACKWARD_S = 0.02
"""Of a layer. A layer is a bucket."""
LAYERS = 4
BUCKET_BYTES = 4 * LEAST_BUCKET


def workload(*, experts: int = 0, head: int = 1, **states: Any) -> Workload:
    """Layers of a bucket each, the last one of ``head`` buckets; and ``experts`` numbers of experts in each."""
    memory = [ItemMemory(f"layer {number}", LEAST_BUCKET + experts, 0.0, 0.0) for number in range(LAYERS)]
    memory[-1] = memory[-1]._replace(num_parameters=head * LEAST_BUCKET + experts)
    return Workload(
        tuple(Item(each, 0.01, BACKWARD_S, expert_parameters=experts) for each in memory),
        num_heads=1,
        num_kv_heads=1,
        micro_batch_size=1,
        train_batch_size=8,
        states=States(**{"shard": True, **states}),
        num_experts=2 if experts else 0,
        top_k=1,
    )


def cluster(bucket_s: float, devices: int = 2, **more: Any) -> Cluster:
    """Two replicas reduce a bucket to its owners in ``bucket_s``, or publish its values."""
    rate = BUCKET_BYTES / 2 / bucket_s
    return Cluster(devices, 1, across=Fabric(inf, 0.0, all_reduce_bytes_per_s=rate), **more)


def gradients_s(strategy: Strategy, given: Workload, bucket_s: float, devices: int = 2, **more: Any) -> float:
    plan = plan_of(strategy, given, cluster(bucket_s, devices, **more))
    assert isinstance(plan, Plan)
    return plan.terms["gradients"]


REPLICAS = Strategy(1, 1, 2, 1)


@pytest.mark.parametrize("bucket_s", [BACKWARD_S / 4, BACKWARD_S, 3 * BACKWARD_S])
def test_a_bucket_is_reduced_when_the_backward_has_finished_it(bucket_s: float) -> None:
    """The first one when a layer is done; those after it one by one, or as they are finished."""
    first_to_last = max(BACKWARD_S + LAYERS * bucket_s, LAYERS * BACKWARD_S + bucket_s)
    outlasts_s = first_to_last - LAYERS * BACKWARD_S
    assert gradients_s(REPLICAS, workload(), bucket_s) == pytest.approx(outlasts_s + LAYERS * bucket_s)
    assert gradients_s(REPLICAS, workload(overlaps=False), bucket_s) == pytest.approx(2 * LAYERS * bucket_s)
    whole_s = max(BACKWARD_S + 2 * LAYERS * bucket_s, LAYERS * BACKWARD_S + 2 * bucket_s) - LAYERS * BACKWARD_S
    assert gradients_s(REPLICAS, workload(shard=False), bucket_s) == pytest.approx(whole_s)


def test_gradients_and_values_go_in_their_dtypes() -> None:
    bucket_s = 3 * BACKWARD_S
    late = {"overlaps": False, "weight_bytes": 2}
    assert gradients_s(REPLICAS, workload(**late), bucket_s) == pytest.approx((0.5 + 0.5) * LAYERS * bucket_s)
    sent = {**late, "sent_bytes": 4}
    assert gradients_s(REPLICAS, workload(**sent), bucket_s) == pytest.approx((1 + 0.5) * LAYERS * bucket_s)


def test_what_zero_1_exchanges_goes_by_its_own_rate() -> None:
    bucket_s = 3 * BACKWARD_S
    plain = cluster(bucket_s)
    slow = replace(plain, across=replace(plain.across, zero1_bytes_per_s=BUCKET_BYTES / 2 / bucket_s / 10))

    def seconds(given: Workload, on: Cluster) -> float:
        plan = plan_of(REPLICAS, given, on)
        assert isinstance(plan, Plan)
        return plan.terms["gradients"]

    late = workload(overlaps=False)
    assert seconds(late, slow) == pytest.approx(10 * seconds(late, plain))
    whole = workload(overlaps=False, shard=False)
    assert seconds(whole, slow) == pytest.approx(seconds(whole, plain))


def test_later_stages_reduce_beside_the_backwards_of_those_before_them() -> None:
    """The gradients of a stage are ready when its last backward ends: the last stage's first."""
    strategy, given = Strategy(1, 2, 2, 1), workload()
    on = cluster(BACKWARD_S, 4)
    found = GradientCosts(strategy, given, on, share_of(strategy, given))
    times = item_times(strategy, given, on)
    assert found.outlasting_s(times, 2, 4) == pytest.approx(BACKWARD_S)
    # Both stages outlast their own backward by a bucket; the second one's is over long before the first one's ends.
    assert gradients_s(strategy, given, BACKWARD_S, 4) == pytest.approx(BACKWARD_S + 2 * BACKWARD_S)
    plan = plan_of(strategy, workload(head=9), on)
    assert isinstance(plan, Plan)
    first = plan.boundaries[1]
    assert 0 < first < LAYERS
    # Nine buckets outlast the second stage's backward, and that of the first stage hides one of them a layer.
    published = 9 + LAYERS - 1 - first
    assert plan.terms["gradients"] == pytest.approx((9 - first + published) * BACKWARD_S)


def test_experts_have_buckets_of_their_own() -> None:
    """Shared by fewer ranks: here by two of four."""
    strategy = Strategy(1, 1, 4, 2)
    given = workload(experts=2 * LEAST_BUCKET, overlaps=False)
    plan = plan_of(strategy, given, cluster(BACKWARD_S, 4))
    assert isinstance(plan, Plan)
    assert plan.terms["gradients"] == pytest.approx(2 * LAYERS * 3 / 2 * BACKWARD_S)
    assert plan.terms["expert_gradients"] == pytest.approx(2 * LAYERS * BACKWARD_S)
    hidden = plan_of(strategy, workload(experts=2 * LEAST_BUCKET), cluster(BACKWARD_S, 4))
    assert isinstance(hidden, Plan)
    left = hidden.terms["gradients"] + hidden.terms["expert_gradients"]
    assert left == pytest.approx(2 * LAYERS * (3 / 2 + 1) * BACKWARD_S - (LAYERS - 1) * BACKWARD_S)


def test_the_steps_of_stages_are_waited_for_by_all() -> None:
    """Not of the stage whose exchange takes longest: the slowest of each."""
    plan = plan_of(REPLICAS, workload(), cluster(BACKWARD_S, state_bytes_per_s=1e9))
    assert isinstance(plan, Plan)
    assert plan.terms["optimizer"] == pytest.approx(LAYERS * LEAST_BUCKET / 2 * 32 / 1e9)
