"""Layers whose experts lie on several ranks change stage, and every bit is that of a run in which they stay."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paceline.checkpoint import Checkpoint
from support.expert_pipelines import Case, joined, make, order, shuffle, state, steps
from support.ranks import run_ranks
from support.work_time import WORK_TIME, Work

STEPS = 5
LAYERS = 4
START = [0, 3, LAYERS + 2]

Moves = Mapping[int, Sequence[Sequence[int]]]
"""Boundaries to take on before a step, one after the other."""

MOVES: Moves = {0: [[0, 2, 6]], 1: [[0, 4, 6]], 2: [START, [0, 2, 6]], 4: [[0, 4, 6], [0, 2, 6]]}


class Run(NamedTuple):
    """A job of two stages with two ranks that share experts.

    Args:
        case: model and JSON.
        schedule: of the pipeline.
        moe: the section; None: experts stay.
        more: other sections.
        start: boundaries at first.
        moves: of the run whose layers move.
        shuffled: steps before which experts change places, also where layers stay.
        experts: ranks that share them.
    """

    case: Case
    schedule: Any = "1f1b"
    moe: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = {}
    start: Sequence[int] = START
    moves: Moves = MOVES
    shuffled: Sequence[int] = ()
    experts: int = 2


def train(run: Run, moves: Moves) -> dict[str, Any]:
    from paceline.moe.hf_experts import HFExpertLayer

    pipeline = {"stages": 2, "partition": list(run.start), "schedule": run.schedule}
    section = {**run.more, **({} if run.moe is None else {"moe": dict(run.moe)})}
    engine = make(run.case, 2, run.experts, pipeline=pipeline, **section)
    losses, num_bytes, placed = [], 0, []
    for step in range(STEPS):
        if step in run.shuffled:
            shuffle(engine, by_name=True)
            for layer in engine.expert_layers.values():
                loads = [5.0, 1.0, 3.0, 2.0, 4.0][: layer.num_experts]
                layer.take_on(layer.placement, loads)  # as the rebalancer does, which knows loads
                layer.fetch()
        if step in run.moves:
            engine.flush()
        for parts in moves.get(step, ()):
            figures = engine.repartition(parts)
            num_bytes += 0 if figures is None else figures["bytes"]
        here = [engine.module.state_name(n) for n, m in engine.module.named_modules() if isinstance(m, HFExpertLayer)]
        assert list(engine.expert_layers) == sorted(here), "in the model's order"
        assert all(layer.name == name for name, layer in engine.expert_layers.items())
        placed.append({name: layer.placement.devices for name, layer in engine.expert_layers.items()})
        losses += steps(engine, step, 1)
    engine.flush()
    found = {"losses": losses, "state": state(engine), "bytes": num_bytes, "placed": placed}
    found["routed"] = {name: layer.routed.clone() for name, layer in engine.expert_layers.items()}
    engine.destroy()
    return found


def as_told(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [train(run, run.moves) for run in runs]


def both(runs: Mapping[str, Run]) -> dict[str, list[dict[str, Any]]]:
    """Each run with its layers where they were, and with those that move."""
    return {name: [train(run, moves) for moves in ({}, run.moves)] for name, run in runs.items()}


def check(runs: Mapping[str, Run], world_size: int = 4) -> None:
    ranks = run_ranks(both, world_size, runs)
    for name in runs:
        stayed, moved = ([rank[name][which] for rank in ranks] for which in range(2))
        assert all(rank["losses"] == stayed[0]["losses"] for rank in (*stayed, *moved)), name
        whole, found = joined(stayed), joined(moved)
        assert whole.keys() == found.keys(), name
        for key, tensor in whole.items():
            assert torch.equal(found[key], tensor), f"{name}: {key}"
        assert moved[0]["bytes"] > 0, name
        for step in range(STEPS):  # wherever a layer is, its experts lie as they do where it stays
            placed, wanted = ({k: v for rank in of for k, v in rank["placed"][step].items()} for of in (moved, stayed))
            assert placed == wanted, name


PLAIN = Case(layers=LAYERS)
ZERO = Case(zero=1, layers=LAYERS)
DENSE_FIRST = Case("deepseek_v3", zero=1, layers=LAYERS)
BY_HAND = {"rebalance_every": 0}
COPIES = {"rebalance_every": 0, "replicas": 1}


def test_layers_move_with_their_experts() -> None:
    """Which lie in another order than the model's from the start, and in a third from a later step on."""
    check({"": Run(ZERO, moe=BY_HAND, shuffled=(0, 3))})


