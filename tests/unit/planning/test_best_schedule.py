"""The schedule that the tuner would choose for a predicted pipeline, with one stage a device or two."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planning import best_schedule
from paceline.planning.best_schedule import NEAR, TWO_CHUNKS, with_best_schedule, with_best_schedules, with_two_chunks
from paceline.planning.candidates import FAMILIES, IN_V, SPLIT_IN_LINE, candidates
from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.memory import ItemMemory, States
from paceline.planning.strategy import Dropped, Plan, plan_of, search
from paceline.planning.strategy_memory import memory_of_devices, share_of
from paceline.planning.strategy_shape import Strategy
from paceline.planning.workload import Item, StageTimes, Workload
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import v_route
from paceline.schedules.simulate import peak_bytes, simulate
from paceline.schedules.split_families import SPLIT_FAMILIES

MIB = 2.0**20
ALONE = Strategy(1, 4, 1, 1)
FORWARD_S, BACKWARD_S, SAVED, SENT = 0.01, 0.02, 40 * MIB, 4 * MIB


def workload(micro_batches: int = 8, layers: int = 8, **changes: object) -> Workload:
    """Layers of 10 M parameters and 30 ms, which pass 4 MiB on; embedding and head take no time."""
    layer = Item(ItemMemory("layer", 10_000_000, SAVED, SENT), FORWARD_S, BACKWARD_S)
    ends = Item(ItemMemory("end", 1_000_000, 0.0, SENT), 0.0, 0.0)
    work = Workload((ends, *(layer,) * layers, ends), 8, 8, 1, micro_batches, States(weight_bytes=4, shard=True))
    return replace(work, **changes)  # type: ignore[arg-type]


def cluster(mbit: float, devices: int = 4, memory_gib: float = 80.0) -> Cluster:
    return Cluster(devices, 1, memory_gib * 2**30, state_bytes_per_s=1e12, across=Fabric(mbit * 125_000, 1e-4))


def costs(mbit: float, num_stages: int, layers_each: int) -> Costs:
    """Of stages on four devices, which send all that they send at a time with ``mbit`` together."""
    rate = mbit * 125_000
    there = [Link(rate, 1e-4)] * 3
    links = tuple(there) if num_stages == 4 else (*there, Link(), *there)
    return Costs(
        (layers_each * FORWARD_S,) * num_stages,
        (layers_each * BACKWARD_S,) * num_stages,
        (SENT,) * (num_stages - 1),
        *(links, links),
        hosts=(0, 1, 2, 3),
        egress_bytes_per_s=(rate,) * 4,
    )


def two_chunks(work: Workload, where: Cluster) -> tuple[Plan, str]:
    found = with_two_chunks(ALONE, work, where, micro_batches=work.train_batch_size)
    assert isinstance(found, tuple)
    return found


def after_pipeline_s(plan: Plan) -> float:
    return plan.terms["gradients"] + plan.terms["expert_gradients"] + plan.terms["optimizer"]


@pytest.mark.parametrize("mbit", [200, 1_000, 100_000])
def test_one_stage_a_device_has_the_fastest_of_the_tuners_candidates(mbit: float) -> None:
    work, where = workload(16), cluster(mbit)
    plan = plan_of(ALONE, work, where)
    assert isinstance(plan, Plan)
    found, name = with_best_schedule(plan, work, where)
    known = candidates(4, 16, [1], {1: [0.0] * 4}, [1.0] * 4, configured=1)
    orders = {each.name.partition(",")[0]: each.schedule(4, 16) for each in known}
    orders |= {family: FAMILIES[family](4, 16) for family in SPLIT_IN_LINE}
    steps = {each: simulate(order, costs(mbit, 4, 2)).makespan_s for each, order in orders.items()}
    shortest = min(steps.values())
    assert shortest < 0.95 * steps["1f1b"]  # or there is nothing to be seen
    assert found.step_s == pytest.approx(shortest + after_pipeline_s(found))
    assert steps[name] == pytest.approx(shortest)
    assert found.schedule.to_dict() == {"type": "adaptive"}
    # What it keeps alive or for later is in its memory.
    each = [need.activations / live for need, live in zip(plan.memory, (4, 3, 2, 1), strict=True)]
    kept = peak_bytes(orders[name], replace(costs(mbit, 4, 2), activation_bytes=tuple(each)))
    assert [need.activations for need in found.memory] == pytest.approx(list(kept))
    assert [need.states for need in found.memory] == [need.states for need in plan.memory]


def test_what_does_not_fit_is_no_candidate() -> None:
    work, where = workload(16), cluster(200)
    plan = plan_of(ALONE, work, where)
    assert isinstance(plan, Plan)
    # Room for what 1F1B has, and nothing more: longer warm-ups are out.
    squeezed = replace(where, memory_bytes=max(need.total for need in plan.memory) * 1.01)
    narrow = plan_of(ALONE, work, squeezed)
    assert isinstance(narrow, Plan)
    assert with_best_schedule(plan, work, where)[0].step_s < with_best_schedule(narrow, work, squeezed)[0].step_s


@pytest.mark.parametrize("mbit", [100, 2_000, 100_000])
def test_two_stages_a_device_have_the_fastest_of_those_in_v(mbit: float) -> None:
    work = workload()
    found, name = two_chunks(work, cluster(mbit))
    given = costs(mbit, 8, 1)
    orders = {family: FAMILIES[family](4, 8) for family in IN_V}
    steps = {family: simulate(order, given).makespan_s for family, order in orders.items()}
    assert found.boundaries == (0, 2, 3, 4, 5, 6, 7, 8, 10)
    assert found.step_s == pytest.approx(min(steps.values()) + after_pipeline_s(found))
    assert steps[name] == pytest.approx(min(steps.values()))
    assert found.schedule.to_dict() == {"type": "adaptive", "chunks": 2}
    assert found.name == "tp1_pp4_dp1_ep1_chunks2"
    assert found.terms["dense"] == pytest.approx(8 * 2 * (FORWARD_S + BACKWARD_S))
    # A live micro-batch keeps what its layers save, and what the stage passes on.
    each = tuple(SAVED + (SENT if stage < 7 else 0.0) for stage in range(8))
    kept = peak_bytes(orders[name], replace(given, activation_bytes=each))
    assert [need.activations for need in found.memory] == pytest.approx(list(kept))
    weights = [4.0 * count for count in (22_000_000, 20_000_000, 20_000_000, 20_000_000)]
    assert [need.weights for need in found.memory] == weights


def test_halves_of_layers_that_are_recomputed_count_as_layers() -> None:
    """So many halves were as many layers, and a job refused the JSON that said so."""
    halves = workload(layers=16, blocks_per_layer=2, recomputed=tuple(range(1, 17)))
    found, _ = two_chunks(halves, cluster(2_000))
    assert found.boundaries == (0, 3, 5, 7, 9, 11, 13, 15, 18)
    assert found.recomputed_of_stages == (1,) * 8


def test_messages_share_what_a_device_sends() -> None:
    """With two stages a device it sends activations of the one and gradients of the other."""
    slow = two_chunks(workload(), cluster(200))[0]
    apart = simulate(FAMILIES["zbv"](4, 8), replace(costs(200, 8, 1), hosts=(), egress_bytes_per_s=()))
    assert slow.step_s > 1.2 * apart.makespan_s


def test_weights_of_embedding_and_head_are_once_on_their_device() -> None:
    where, tied = cluster(100_000, 8), workload(layers=8, tied_parameters=1_000_000)
    alone, shared = two_chunks(workload(), where)[0], two_chunks(tied, where)[0]
    assert alone.memory[0].weights - shared.memory[0].weights == 4.0 * 1_000_000
    assert alone.memory[1:] == shared.memory[1:]
    one = plan_of(ALONE, tied, where)
    assert isinstance(one, Plan)
    assert one.terms["gradients"] > 0 == shared.terms["gradients"]  # nothing to be exchanged


def test_where_there_are_no_chunks() -> None:
    fast = cluster(100_000)
    assert with_two_chunks(ALONE, workload(layers=7), fast, micro_batches=8) is None
    assert with_two_chunks(ALONE, workload(512), fast, micro_batches=512) is None  # too long to be simulated
    assert with_two_chunks(Strategy(1, 1, 4, 1), workload(), fast, micro_batches=8) is None
    found = two_chunks(workload(), fast)[0]
    largest = max(need.total for need in found.memory)
    narrow = replace(fast, memory_bytes=0.9 * largest)
    dropped = with_two_chunks(ALONE, workload(), narrow, micro_batches=8)
    assert isinstance(dropped, Dropped)
    assert "GiB" in dropped.text


@pytest.mark.parametrize("mbit", [20, 200, 2_000, 100_000])
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 32])
def test_what_is_not_simulated_would_have_taken_longer(mbit: float, micro_batches: int) -> None:
    work, where = workload(micro_batches), cluster(mbit)
    step_s = two_chunks(work, where)[0].step_s
    for share in (0.5, 0.8, 0.9, 1.0):
        found = with_two_chunks(ALONE, work, where, micro_batches=micro_batches, within_s=share * step_s)
        assert found is None or share == 1.0 or found[0].step_s == pytest.approx(step_s)
    assert with_two_chunks(ALONE, work, where, micro_batches=micro_batches, within_s=1.001 * step_s) is not None


@given(st.data())
def test_no_order_in_v_is_faster_than_the_bound(data: st.DataObject) -> None:
    ranks, count = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 6))
    times = st.floats(0.01, 1.0)
    seconds = [tuple(data.draw(times) for _ in range(2 * ranks)) for _ in range(2)]
    there = [Link(data.draw(st.floats(0.5, 100.0)), data.draw(st.floats(0.0, 0.1))) for _ in range(ranks - 1)]
    links = (*there, Link(), *reversed(there))
    some = Costs(seconds[0], seconds[1], (1.0,) * (2 * ranks - 1), links, links)
    for family in IN_V:
        try:
            order = FAMILIES[family](ranks, count)
        except ValueError:
            continue
        taken_s = simulate(order, some).makespan_s
        assert best_schedule._least_s(some, ranks, count) <= taken_s * (1 + 1e-9)
        shared = best_schedule._sharing_what_is_sent(some, v_route(ranks))
        assert simulate(order, shared).makespan_s >= taken_s * (1 - 1e-9)


def test_a_ranking_has_the_chunks_that_are_clearly_faster() -> None:
    work, fast, slow = workload(4), cluster(100_000), cluster(500)
    for where in (fast, slow):
        before = search(work, where)
        names = {plan.name: plan for plan in with_best_schedules(before, work, where).plans}
        found = {name.removesuffix("_chunks2") for name in names if name.endswith("_chunks2")}
        assert (ALONE.name in found) == (where is fast)
        for name in found:
            assert names[f"{name}_chunks2"].step_s < (1 - NEAR) * names[name].step_s
        assert {plan.name for plan in before.plans} == {name for name in names if not name.endswith("_chunks2")}


@pytest.mark.parametrize("chunks", [1, 2])
def test_gradients_of_weights_hide_their_reduction(chunks: int) -> None:
    """Of one micro-batch, those of all stages of a device; nothing else."""
    where = replace(cluster(1_000, 8), state_bytes_per_s=1e15)
    pair = Strategy(1, 4, 2, 1)

    def gradients_s(work: Workload) -> float:
        if chunks == 2:
            found = with_two_chunks(pair, work, where, micro_batches=4)
            assert isinstance(found, tuple)
            return found[0].terms["gradients"]
        plan = plan_of(pair, work, where)
        assert isinstance(plan, Plan)
        tuned, name = with_best_schedule(plan, work, where)
        assert name in SPLIT_IN_LINE
        return tuned.terms["gradients"]

    overlapping = workload()
    late = replace(overlapping, states=replace(overlapping.states, overlaps=False))
    # Two layers, a bucket each: the first one is reduced beside the gradients of the second.
    spared = gradients_s(replace(late, train_batch_size=8)) - gradients_s(replace(overlapping, train_batch_size=8))
    assert spared == pytest.approx(BACKWARD_S / 2, rel=0.02)  # two buckets have more latency than one exchange


def test_what_splitting_costs_decides_whether_backwards_are_split() -> None:
    where = cluster(100_000)
    plain = workload()
    names, steps = [], []
    for factor in (1.0, 1.05, 1.6):
        work = replace(plain, stage=StageTimes(split_factor=factor))
        plan = plan_of(ALONE, work, where)
        assert isinstance(plan, Plan)
        found, name = with_best_schedule(plan, work, where)
        names.append(name)
        steps.append(found.step_s)
    assert [name in FAMILIES for name in names] == [True, True, False]
    assert steps[0] < steps[1] < steps[2]
    whole = plan_of(ALONE, plain, where)
    assert isinstance(whole, Plan)
    assert steps[2] <= whole.step_s, "as without splitting"
    cheap, dear = (two_chunks(replace(plain, stage=StageTimes(split_factor=each)), where)[0] for each in (1.0, 1.2))
    busy_s = plain.train_batch_size * 2 * BACKWARD_S
    assert dear.step_s - cheap.step_s == pytest.approx(0.2 * busy_s, rel=0.2)


def test_weights_may_have_another_share_of_a_backward() -> None:
    """With next to nothing to be left for later, splitting fills no bubble."""
    where = cluster(100_000)
    found = []
    for share in (0.5, 0.01):
        work = replace(workload(), stage=StageTimes(weight_share=share))
        plan = plan_of(ALONE, work, where)
        assert isinstance(plan, Plan)
        found.append(with_best_schedule(plan, work, where)[0].step_s)
    assert found[0] < 0.95 * found[1]


def recomputing(micro_batches: int = 8, layers: int = 8) -> Workload:
    """All layers keep their input alone, and compute a forward more."""
    plain = workload(micro_batches, layers)
    memory = plain.items[1].memory._replace(saved_bytes=SENT, working_bytes=SAVED, again_bytes=SAVED - SENT)
    layer = Item(memory, FORWARD_S, BACKWARD_S + FORWARD_S)
    items = (plain.items[0], *[layer] * layers, plain.items[-1])
    return replace(plain, items=items, recomputed=tuple(range(1, layers + 1)))


def test_backwards_of_recomputed_layers_are_split() -> None:
    """All that a layer has is left for later. Where everything has room, nothing is recomputed."""
    work, where = recomputing(), cluster(100_000)
    plan = plan_of(ALONE, work, where)
    assert isinstance(plan, Plan)
    found, name = with_best_schedule(plan, work, where)
    each = [need.activations / live for need, live in zip(plan.memory, (4, 3, 2, 1), strict=True)]
    measured = replace(
        costs(100_000, 4, 2),
        weight_s=(2 * BACKWARD_S / 2,) * 4,
        activation_bytes=tuple(each),
        deferred_bytes=tuple(own + 2 * (SAVED - SENT) for own in each),
    )
    order = FAMILIES[name](4, 8)
    assert name in SPLIT_IN_LINE
    assert found.step_s == pytest.approx(simulate(order, measured).makespan_s + after_pipeline_s(found))
    assert found.step_s < 0.9 * plan.step_s
    assert [need.activations for need in found.memory] == pytest.approx(list(peak_bytes(order, measured)))
    squeezed = replace(where, memory_bytes=max(need.total for need in plan.memory) * 1.05)
    narrow, whole = with_best_schedule(plan, work, squeezed)
    assert whole not in FAMILIES
    assert max(need.total for need in narrow.memory) <= squeezed.memory_bytes


def test_recomputed_layers_in_two_chunks() -> None:
    work, where = recomputing(4), cluster(100_000)
    found, name = two_chunks(work, where)
    kept, _ = two_chunks(workload(4), where)
    assert name in IN_V
    assert found.recomputed == work.recomputed
    assert kept.step_s == pytest.approx(found.step_s), "all has room"
    activations = [sum(need.activations for need in each.memory) for each in (found, kept)]
    assert 0.3 * activations[1] < activations[0] < activations[1], "what is left for later is kept"
    narrow = replace(where, memory_bytes=max(need.total - need.activations for need in found.memory) + 2 * SAVED)
    assert isinstance(with_two_chunks(ALONE, work, narrow, micro_batches=4), Dropped)


@pytest.mark.parametrize("experts", [0, 4_000_000])
@pytest.mark.parametrize("share", [0.85, 0.95])
def test_two_chunks_recompute_as_few_layers_as_it_takes(experts: int, share: float) -> None:
    """With one layer fewer some device would not fit; a step is no shorter than with all kept. Experts have other
    replicas than the layers that they are in, and so other shares of their states."""
    pair = Strategy(1, 4, 2, 2 if experts else 1)
    work, where = workload(16, layers=16), cluster(100_000, devices=8)
    again = replace(recomputing(16, layers=16), states=work.states)
    if experts:
        work, again = (
            replace(
                each,
                num_experts=4,
                items=tuple(item._replace(expert_parameters=experts * (item.forward_s > 0)) for item in each.items),
            )
            for each in (work, again)
        )
    roomy = with_two_chunks(pair, work, where, micro_batches=8, recomputed=lambda: again)
    assert roomy is not None
    assert not isinstance(roomy, Dropped)
    assert roomy == with_two_chunks(pair, work, where, micro_batches=8), "nothing has to be recomputed"
    alone = roomy[0]
    needs = memory_of_devices(share_of(pair, work, TWO_CHUNKS), alone.boundaries, SPLIT_FAMILIES["zbv"](4, 8))
    fixed = max(need.total - need.activations for need in needs)
    short = replace(where, memory_bytes=fixed + share * (max(need.total for need in needs) - fixed))
    assert isinstance(with_two_chunks(pair, work, short, micro_batches=8), Dropped)
    found = with_two_chunks(pair, work, short, micro_batches=8, recomputed=lambda: again)
    assert found is not None
    assert not isinstance(found, Dropped)
    plan, name = found
    assert name in IN_V
    assert plan.boundaries == alone.boundaries
    assert 0 < sum(plan.recomputed_of_stages) < 16
    assert max(need.total for need in plan.memory) <= short.memory_bytes
    assert plan.step_s >= alone.step_s
    for layer in plan.recomputed:
        fewer = work.with_recomputed(again, [other for other in plan.recomputed if other != layer])
        assert isinstance(with_two_chunks(pair, fewer, short, micro_batches=8), Dropped), (
            "the run would not recompute it"
        )
    nothing = with_two_chunks(pair, work, replace(short, memory_bytes=fixed), micro_batches=8, recomputed=lambda: again)
    assert isinstance(nothing, Dropped)


def test_the_last_stage_keeps_what_it_would_recompute_where_there_is_room() -> None:
    """It is the slowest, because of its head, and each micro-batch takes two forwards less there."""
    work, where = recomputing(16), cluster(100_000)
    *others, head = work.items
    head = Item(head.memory._replace(num_parameters=20_000_000), 0.04, 0.08)
    work = replace(work, items=(*others, head), work=(0.0, *[1.0] * 8, 0.0))
    plan = plan_of(ALONE, work, where)
    assert isinstance(plan, Plan)
    assert plan.boundaries == (0, 3, 5, 7, 10)
    assert sum(plan.terms.values()) == pytest.approx(plan.step_s)
    narrow = replace(where, memory_bytes=max(need.total for need in plan.memory) + SENT)
    late = plan_of(ALONE, work, narrow)
    assert isinstance(late, Plan)
    assert late.step_s - plan.step_s >= 16 * 2 * FORWARD_S
    assert plan.terms["bubble"] == 0.0
    assert plan.terms["dense"] < late.terms["dense"]


@pytest.mark.parametrize(
    ("layers", "times", "memory_gib", "under_1f1b", "at_best"), [(4, 3, 0.8, 16, 1), (8, 4, 80.0, 1, 16)]
)
def test_whether_stages_share_the_head_is_chosen_by_the_fastest_schedules(
    layers: int, times: int, memory_gib: float, under_1f1b: int, at_best: int
) -> None:
    """Under 1F1B it may be the other way round. The head is worth some layers."""
    plain = workload(8, layers)
    head = plain.items[-1]._replace(forward_s=times * FORWARD_S, backward_s=times * BACKWARD_S)
    work = replace(plain, items=(*plain.items[:-1], head))
    sliced, where = work.in_head_slices(16), cluster(1000, memory_gib=memory_gib)

    def found(*, share: bool, tuned: bool) -> Plan:
        ranking = search(work, where, sliced=sliced if share else None)
        ranking = with_best_schedules(ranking, work, where, None, sliced if share else None) if tuned else ranking
        return next(plan for plan in ranking.plans if plan.name == ALONE.name)

    assert found(share=True, tuned=False).head_slices == under_1f1b
    chosen, whole = found(share=True, tuned=True), found(share=False, tuned=True)
    assert chosen.head_slices == at_best
    assert chosen.step_s == whole.step_s if at_best == 1 else chosen.step_s * (1 + NEAR) <= whole.step_s
