"""Islands that are killed, come back, stop and go on."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support.archipelago import (
    TOKENS,
    Island,
    assert_equal,
    config_of,
    lighthouse,
    lighthouses,
    run_islands,
    weights_of,
)
from support.jobs import MICRO_BATCHES, model_config, step_batches
from support.ranks import RANK_ENVIRONMENT, RankError, run_ranks

KILLED_AT, SAVED_AT, EVERY = 5, 3, 2
"""Steps; it is killed later, if it has not counted yet in a round."""
TOGETHER = 3
"""Rounds in which both count after one has come back; before it is killed there are fewer."""
CASES: dict[str, dict[str, Any]] = {
    "nesterov": {"outer": "nesterov"},
    "overlapping parts": {"parts": 2, "overlap_steps": 1, "combine_rounds": 2, "decay_tokens": 100 * TOKENS},
    "states": {"optimizer_state": "average"},
    "before the first round": {"every_tokens": (SAVED_AT + 1) * TOKENS},
}


def engine_of(light: str, stages: int, section: dict[str, Any]) -> Any:
    import paceline

    averaging = {"every_tokens": EVERY * TOKENS, "first_round": "mean", **section}
    config = config_of(light, stages, averaging, gradient_accumulation_steps=MICRO_BATCHES)
    return paceline.initialize(model=model_config(num_hidden_layers=2), config=config)[0]


def train_step(engine: Any, island: int) -> float:
    return float(engine.train_batch(iter(step_batches(1000 * island + engine.global_steps, "plain"))))


def island(
    light: str,
    stages: int,
    section: dict[str, Any],
    folder: Path | None,
    dies: bool,
    loads: bool,
    alone: Path | None = None,
) -> Any:
    """Trains until it has been in some rounds in which both count, after one in which one did not."""
    engine = engine_of(light, stages, section)
    number = engine.averager.island
    if loads:
        engine.load_checkpoint(folder)
    while True:
        train_step(engine, number)
        if dies and engine.global_steps == SAVED_AT and folder is not None:
            engine.save_checkpoint(folder)
        weights = [exchange["weights"] for exchange in engine.averager.exchanges]
        if dies and engine.global_steps >= KILLED_AT and engine.control.from_first([0.5, 0.5] in weights):
            os.kill(os.getpid(), signal.SIGKILL)
        came = max((i for i, w in enumerate(weights) if 0.0 in w), default=0)
        if [1.0] in weights[
            weights.index([0.5, 0.5]) if [0.5, 0.5] in weights else len(weights) :
        ] and alone is not None:
            alone.touch()
        if engine.control.from_first(weights[came:].count([0.5, 0.5]) >= TOGETHER):
            break
    engine.finish_averaging()
    return engine.averager.exchanges, weights_of(engine), engine.global_steps


def whole(ranks: list[Any]) -> dict[str, Tensor]:
    return {name: tensor for rank in ranks for name, tensor in rank[1].items()}


@pytest.mark.parametrize("from_checkpoint", [False, True], ids=["fresh", "from its checkpoint"])
def test_a_killed_island_comes_back(from_checkpoint: bool, tmp_path: Path) -> None:
    """All its ranks at once; the other goes on alone until it is there again, and both end with the same weights."""
    section = {"outer": "nesterov", "decay_tokens": 1000 * TOKENS}
    folder, alone = tmp_path / "saved" if from_checkpoint else None, tmp_path / "alone"
    # A machine that is busy has no time for heartbeats for a while: nobody is to count as dead for that.
    with lighthouse("--heartbeat-timeout-s", "10") as light, ThreadPoolExecutor(1) as pool:
        args = light, 1, {**section, "min_islands": 1}, None, False, False, alone
        other = pool.submit(run_ranks, island, 1, *args, env={**RANK_ENVIRONMENT, "PACELINE_ISLAND": "0"})
        environment = {**RANK_ENVIRONMENT, "PACELINE_ISLAND": "1"}
        section["min_islands"] = 2
        with pytest.raises(RankError, match="SIGKILL"):
            run_ranks(island, 2, light, 2, section, folder, True, False, env=environment)
        while not alone.exists() and not other.done():  # its rounds go on
            time.sleep(0.1)
        again = run_ranks(island, 2, light, 2, section, folder, False, from_checkpoint, env=environment)
        stayed = other.result()
    assert_equal(whole(again), whole(stayed))
    exchanges = again[0][0]
    assert sorted(exchanges[0]["weights"]) == [0.0, 1.0]  # it takes the other's
    for before, exchange in pairwise(exchanges):  # it counts, unless it was late and a round went on without it
        assert exchange["weights"] == [0.5, 0.5] or exchange["round"] > before["round"] + 1, exchanges
    assert exchanges[0]["round"] > 2
    assert stayed[0][0][-1]["round"] == exchanges[-1]["round"]


def stopped_and_resumed(lights: list[str], folder: str, number: int) -> dict[str, Any]:
    """Losses and final weights of a job, and of one from its checkpoint on."""
    found = {}
    for name, section in CASES.items():
        runs = []
        for light in (lights.pop(0), lights.pop(0)):
            engine = engine_of(light, 1, {"min_islands": 2, **section})
            path = Path(folder, name, str(number))
            if runs:
                engine.load_checkpoint(path)
            losses = []
            while engine.global_steps < 2 * SAVED_AT:
                losses.append(train_step(engine, number))
                if not runs and engine.global_steps == SAVED_AT:
                    engine.save_checkpoint(path)
            engine.finish_averaging()
            runs.append((losses[-SAVED_AT:], weights_of(engine), engine.averager.tokens_of_all))
            engine.destroy()
        found[name] = runs
    return found


def test_islands_that_are_resumed_go_on_as_if_not_stopped(tmp_path: Path) -> None:
    with lighthouses(2 * len(CASES)) as lights:
        jobs = [Island(stopped_and_resumed, 1, (lights, str(tmp_path), number)) for number in range(2)]
        islands = [ranks[0] for ranks in run_islands(jobs)]
    for name in CASES:
        for found in islands:
            (losses, weights, tokens), (resumed_losses, resumed, resumed_tokens) = found[name]
            assert (resumed_losses, resumed_tokens) == (losses, tokens), name
            assert_equal(resumed, weights)
        assert_equal(islands[0][name][0][1], islands[1][name][0][1])


def alone_and_then_together(lights: list[str], folder: str, number: int) -> dict[str, Tensor]:
    """Final weights of a job that was in as many rounds as the other one before they meet, each by itself."""
    section, path = {"outer": "nesterov", "parts": 2}, Path(folder, str(number))
    for light, islands in ((lights[number], 1), (lights[-1], 2)):
        engine = engine_of(light, 1, {"min_islands": islands, **section})
        if islands == 2:
            engine.load_checkpoint(path)
        for _ in range(SAVED_AT * EVERY):
            train_step(engine, number)
        if islands == 1:
            engine.save_checkpoint(path)
        else:
            engine.finish_averaging()
        weights = weights_of(engine)
        engine.destroy()
    return weights


def test_islands_that_have_trained_alone_become_equal(tmp_path: Path) -> None:
    """Their outer optimizers differ, though their rounds have the same numbers."""
    with lighthouses(3) as lights:
        jobs = [Island(alone_and_then_together, 1, (lights, str(tmp_path), number)) for number in range(2)]
        (first,), (second,) = run_islands(jobs)
    assert_equal(first, second)