def test_copies_of_experts_move_too() -> None:
    """The sums over an expert's copies are in one order too, since they lie on ranks of the same numbers."""
    planned = {**COPIES, "splitting": "planned"}
    five = Run(ZERO._replace(num_experts=5), moe=COPIES, shuffled=(0, 3))
    check({"even": five, "planned": Run(PLAIN, moe=planned, shuffled=(1,))})


def test_a_stage_gets_its_first_experts_and_gives_its_last_ones_away() -> None:
    """The first layer is dense."""
    moves: Moves = {1: [[0, 2, 6]], 2: [[0, 4, 6]], 3: [[0, 2, 6]]}
    check({"dense first": Run(DENSE_FIRST, moe=BY_HAND, moves=moves, shuffled=(0, 2))})


LATE: Moves = {2: [[0, 2, 6]], 4: [[0, 4, 6]]}
CHUNKS: Moves = {1: [[0, 2, 3, 6, 8]], 3: [[0, 3, 5, 7, 8]]}
"""Of two stages a rank: layers go from one rank to the other, some back."""


@pytest.mark.parametrize(
    "run",
    [
        Run(ZERO._replace(dtype="bf16", checkpointing=True), {"type": "gpipe"}),  # nothing moves experts
        Run(ZERO._replace(num_experts=5), "1f1b", BY_HAND, {"natural_gradient": {}}, moves=LATE, shuffled=(0,)),
        Run(ZERO._replace(layers=6), "zbv", COPIES, start=[0, 2, 4, 6, 8], moves=CHUNKS, shuffled=(0, 2)),
    ],
    ids=["bf16, recomputed", "natural gradient", "zbv"],
)
def test_with_other_features(run: Run) -> None:
    check({"": run})


def test_without_a_flush_a_stage_trains_as_where_its_ranks_have_all_experts() -> None:
    """How stale a layer's weights are depends on its stage, so both runs move."""
    spread = Run(ZERO, {"type": "one_direction"}, COPIES, moves=LATE, shuffled=(0, 4))
    whole = spread._replace(moe=None, shuffled=(), experts=1)
    ranks = run_ranks(as_told, 4, [spread, whole])
    found, wanted = ([rank[which] for rank in ranks] for which in range(2))
    assert found[0]["losses"] == pytest.approx(wanted[0]["losses"], rel=1e-6)
    state, expected = joined(found), joined(wanted)
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        atol = 2e-4 if key[1] == "master" else 1e-5
        torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def hold(case: Case, stages: int, parts: Sequence[Sequence[int]], schedule: Any) -> list[list[Any]]:
    """State by name, and values of every tensor here, before any move and after each; then a step."""
    pipeline = {"stages": stages, "partition": list(parts[0]), "schedule": schedule}
    engine = make(case, stages, 2, pipeline=pipeline, moe=COPIES)
    steps(engine, 0, 1)
    shuffle(engine, by_name=True)
    found = []
    for number, boundaries in enumerate(parts):
        if number:
            engine.repartition(boundaries)
        name_of = engine.module.state_name
        values = {name_of(name): p.detach().clone() for name, p in engine.module.named_parameters()}
        for name, layer in engine.expert_layers.items():
            layer.copying.settle()
            values |= {f"{name} copy {place}": tensor.clone() for place, tensor in enumerate(layer.copying.copies)}
        found.append([state(engine), engine.shared_experts.number, values])
    assert all(loss > 0 for loss in steps(engine, 1, 1))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stages", "schedule", "parts"),
    [
        (2, "1f1b", [[0, 3, 8], [0, 6, 8]]),
        (4, {"type": "multidirection", "staleness": 0, "directions": 2}, [[0, 2, 3, 5, 8], [0, 2, 5, 6, 8]]),
    ],
    ids=["1f1b", "directions"],
)
def test_every_rank_has_what_it_is_to_have(stages: int, schedule: Any, parts: Sequence[Sequence[int]]) -> None:
    """Several ranks hold the same experts, and own parts of their states."""
    ranks = run_ranks(hold, 8, ZERO._replace(layers=6), stages, parts, schedule)
    moves = [[rank[number] for rank in ranks] for number in range(len(parts))]
    wholes = [joined([{"state": told} for told, _, _ in move]) for move in moves]
    values = [
        {(name, share, number): value for number, (_, share, found) in enumerate(move) for name, value in found.items()}
        for move in moves
    ]
    by_share = []
    for found in values:
        known: dict[Any, torch.Tensor] = {}
        for (name, share, _), value in found.items():
            assert torch.equal(known.setdefault((name, share), value), value), name
        by_share.append(known)
    for whole, known in zip(wholes[1:], by_share[1:], strict=True):
        assert whole.keys() == wholes[0].keys()
        assert known.keys() == by_share[0].keys()
        for key, tensor in whole.items():
            assert torch.equal(tensor, wholes[0][key]), key
        for key, value in known.items():
            assert torch.equal(value, by_share[0][key]), key


