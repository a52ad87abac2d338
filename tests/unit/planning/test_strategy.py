"""The search over parallel strategies: complete, without duplicates, and with numbers that move the right way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from paceline.planning import recomputation
from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.gradient_costs import state_bytes_per_parameter
from paceline.planning.memory import ItemMemory, States, stage_memory
from paceline.planning.shared_devices import held_by, whole_schedule
from paceline.planning.strategy import BATCH, MEMORY, Dropped, Plan, Ranking, Strategy, plan_of, search, strategies
from paceline.planning.strategy_costs import TERMS
from paceline.planning.strategy_memory import share_of
from paceline.planning.strategy_shape import ONE_F_ONE_B, PipelineSchedule, late_schedules
from paceline.planning.workload import Item, Workload
from paceline.schedules import verify
from paceline.schedules.asynchronous import MULTIDIRECTION, ONE_DIRECTION, make
from paceline.schedules.costs import Costs, Link
from paceline.schedules.directions import routes, stages_of
from paceline.schedules.steady import period

MIB = 2.0**20


def workload(layers: int = 8, experts: int = 0, **changes: Any) -> Workload:
    """Layers of 10 M parameters, 30 ms; with experts another 8 M each and 60 ms together."""
    routed = 20 * MIB if experts else 0.0
    layer = Item(
        ItemMemory("layer", 10_000_000 + 8_000_000 * experts, 40 * MIB, 4 * MIB, routed_bytes=routed),
        0.01,
        0.02,
        8_000_000 * experts,
        (0.02, 0.04) if experts else (0.0, 0.0),
    )
    ends = (
        Item(ItemMemory("embedding", 30_000_000, 0.0, 4 * MIB), 0.0, 0.0),
        Item(ItemMemory("head", 30_000_000, 8 * MIB, 0.0, 32 * MIB), 0.005, 0.01),
    )
    given: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 8,
        "micro_batch_size": 1,
        "train_batch_size": 64,
        "states": States(weight_bytes=2, shard=True),
        "rows": 4096.0 if experts else 0.0,
        "row_bytes": 2048.0,
        "num_experts": experts,
        "top_k": 2 if experts else 1,
    }
    return Workload(items=(ends[0], *(layer,) * layers, ends[1]), **{**given, **changes})


def cluster(devices: int = 8, **changes: Any) -> Cluster:
    given: dict[str, Any] = {
        "devices_per_node": min(devices, 8),
        "state_bytes_per_s": 1e12,
        "inside": Fabric(1e11, 1e-6),
        "across": Fabric(1e10, 1e-5),
    }
    return Cluster(devices, **{**given, **changes})


def step_s(ranking: Ranking) -> dict[Strategy, float]:
    return {plan.strategy: plan.step_s for plan in ranking.plans}


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 24, 36])
@pytest.mark.parametrize("experts", [0, 4, 12])
@pytest.mark.parametrize(("layers", "heads", "kv_heads"), [(4, 4, 2), (3, 12, 6), (40, 1, 1)])
def test_every_strategy_once(devices: int, experts: int, layers: int, heads: int, kv_heads: int) -> None:
    numbers = range(1, devices + 1)
    expected = (
        {
            (tensor, pipeline, data, expert, expert_data)
            for tensor, pipeline, data, expert, expert_data in product(numbers, numbers, numbers, numbers, numbers)
            if tensor * pipeline * data == devices
            and expert * expert_data == data
            and expert <= max(experts, 1)
            and heads % tensor == 0
            and kv_heads % tensor == 0
            and pipeline <= layers
        }
        if devices <= 8
        else None
    )
    found = list(strategies(devices, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, num_experts=experts))
    assert len(set(found)) == len(found)
    shapes = {(*strategy, strategy.expert_data) for strategy in found}
    if expected is not None:
        assert shapes == expected
    for strategy in found:
        assert strategy.num_devices == devices
        assert strategy.expert * strategy.expert_data == strategy.data
        assert strategy.expert <= max(experts, 1)


@pytest.mark.parametrize(("experts", "devices", "held"), [(4, 2, 2), (5, 1, 5), (5, 2, 3), (5, 3, 2), (5, 5, 1)])
def test_a_device_has_room_for_as_many_experts_as_the_others(experts: int, devices: int, held: int) -> None:
    share = share_of(Strategy(1, 1, devices, devices), workload(experts=experts))
    assert set(share.experts) == {0, 8_000_000 * held}


def test_a_number_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"^num_layers is 0: give a whole number from 1 upwards\.$"):
        list(strategies(4, num_layers=0))


def test_terms_add_up_and_the_fastest_is_first() -> None:
    ranking = search(workload(experts=4), cluster())
    assert len(ranking.plans) == len(list(strategies(8, num_layers=8, num_heads=8, num_kv_heads=8, num_experts=4)))
    seconds = [plan.step_s for plan in ranking.plans]
    assert seconds == sorted(seconds)
    for plan in ranking.plans:
        assert tuple(plan.terms) == TERMS
        assert plan.step_s == pytest.approx(sum(plan.terms.values()))
        assert min(plan.terms.values()) >= 0
        assert len(plan.memory) == len(plan.boundaries) - 1 == plan.strategy.pipeline
        assert plan.micro_batches * plan.strategy.data == 64


def test_one_device_computes_everything_itself() -> None:
    plan = search(workload(experts=4), cluster(1)).plans[0]
    assert plan.terms["dense"] == pytest.approx(64 * (8 * 0.03 + 0.015))
    assert plan.terms["experts"] == pytest.approx(64 * 8 * 0.06)
    assert {name for name in TERMS if plan.terms[name]} == {"dense", "experts", "optimizer"}


def test_every_kind_of_parallelism_shortens_what_it_should() -> None:
    found = {plan.strategy: plan.terms for plan in search(workload(experts=4), cluster()).plans}
    alone = search(workload(experts=4), cluster(1)).plans[0].terms
    for strategy, terms in found.items():
        # A stage of whole layers may have more than its share.
        most = -(-8 // strategy.pipeline) / 8 / strategy.tensor / strategy.data
        assert terms["experts"] == pytest.approx(alone["experts"] * most)
        assert (terms["all_to_all"] > 0) == (strategy.expert > 1)
        assert (terms["tensor"] > 0) == (strategy.tensor > 1)
        assert (terms["bubble"] > 0) == (strategy.pipeline > 1)
        assert (terms["expert_gradients"] > 0) == (strategy.expert_data > 1)
        assert (terms["gradients"] > 0) == (strategy.data > 1)


def test_what_does_not_fit_is_counted_with_its_numbers() -> None:
    given = workload(experts=4)
    free = search(given, cluster())
    needs = sorted(max(stage.total for stage in plan.memory) for plan in free.plans)
    limit = needs[len(needs) // 2]
    ranking = search(given, cluster(memory_bytes=limit))
    assert ranking.num_dropped == {MEMORY: len(free.plans) - len(ranking.plans)}
    assert all(max(stage.total for stage in plan.memory) <= limit for plan in ranking.plans)
    # With less memory another split of the layers may be found, so more may fit than did without a limit.
    assert len(ranking.plans) >= len(needs) // 2 + 1
    for dropped in ranking.dropped:
        assert dropped.text.endswith(f" GiB of {limit / 2**30:.4g} GiB")
    nothing = search(given, cluster(memory_bytes=1e6))
    assert not nothing.plans
    assert nothing.num_dropped == {MEMORY: len(free.plans)}


def recomputed(given: Workload) -> Workload:
    """Layers keep their input alone, and their backward takes a forward longer."""

    def of(item: Item) -> Item:
        if item.memory.name != "layer":
            return item
        memory = item.memory._replace(saved_bytes=4 * MIB)
        return item._replace(memory=memory, backward_s=item.backward_s + item.forward_s)

    return replace(given, items=tuple(map(of, given.items)), recomputed=tuple(range(1, len(given.items) - 1)))


def test_layers_are_recomputed_where_nothing_fits_otherwise() -> None:
    given = workload()
    again = recomputed(given)
    plain, slow = (search(each, cluster()) for each in (given, again))
    needs = {plan.strategy: max(stage.total for stage in plan.memory) for plan in plain.plans}
    limit = sorted(needs.values())[len(needs) // 2]
    where = cluster(memory_bytes=limit)
    ranking = search(given, where, recomputed=lambda: again)
    alone = step_s(search(given, where))
    whole, some = range(1, len(given.items) - 1), 0
    for plan in ranking.plans:
        assert plan.recomputes == (plan.strategy not in alone), "only what does not fit otherwise"
        if plan.recomputes:
            assert max(stage.total for stage in plan.memory) <= limit
            free = step_s(plain)[plan.strategy]
            # While a stage waits for messages recomputing takes no time.
            assert free <= plan.step_s <= step_s(slow)[plan.strategy]
            assert free < plan.step_s or plan.strategy.pipeline > 1
            assert sum(plan.recomputed_of_stages) == len(plan.recomputed)
            if plan.strategy.tensor > 1:
                assert plan.recomputed == tuple(whole), "its engine has no choice"
            else:
                some += len(plan.recomputed) < len(whole)
                fixed = plan_of(plan.strategy, given.with_recomputed(again, plan.recomputed), where)
                assert isinstance(fixed, Plan)
                assert fixed.step_s <= plan.step_s, "predicted as what it is"
        else:
            assert plan.step_s == alone[plan.strategy]
    assert {plan.recomputes for plan in ranking.plans} == {False, True}
    assert some, "with some of its layers recomputed something fits that is faster than with all"
    seconds = [plan.step_s for plan in ranking.plans]
    assert seconds == sorted(seconds)

    def unasked() -> Workload:
        raise AssertionError("everything fits")

    assert search(given, cluster(), recomputed=unasked) == plain
    nothing = search(given, cluster(memory_bytes=1e6), recomputed=lambda: again)
    assert not nothing.plans
    assert all(dropped.text.endswith(" although layers are recomputed") for dropped in nothing.dropped)


def test_a_batch_that_replicas_cannot_share() -> None:
    ranking = search(workload(train_batch_size=4), cluster())
    assert {dropped.strategy.data for dropped in ranking.dropped} == {8}
    assert ranking.num_dropped == {BATCH: 1}
    assert ranking.dropped[0].text == ("4 samples a step are no multiple of 8 (micro-batch 1 x data parallel 8)")


def test_sharing_needs_less_memory() -> None:
    def need(strategy: Strategy, **changes: Any) -> float:
        plan = plan_of(strategy, workload(experts=8, **changes), cluster(strategy.num_devices))
        return max(stage.total for stage in plan.memory)  # type: ignore[union-attr]

    assert need(Strategy(1, 1, 4, 4)) < need(Strategy(1, 1, 4, 2)) < need(Strategy(1, 1, 4, 1))
    assert need(Strategy(2, 1, 1, 1)) < need(Strategy(1, 1, 1, 1))
    assert need(Strategy(1, 4, 1, 1)) < need(Strategy(1, 2, 1, 1)) < need(Strategy(1, 1, 1, 1))
    whole = States(weight_bytes=2, shard=False)
    assert need(Strategy(1, 1, 2, 1)) < need(Strategy(1, 1, 2, 1), states=whole)
    assert need(Strategy(1, 1, 2, 2), tied_parameters=30_000_000) < need(Strategy(1, 1, 2, 2))


def test_a_split_that_fits_goes_before_the_fastest_one() -> None:
    """The embedding takes memory and no time."""
    strategy, given = Strategy(1, 2, 1, 1), workload()
    embedding = Item(ItemMemory("embedding", 100_000_000, 0.0, 4 * MIB), 0.0, 0.0)
    given = replace(given, items=(embedding, *given.items[1:]))
    fastest = plan_of(strategy, given, cluster(2))
    needs = [stage.total for stage in fastest.memory]  # type: ignore[union-attr]
    other = plan_of(strategy, given, cluster(2, memory_bytes=max(needs) * 0.95))
    assert other.boundaries != fastest.boundaries  # type: ignore[union-attr]
    assert other.step_s >= fastest.step_s  # type: ignore[union-attr]


LEVELS = [(1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 1, 1), (8, 2, 1, 1), (97, 1, 1, 1)]


def test_more_skew_never_makes_a_strategy_faster() -> None:
    before = step_s(search(workload(experts=4), cluster()))
    for level in LEVELS:
        given = workload(experts=4, loads=(tuple(map(float, level)),) * 8)
        after = step_s(search(given, cluster()))
        for strategy, seconds in after.items():
            assert seconds >= before[strategy] * (1 - 1e-9)
            if strategy.expert == 1:
                assert seconds == pytest.approx(before[strategy])
        rebalanced = step_s(search(replace(given, rebalanced=True), cluster()))
        assert all(rebalanced[strategy] <= seconds * (1 + 1e-9) for strategy, seconds in after.items())
        before = after
    worst = step_s(search(workload(experts=4, worst=True), cluster()))
    assert all(worst[strategy] >= seconds * (1 - 1e-9) for strategy, seconds in before.items())


def test_a_gate_with_a_capacity_bounds_the_busiest_device() -> None:
    loads = ((97.0, 1.0, 1.0, 1.0),) * 8
    free, bounded = (workload(experts=4, loads=loads, capacity_factor=c) for c in (None, 1.25))
    assert set(bounded.imbalance(4).values()) == {1.25}
    assert set(workload(experts=4, worst=True, capacity_factor=1.25).imbalance(4).values()) == {1.25}
    assert set(workload(experts=4, worst=True).imbalance(4).values()) == {2.0}  # two choices, an expert a device
    assert set(workload(experts=4, worst=True).imbalance(2).values()) == {2.0}
    assert set(free.imbalance(4).values()) == {2.0}  # each token goes to an expert at most once
    assert list(free.imbalance(2).values()) == pytest.approx([1.96] * 8)
    # Three devices have two, two and one of five: the busiest have 2 / 5 of the load instead of 1 / 3.
    assert set(workload(experts=5).imbalance(3).values()) == {6 / 5}
    assert set(workload(experts=5, capacity_factor=0.5).imbalance(3).values()) == {3 / 5}
    assert set(workload(experts=5, worst=True).imbalance(3).values()) == {3.0}
    ranking = step_s(search(free, cluster()))
    assert all(seconds <= ranking[strategy] for strategy, seconds in step_s(search(bounded, cluster())).items())


def test_the_busiest_device_keeps_the_activations_of_all_its_rows() -> None:
    """Half of what a layer keeps is its experts', and with the worst routing a device of four has twice its share."""
    strategy = Strategy(1, 1, 4, 4)
    even, worst = (share_of(strategy, workload(experts=4, worst=worst)).items[1].saved_bytes for worst in (False, True))
    assert (even, worst) == (40 * MIB, (20 + 2 * 20) * MIB)


