"""Costs of schedules whose stages keep what has room: what the executor's own choice, replayed, takes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from paceline.planning import kept_activations
from paceline.planning.candidates import Candidate
from paceline.planning.choose import Planner
from paceline.planning.kept_activations import as_kept, of_one_stage_a_rank
from paceline.schedules import families
from paceline.schedules.asynchronous import one_direction
from paceline.schedules.costs import Again, Costs
from paceline.schedules.directions import routes
from paceline.schedules.keeping import Layers, keeping
from paceline.schedules.schedule import Schedule
from paceline.schedules.split_families import SPLIT_FAMILIES

LAYERS, LAYER, SAVED = 10, 10.0, 5.0
AGAIN = LAYERS * LAYER
MUCH = 1e6


def costs(stages: int, room: float, kept: float = 0.0, ranks: int | None = None) -> Costs:
    return replace(
        Costs.uniform(stages, 1.0, 3.0 - kept, 0.1),
        activation_bytes=(SAVED,) * stages,
        again=Again(
            seconds=(1.0,) * stages,
            num_bytes=(AGAIN,) * stages,
            layer_bytes=(LAYER,) * stages,
            kept=(kept,) * stages,
            room_bytes=(room,) * (ranks or stages),
        ),
    )


SCHEDULES = {
    "1f1b": families.one_f_one_b(4, 16),
    "eager": families.eager(4, 16, 1.0),
    "gpipe": families.gpipe(4, 8),
    "zbh1": SPLIT_FAMILIES["zbh1"](4, 16),
    "interleaved": families.interleaved(4, 16, 2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_that_has_room_is_kept_and_nothing_that_has_none(name: str) -> None:
    order = SCHEDULES[name]
    stages = order.num_stages
    full = as_kept(costs(stages, MUCH, ranks=4), order)
    assert full.backward_s == (2.0,) * stages
    assert full.ahead_s == ()
    none = as_kept(costs(stages, 0.0, ranks=4), order)
    assert none.backward_s == (3.0,) * stages
    assert none.ahead_s == ()
    # What was measured with everything kept tells the same of both.
    for room, expected in ((MUCH, full), (0.0, none)):
        again = as_kept(costs(stages, room, kept=1.0, ranks=4), order)
        assert again.backward_s == expected.backward_s
        assert again.again == expected.again


def replayed_share(order: Schedule, rank: int, room: float) -> tuple[float, bool]:
    """The executor's own choice."""
    chunks, stages = range(order.num_chunks), order.stages[rank]
    waits = [chunk for chunk in chunks if stages[chunk] < order.num_stages - 1]
    again = dict.fromkeys(chunks, Layers(AGAIN, LAYERS))
    found = keeping(order.orders[rank], waits, dict.fromkeys(chunks, SAVED), {}, again, room)
    return sum(found.kept.values()) / (LAYERS * order.num_chunks * order.num_micro_batches), found.is_early


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", ["1f1b", "eager", "interleaved"])
def test_a_share_is_kept_as_the_executor_keeps_it(
    name: str, part: float, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nearly so, where an order is too long to be looked at closely: at times fewer than the most are alive."""
    order = SCHEDULES[name]
    if is_long:
        monkeypatch.setattr(kept_activations, "EXACT_UP_TO", 0)
    for rank in range(order.num_ranks):
        alive = sum(order.most_alive[rank])
        room = alive * SAVED + part * alive * AGAIN
        found = as_kept(costs(order.num_stages, room, ranks=4), order).again
        assert found is not None
        (stage, *_), (share, is_early) = order.stages[rank], replayed_share(order, rank, room)
        own = fmean(found.kept[stage] for stage in order.stages[rank])
        assert share - 0.5 * is_long - 1e-9 <= own <= share + 0.1 * is_long + 1e-9
        early = as_kept(costs(order.num_stages, room, ranks=4), order).ahead_s
        if share < 1 and rank < 3:
            assert (early[stage] > 0 if early else False) == is_early


def test_the_last_stage_waits_for_nobody() -> None:
    found = as_kept(costs(4, 4 * SAVED + 1.5 * AGAIN), SCHEDULES["1f1b"])
    assert found.ahead_s[-1] == 0.0
    assert all(found.ahead_s[:-1])
    assert found.backward_s[-1] == 2.0, "it has one micro-batch at a time"
    assert list(found.backward_s) == sorted(found.backward_s, reverse=True), "the first ones have most of them"


def test_each_direction_keeps_what_its_rank_has_room_for() -> None:
    order = families.gpipe(2, 4)
    both = replace(
        order,
        orders=tuple(tuple(a._replace(chunk=a.micro_batch % 2) for a in own) for own in order.orders),
        num_chunks=2,
        routes=tuple(routes(2, 2)),
    )
    short = costs(2, 4 * SAVED + 2 * AGAIN)
    assert short.again is not None
    rooms = replace(short, again=replace(short.again, room_bytes=(MUCH, 0.0)))
    found = as_kept(rooms, both)
    assert found.again is not None
    assert found.again.kept == (0.5, 0.5), "each stage is on both ranks, of which one keeps everything"
    assert found.backward_s == (2.5, 2.5)


def test_without_a_flush_nothing_is_kept() -> None:
    found = as_kept(costs(4, MUCH, kept=1.0), one_direction(4, 4))
    assert found.backward_s == (3.0,) * 4
    assert found.ahead_s == ()


def test_one_stage_a_rank_needs_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order = SCHEDULES["1f1b"]
    monkeypatch.setattr(kept_activations, "EXACT_UP_TO", 0)
    for room in (0.0, 150.0, 300.0, MUCH):
        assert of_one_stage_a_rank(costs(4, room), [4, 3, 2, 1]) == as_kept(costs(4, room), order)


def test_costs_without_recomputation_stay_as_they_are() -> None:
    plain = replace(costs(4, 0.0), again=None)
    assert as_kept(plain, SCHEDULES["1f1b"]) is plain
    assert of_one_stage_a_rank(plain, [4, 3, 2, 1]) is plain


def test_gradients_of_weights_stay_whole() -> None:
    """Where noise has made a backward shorter than what is known of its parts."""
    short = replace(costs(4, MUCH), backward_s=(1.2,) * 4, weight_s=(1.0,) * 4)
    assert as_kept(short, SCHEDULES["zbh1"]).backward_s == (1.0,) * 4


def slowly(costs: Costs) -> Costs:
    """Computing again takes two seconds more."""
    assert costs.again is not None
    longer = tuple(2 * (1 - kept) + whole for kept, whole in zip(costs.again.kept, costs.backward_s, strict=True))
    return replace(costs, backward_s=longer, again=replace(costs.again, seconds=(3.0,) * 4))


def test_a_warm_up_that_leaves_no_room_to_keep_anything_is_seen_as_slower() -> None:
    """Among candidates, by what is measured with one that keeps all."""
    one, eager = (Candidate(k=1, slack=slack, micro_batch_size=1) for slack in (0.0, 1.0))
    planner = Planner([one, eager], 4, 16)
    room = 4 * (SAVED + AGAIN) + SAVED + LAYER
    for kept in (1.0, 0.0):
        measured = slowly(costs(4, room, kept=kept))
        assert planner.predict(one, measured).step_s < planner.predict(eager, measured).step_s
    unlimited = slowly(costs(4, MUCH))
    assert planner.predict(eager, unlimited).step_s <= planner.predict(one, unlimited).step_s


def test_layers_that_are_collective_are_kept_all_or_not_at_all() -> None:
    order = SCHEDULES["1f1b"]
    for room, kept in ((4 * (SAVED + AGAIN) + SAVED, (1.0,) * 4), (2 * (SAVED + AGAIN) + SAVED, (0.0, 0.0, 1.0, 1.0))):
        plain = costs(4, room)
        assert plain.again is not None
        found = as_kept(replace(plain, again=replace(plain.again, is_collective=True)), order)
        assert found.again is not None
        assert found.again.kept == kept
        assert found.ahead_s == ()