SLOW_RANK, LAYER_S, TIMES = 3, 0.005, 5
"""A layer's forward by the clock that only work moves on, and how many times as long it takes on the slow rank."""


def follow(steps_of_run: int, partition: Mapping[str, Any], slow_rank: int | None) -> dict[str, Any]:
    """A run whose experts are placed anew, on ranks of which one may be slow."""
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    from paceline.runtime import partition_actuator

    partition_actuator.REBUILD_S = 0.01  # steps are short here: a move has to pay at the first planning
    forward = MixtralDecoderLayer.forward

    WORK_TIME.rule()
    layer_s = LAYER_S * (TIMES if slow_rank == int(os.environ["RANK"]) else 1)

    def takes_its_time(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, Work.apply(hidden_states, layer_s), *args, **kwargs)

    MixtralDecoderLayer.forward = takes_its_time
    try:
        pipeline = {"stages": 2, "partition": {"method": "uniform", **partition}}
        engine = make(PLAIN._replace(layers=6), 2, 2, pipeline=pipeline, moe={"rebalance_every": 3, "replicas": 0})
        WORK_TIME.time(engine)
        found: dict[str, Any] = {"losses": [], "parts": []}
        for step in range(steps_of_run):
            WORK_TIME.begin_step()
            found["losses"] += steps(engine, step, 1)
            found["parts"].append(tuple(engine.module.parts))
        found["decided"] = [d["step"] for d in engine.decisions.decisions if d["what"] == "experts"]
        found["windows"] = [
            (window["step"], window["steps"], layer["name"], layer["loads"])
            for window in engine.rebalancer.windows
            for layer in window["layers"]
        ]
        found["state"] = state(engine)
        costs = None if engine.controller is None else engine.controller.measurements.costs
        found["measured"] = costs and {i: item.num_parameters for i, item in enumerate(costs.items)}
        found["uneven"] = costs and dict(costs._uneven_s)
        found["layer"] = {
            i: sum(p.numel() for p in layer.parameters()) for i in engine.layers.here if (layer := engine.layers.get(i))
        }
        engine.destroy()
    finally:
        MixtralDecoderLayer.forward = forward
    return found


def follow_both(count: int) -> list[dict[str, Any]]:
    return [follow(count, {"repartition_every": 2}, SLOW_RANK), follow(count, {}, None)]


def test_layers_and_experts_follow_devices_and_loads_at_once() -> None:
    """One of the two ranks that share the second stage's experts is slow, so the stage is."""
    count = 9
    ranks = run_ranks(follow_both, 4, count)
    followed, fixed = ([rank[which] for rank in ranks] for which in range(2))
    assert all(rank["losses"] == fixed[0]["losses"] for rank in (*followed, *fixed))
    assert all(rank["parts"] == followed[0]["parts"] for rank in followed)
    assert max(parts[1] for parts in followed[0]["parts"]) > 4
    assert set(fixed[0]["parts"]) == {(0, 4, 8)}
    whole = joined(fixed)
    for key, tensor in joined(followed).items():
        assert torch.equal(tensor, whole[key]), key
    # A layer's tokens are counted wherever it is, once.
    counted, expected = (sorted(line for rank in of for line in rank["windows"]) for of in (followed, fixed))
    assert counted == expected
    assert {(step, steps_of) for step, steps_of, _, _ in counted} == {(3, 3), (6, 3), (9, 3)}
    assert len(counted) == 3 * 6
    assert set(followed[0]["decided"]) == {3, 6, 9}
    # How unevenly experts are busy is known of every layer when the partition is planned, and at no time before.
    assert followed[0]["uneven"].keys() == set(range(1, 7))
    assert all(0 <= seconds < LAYER_S * TIMES for uneven in followed[0]["uneven"].values() for seconds in uneven)
    assert min(parts[1] for parts in followed[0]["parts"][:3]) == 4
    # Of experts that lie on two ranks, each has half.
    for item, num_parameters in followed[0]["measured"].items():
        if item in followed[0]["layer"]:
            assert num_parameters == followed[0]["layer"][item]


# -- what is refused -----------------------------------------------------------------------------------------------