def test_the_busiest_device_computes_the_activations_of_all_its_rows_again() -> None:
    given = workload(experts=4, worst=True)
    memories = recomputation.recomputed([item.memory for item in given.items])
    items = tuple(item._replace(memory=memory) for item, memory in zip(given.items, memories, strict=True))
    memory = share_of(Strategy(1, 1, 4, 4), replace(given, items=items)).items[1]
    assert (memory.saved_bytes, memory.working_bytes) == (4 * MIB, (20 + 2 * 20) * MIB)


def test_slower_links_never_make_a_step_shorter() -> None:
    given = workload(experts=4)
    fast = step_s(search(given, cluster(16)))
    for changes in ({"across": Fabric(1e9, 1e-5)}, {"inside": Fabric(1e10, 1e-6)}, {"devices_per_node": 2}):
        slow = step_s(search(given, cluster(16, **changes)))
        assert all(slow[strategy] >= seconds * (1 - 1e-9) for strategy, seconds in fast.items())


def test_a_thousand_devices() -> None:
    given = workload(layers=64, experts=64, train_batch_size=2048, num_kv_heads=4)
    ranking = search(given, cluster(1024))
    found = list(strategies(1024, num_layers=64, num_heads=8, num_kv_heads=4, num_experts=64))
    assert len(ranking.plans) + len(ranking.dropped) == len(found) > 100
    assert not all(plan.simulated for plan in ranking.plans)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0: give a whole number from 1 upwards."),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0: give a number above 0."),
        ({"loads": ((1.0,) * 4,)}, "there are loads of 1 layers and 8 MoE layers: give one row each."),
        ({"loads": ((1.0,) * 3,) * 8}, "loads[0]: there are 3 loads for 4 experts: give one for each."),
        ({"loads": ((1.0, -1.0, 0.0, 0.0),) * 8}, "loads[0]: the load of expert 1 is -1.0: give a finite number"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        workload(experts=4, **changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("kind", [ONE_DIRECTION, MULTIDIRECTION])
def test_schedules_without_a_flush_are_tried_where_they_are_allowed(kind: str) -> None:
    given = workload(experts=4, train_batch_size=48)
    plain, more = search(given, cluster(12)), search(given, cluster(12), [kind])
    late = [plan for plan in (*more.plans, *more.dropped) if plan.schedule != ONE_F_ONE_B]
    assert {plan.schedule.type for plan in late} == {kind}
    shapes = {strategy for strategy in step_s(plain) if strategy.pipeline > 1 and strategy.expert == 1}
    if kind == MULTIDIRECTION:
        shapes = {strategy for strategy in shapes if strategy.pipeline % 2 == 0}
    assert {plan.strategy for plan in late} == shapes
    assert [plan for plan in more.plans if plan.schedule == ONE_F_ONE_B] == list(plain.plans)
    assert len({plan.name for plan in late}) == len(late)


def test_directions_are_the_default_and_two() -> None:
    def counts(stages: int) -> list[int]:
        return [schedule.directions for schedule in late_schedules(Strategy(1, stages, 1, 1), [MULTIDIRECTION])]

    assert [counts(stages) for stages in (1, 2, 3, 4, 6, 8, 34)] == [[], [1, 2], [], [2], [2], [2, 4], []]


def test_rounds_of_several_directions_have_to_be_full() -> None:
    schedule, strategy = PipelineSchedule(MULTIDIRECTION, 2), Strategy(1, 4, 1, 1)
    found = plan_of(strategy, workload(train_batch_size=6), cluster(4), schedule)
    text = "6 micro-batches a step are no multiple of 4 stages"
    assert found == Dropped(strategy, BATCH, text, schedule)
    assert found.name == "tp1_pp4_dp1_ep1_multidirection2"


SMALL = workload().items
STREAMS = [PipelineSchedule(ONE_DIRECTION), *(PipelineSchedule(MULTIDIRECTION, count) for count in (2, 4))]


@pytest.mark.parametrize("schedule", STREAMS)
@pytest.mark.parametrize("micro_batches", [8, 24])
def test_without_a_flush_a_step_is_that_of_the_steady_state(schedule: PipelineSchedule, micro_batches: int) -> None:
    """Over the slowest link where directions cross nodes in other places."""
    given = workload(layers=16, train_batch_size=2 * micro_batches)
    here = cluster(16, devices_per_node=4, across=Fabric(1e9, 1e-3))
    plan = plan_of(Strategy(1, 8, 2, 1), given, here, schedule)
    assert isinstance(plan, Plan)
    seconds = [[sum(item[1:3]) for item in given.items[first:end]] for first, end in pairwise(plan.boundaries)]
    forward, backward = ([sum(stage) * part for stage in seconds] for part in (1 / 3, 2 / 3))
    inside, across = Link(1e11, 1e-6), Link(1e9, 1e-3)
    links = (inside, across) * 3 + (inside,) if schedule.type == ONE_DIRECTION else (across,) * 7
    costs = Costs(tuple(forward), tuple(backward), (4 * MIB,) * 7, links, links)
    stream = make(schedule.type, 8, micro_batches, schedule.directions)
    shown = sum(plan.terms[name] for name in ("dense", "bubble"))
    assert shown == pytest.approx(period(stream, costs), rel=1e-3)
    flushed = plan_of(Strategy(1, 8, 2, 1), given, here)
    assert isinstance(flushed, Plan)
    assert plan.terms["bubble"] < flushed.terms["bubble"]


@pytest.mark.parametrize("schedule", STREAMS)
@pytest.mark.parametrize("micro_batches", [8, 24])
def test_memory_has_all_copies_of_the_weights(schedule: PipelineSchedule, micro_batches: int) -> None:
    given = workload(layers=16, experts=2, train_batch_size=2 * micro_batches)
    plan = plan_of(Strategy(1, 8, 2, 1), given, cluster(16), schedule)
    assert isinstance(plan, Plan)
    items, stream = [item.memory for item in given.items], make(schedule.type, 8, micro_batches, schedule.directions)
    states = States(weight_bytes=2, data_parallel=2, shard=True, beside=True)
    if schedule.type == ONE_DIRECTION:
        states = replace(states, gradient_sets=stream.most_lag + 1)
        live = verify(whole_schedule(stream), paired=False).peak_activations
        needs = [stage_memory(items, plan.boundaries, stage, states, live[stage]) for stage in range(8)]
    else:
        needs = [held.memory(items, plan.boundaries, states) for held in held_by(whole_schedule(stream), "direction")]
    assert [need.total for need in plan.memory] == pytest.approx([need.total for need in needs])
    whole = sum(item.num_parameters for item in items)
    assert sum(need.weights for need in plan.memory) == 2 * whole * schedule.directions
    assert sum(need.masters for need in plan.memory) == pytest.approx(4 * whole / 2)


def test_few_micro_batches_keep_more_gradients_of_steps() -> None:
    one, two, many = (
        plan_of(Strategy(1, 8, 1, 1), workload(train_batch_size=n), cluster(8), PipelineSchedule(ONE_DIRECTION))
        for n in (1, 4, 64)
    )
    assert isinstance(one, Plan)
    assert isinstance(two, Plan)
    assert isinstance(many, Plan)
    for plan, sets in ((one, 8), (two, 3), (many, 2)):
        assert sum(need.gradients for need in plan.memory) == 4 * sets * sum(i.memory.num_parameters for i in SMALL)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("schedule", [PipelineSchedule(MULTIDIRECTION, 1), PipelineSchedule(MULTIDIRECTION, 2)])
def test_masters_are_kept_beside_fp32_weights(schedule: PipelineSchedule, zero: bool) -> None:
    """Of several directions each owner's replicas have a part; of one as ZeRO says."""
    given = workload(states=States(shard=zero))
    plan = plan_of(Strategy(1, 2, 2, 1), given, cluster(4), schedule)
    assert isinstance(plan, Plan)
    whole = sum(item.memory.num_parameters for item in SMALL)
    is_shared = zero or schedule.directions > 1
    assert sum(need.masters for need in plan.memory) == pytest.approx(4 * whole / (2 if is_shared else 1))
    assert sum(need.gradients for need in plan.memory) == 4 * whole * schedule.directions


def test_several_directions_reduce_and_share_states_whatever_zero_is() -> None:
    schedule, alone = PipelineSchedule(MULTIDIRECTION, 2), Strategy(1, 4, 1, 1)
    whole, sharded = (
        plan_of(Strategy(1, 4, 2, 1), workload(states=States(weight_bytes=2, shard=zero)), cluster(), schedule)
        for zero in (False, True)
    )
    assert isinstance(whole, Plan)
    assert replace(whole, terms={}) == replace(sharded, terms={})  # type: ignore[type-var]
    assert whole.terms == sharded.terms  # type: ignore[union-attr]
    plan = plan_of(alone, workload(), cluster(4), schedule)
    assert isinstance(plan, Plan)
    held = [stages_of(device, routes(4, 2)) for device in range(4)]
    sizes = [sum(item.memory.num_parameters for item in SMALL[a:b]) for a, b in pairwise(plan.boundaries)]
    # bf16 gradients to the owner and bf16 weights back, over half of the ring each
    most = max(sizes[one] + sizes[other] for one, other in held)
    assert plan.terms["gradients"] == pytest.approx((2 + 2) * most / 2 / 1e11 + 2e-6)
    assert plan.terms["optimizer"] == pytest.approx(state_bytes_per_parameter() * max(sizes) / 1e12)


def test_without_a_flush_more_may_not_fit() -> None:
    strategy, schedule = Strategy(1, 4, 1, 1), PipelineSchedule(MULTIDIRECTION, 2)
    late, plain = (plan_of(strategy, workload(), cluster(4), one) for one in (schedule, ONE_F_ONE_B))
    assert isinstance(late, Plan)
    assert isinstance(plain, Plan)
    need = max(stage.total for stage in late.memory)
    assert need > max(stage.total for stage in plain.memory)
    found = plan_of(strategy, workload(), cluster(4, memory_bytes=need * 0.6), schedule)
    assert isinstance(found, Dropped)
    assert (found.reason, found.schedule) == (MEMORY, schedule)
    assert found.text.startswith("device ")


def test_sums_of_devices_are_balanced_where_that_is_faster() -> None:
    """The head takes as long as one and a half layers."""
    given = workload(layers=9, train_batch_size=8)
    given = replace(given, items=(*given.items[:-1], given.items[-1]._replace(forward_s=0.015, backward_s=0.03)))
    plan = plan_of(Strategy(1, 4, 1, 1), given, cluster(4), PipelineSchedule(MULTIDIRECTION, 2))
    assert isinstance(plan, Plan)
    work = [sum(sum(item[1:3]) for item in given.items[a:b]) for a, b in pairwise(plan.boundaries)]
    sums = [sum(work[stage] for stage in stages_of(device, routes(4, 2))) for device in range(4)]
    assert work == pytest.approx([0.09, 0.06, 0.09, 0.075])
    assert max(sums) == pytest.approx(0.165)
