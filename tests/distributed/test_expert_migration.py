"""Layers whose experts lie on several ranks change stage, and every bit is that of a run in which they stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from support.expert_pipelines import Case, joined, make, shuffle, state, steps
from support.ranks import run_ranks

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
    """

    case: Case
    schedule: Any = "1f1b"
    moe: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = {}
    start: Sequence[int] = START
    moves: Moves = MOVES
    shuffled: Sequence[int] = ()


def train(run: Run, moves: Moves) -> dict[str, Any]:
    pipeline = {"stages": 2, "partition": list(run.start), "schedule": run.schedule}
    section = {**run.more, **({} if run.moe is None else {"moe": dict(run.moe)})}
    engine = make(run.case, 2, 2, pipeline=pipeline, **section)
    losses, num_bytes, placed = [], 0, []
    for step in range(STEPS):
        if step in run.shuffled:
            shuffle(engine, by_name=True)
        if step in run.moves:
            engine.flush()
        for parts in moves.get(step, ()):
            figures = engine.repartition(parts)
            num_bytes += 0 if figures is None else figures["bytes"]
        names = [name.split(".")[2] for name in engine.expert_layers]
        assert names == sorted(names), names
        assert all(layer.name == name for name, layer in engine.expert_layers.items())
        placed.append({name: layer.placement.devices for name, layer in engine.expert_layers.items()})
        losses += steps(engine, step, 1)
    engine.flush()
    found = {"losses": losses, "state": state(engine), "bytes": num_bytes, "placed": placed}
    found["routed"] = {name: layer.routed.clone() for name, layer in engine.expert_layers.items()}
    engine.destroy()
    return found


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


@pytest.mark.parametrize("case", [PLAIN, ZERO], ids=["ZeRO 0", "ZeRO 1"])
def test_layers_move_with_their_experts(case: Case) -> None:
    """In the model's order, where nothing moves them; in another order from the start, and from a later step on."""
    shuffled = Run(case, moe=BY_HAND, shuffled=(0, 3))
    check({"in order": Run(case), "shuffled": shuffled})


def test_copies_of_experts_move_too() -> None:
    """The sums over an expert's copies are in one order too, since they lie on ranks of the same numbers."""
    planned = {**COPIES, "splitting": "planned"}
    check({"even": Run(ZERO, moe=COPIES, shuffled=(0, 3)), "planned": Run(PLAIN, moe=planned, shuffled=(1,))})


def test_a_stage_gets_its_first_experts_and_gives_its_last_ones_away() -> None:
    """The first layer is dense."""
    moves: Moves = {1: [[0, 2, 6]], 2: [[0, 4, 6]], 3: [[0, 2, 6]]}
    check({"dense first": Run(DENSE_FIRST, moe=BY_HAND, moves=moves, shuffled=(0, 2))})


LATE = {1: [[0, 2, 6]], 3: [[0, 4, 6]]}


@pytest.mark.parametrize(
    "run",
    [
        Run(ZERO, {"type": "one_direction"}, COPIES, moves=LATE, shuffled=(1, 3)),
        Run(PLAIN._replace(checkpointing=True), {"type": "gpipe"}, BY_HAND, shuffled=(0,)),
        Run(ZERO._replace(dtype="bf16"), "1f1b", BY_HAND, shuffled=(0,)),
    ],
    ids=["no flush", "recomputed", "bf16"],
)
def test_with_other_features(run: Run) -> None:
    check({"": run})