def finds_room(zero: int) -> list[tuple[list[str], list[int], bool]]:
    """Whether a layer moves to the second stage, with a little less memory than it needs, and with a little more."""
    engine = make(ZERO._replace(zero=zero), 2, 2, pipeline={"stages": 2, "partition": START}, moe=COPIES)
    steps(engine, 0, 1)
    shuffle(engine)
    before = state(engine)
    layers = [layer for item in engine.layers.here if (layer := engine.layers.get(item)) is not None]
    spread = {p for layer in engine.expert_layers.values() for p in layer.parameters()}
    experts, dense = (sum(p.nbytes for p in layers[-1].parameters() if (p in spread) is each) for each in (True, False))
    # Value, gradient and two moments; a copy of one of two experts; and with ZeRO 1 half the moments of what is dense.
    need = 4 * experts + experts // 2 + (4 if zero == 0 else 3) * dense
    if zero == 1:  # rows of what is there change owners, and values lie in new memory
        need += sum(2 * p.nbytes for p in engine.module.parameters() if p not in spread)
    found = []
    for share in (0.95, 1.05):
        told = []
        try:
            engine.repartition([0, 2, 6], memory_bytes=int(share * need))
        except ValueError as error:
            told.append(str(error))
        after = state(engine)
        same = all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=False))
        found.append((told, engine.module.parts, same))
    assert steps(engine, 1, 1)[0] > 0
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_what_has_no_room_stays_on_all_ranks(zero: int) -> None:
    """A share of the experts counts, with the copies that lie beside it, and nothing has moved."""
    for (refused, parts, same), (told, moved, _) in run_ranks(finds_room, 4, zero):
        assert len(refused) == 1, (refused, told)
        assert refused[0].startswith("partition [0, 2, 6] does not fit: stage 1 would take "), refused
        assert (parts, same) == (START, True)
        assert (told, moved) == ([], [0, 2, 6])


# -- checkpoints ---------------------------------------------------------------------------------------------------


BEFORE, AFTER = 2, 2


def save(root: str, case: Case, moves: bool) -> list[float]:
    """Save and export after a move of experts and, with ``moves``, of layers; the losses of the steps after it."""
    from paceline.runtime.model_export import export

    engine = make(case, 2, 2, pipeline={"stages": 2, "partition": START}, moe=BY_HAND)
    steps(engine, 0, 1)
    if moves:
        engine.repartition([0, 2, 6])
    shuffle(engine, by_name=True)
    steps(engine, 1, BEFORE - 1)
    if moves:
        engine.repartition([0, 4, 6])
    engine.save_checkpoint(root, tag="saved")
    export(engine.module, f"{root}/live", engine.control)
    return steps(engine, BEFORE, AFTER)


def load(root: str, case: Case, stages: int, experts: int, moves: bool) -> tuple[list[float], bool]:
    """Losses after a resume, and whether the experts lie as they lay."""
    section = {"moe": BY_HAND} if experts == 2 else {}
    engine = make(case, stages, experts, pipeline={"stages": stages, "partition": "uniform"}, **section)
    if moves:
        engine.repartition([0, 2, 6])
    engine.load_checkpoint(root, tag="saved")
    placed = {name: layer.placement.devices for name, layer in engine.expert_layers.items()}
    if moves:
        engine.repartition([0, 4, 6])
    return steps(engine, BEFORE, AFTER), all(
        order(int(name.split(".")[2]), case.num_experts) == devices for name, devices in placed.items()
    )


def test_checkpoints_know_nothing_of_moves(tmp_path: Path) -> None:
    """Exports too: they are those of a run whose layers stayed. They resume in every shape, and layers move on."""
    from transformers import AutoModelForCausalLM

    case = DENSE_FIRST._replace(num_experts=5)
    wanted, found = (
        run_ranks(save, 4, str(tmp_path / name), case, moves)[0] for name, moves in (("stay", False), ("move", True))
    )
    assert found == wanted
    one, other = (Checkpoint.open(tmp_path / name / "saved") for name in ("stay", "move"))
    assert sorted(one.names) == sorted(other.names)
    for name in one.names:
        assert sorted(one.kinds(name)) == sorted(other.kinds(name))
        for kind in one.kinds(name):
            assert torch.equal(one.read(name, kind), other.read(name, kind)), f"{kind} of {name}"
    exported, wanted_files = (AutoModelForCausalLM.from_pretrained(tmp_path / n / "live") for n in ("move", "stay"))
    for name, tensor in wanted_files.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    root = str(tmp_path / "move")
    for losses, as_they_lay in run_ranks(load, 4, root, case, 2, 2, True):
        assert losses == wanted
        assert as_they_lay
    losses = run_ranks(load, 4, root, case, 1, 2, False)[0][0]
    assert losses == pytest.approx(wanted, rel=1e-5)
