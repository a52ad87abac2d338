"""Islands that average: real jobs of several ranks each, a lighthouse and sockets between them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor

from support.archipelago import (
    TOKENS,
    Island,
    assert_equal,
    assert_near,
    config_of,
    lighthouses,
    mean_of,
    run_islands,
    weights_of,
)
from support.jobs import MICRO_BATCHES, model_config, step_batches
from support.ranks import run_ranks


def pipeline_island(
    light: str,
    stages: int,
    averaging: dict[str, Any] | None,
    steps: int,
    seed: int,
    changes: dict[str, Any],
    family: str = "llama",
) -> dict[str, Any]:
    import paceline

    slices = changes.get("tensor_parallel", {}).get("autotp_size", 1)
    micro_batches = MICRO_BATCHES * stages * slices // int(os.environ["WORLD_SIZE"])
    config = config_of(light, stages, averaging, gradient_accumulation_steps=micro_batches, **changes)
    engine, *_ = paceline.initialize(model=model_config(family), config=config)
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    losses, weights = [], []
    for step in range(steps):
        batches = step_batches(1000 * seed + step, "plain")
        losses.append(engine.train_batch(iter(batches[replica::replicas])).item())
        weights.append(weights_of(engine))
    engine.finish_averaging()
    averager = engine.averager
    return {
        "losses": losses,
        "weights": weights,
        "final": weights_of(engine),
        "rounds": None if averager is None else averager.round,
        "exchanges": None if averager is None else averager.exchanges,
        "factor": None if averager is None else averager.learning_rate_factor,
    }


def whole(ranks: list[dict[str, Any]], step: int | None = None) -> dict[str, Tensor]:
    """The model of an island, from its ranks."""
    merged: dict[str, Tensor] = {}
    for rank in ranks:
        merged |= rank["final"] if step is None else rank["weights"][step]
    return merged


ROUNDS = {"min_islands": 2, "every_tokens": 2 * TOKENS, "first_round": "mean"}


@pytest.mark.parametrize(
    ("shapes", "changes"),
    [
        ([(2, 2), (1, 1)], {}),
        ([(2, 4), (1, 2)], {"zero_optimization": {"stage": 1}}),
        ([(1, 2), (1, 1)], {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    ],
)
def test_a_round_is_the_mean_whatever_the_islands_shapes(shapes: Any, changes: dict[str, Any]) -> None:
    """Stages, replicas, ZeRO: after a round every island has the mean of what they had, masters included."""
    steps, every = 4, 2
    with lighthouses(1) as (light,):
        islands = [
            Island(pipeline_island, ranks, (light, stages, ROUNDS, steps, number, changes))
            for number, (stages, ranks) in enumerate(shapes)
        ]
        found = run_islands(islands)
        alone = [
            run_ranks(pipeline_island, ranks, light, stages, None, every, number, changes)
            for number, (stages, ranks) in enumerate(shapes)
        ]
    wanted = mean_of([whole(ranks) for ranks in alone])
    half = bool(changes.get("bf16"))
    for ranks in found:
        assert_near(whole(ranks, every - 2), whole(alone[found.index(ranks)], 0), 1e-6)
        assert_near(whole(ranks, every - 1), wanted, 1e-2 if half else 1e-6)
    for step in (every - 1, None):
        assert_equal(whole(found[0], step), whole(found[1], step))
    assert {rank["rounds"] for ranks in found for rank in ranks} == {2}  # at the end there was nothing new
    (first, last) = found[0][0]["exchanges"][-2:]
    assert first["islands"] == [0, 1] or first["islands"] == [1, 0]
    assert first["weights"] == last["weights"] == [0.5, 0.5]


@pytest.mark.parametrize("optimizer_state", ["keep", "average"])
def test_islands_whose_layers_are_in_slices(optimizer_state: str) -> None:
    """Each rank ends a round with the mean of what its slices were in all islands."""
    steps, every = 4, 2
    changes = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    with lighthouses(1) as (light,):
        rounds = ROUNDS | {"optimizer_state": optimizer_state}
        islands = [
            Island(pipeline_island, ranks, (light, stages, rounds, steps, number, changes, "qwen3"))
            for number, (stages, ranks) in enumerate([(2, 4), (1, 2)])
        ]
        found = run_islands(islands)
        alone = [
            run_ranks(pipeline_island, ranks, light, stages, None, every, number, changes, "qwen3")
            for number, (stages, ranks) in enumerate([(2, 4), (1, 2)])
        ]
    for number in range(2):
        own = [whole(ranks[number::2]) for ranks in alone]
        for ranks in found:
            assert_near(whole(ranks[number::2], every - 1), mean_of(own), 1e-6)
        assert_equal(*(whole(ranks[number::2]) for ranks in found))


def test_islands_with_more_and_fewer_steps_end_with_the_same_weights() -> None:
    """Rounds are a matter of tokens: those of ordinary data never end at the same step on all islands."""
    averaging = {**ROUNDS, "outer": "nesterov", "parts": 2, "overlap_steps": 1}
    with lighthouses(1) as (light,):
        islands = [
            Island(pipeline_island, 1, (light, 1, averaging, steps, number, {})) for number, steps in enumerate((3, 8))
        ]
        found = run_islands(islands)
    assert_equal(whole(found[0]), whole(found[1]))
    assert found[0][0]["rounds"] == found[1][0]["rounds"]


def expert_island(light: str, averaging: dict[str, Any] | None, seed: int, expert_parallel: int) -> Any:
    """Experts on so many ranks, and elsewhere than at the start; the whole model after two steps, on the first rank."""
    import paceline
    from paceline.averaging.masters_by_name import PipelineMasters
    from paceline.planning.experts import Placement
    from support import expert_models

    changes: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES // expert_parallel}
    if expert_parallel > 1:
        changes["expert_parallel"] = {"enabled": True, "autoep_size": expert_parallel}
    config = config_of(light, 1, averaging, **changes)
    if expert_parallel > 1:
        config["paceline"]["moe"] = {"rebalance_every": 0}
    model = model_config("mixtral", router_aux_loss_coef=0.0, num_local_experts=5)
    engine, *_ = paceline.initialize(model=model, config=config)
    if expert_parallel > 1:
        expert_models.scatter_experts(engine, 1)
    rank = engine.grid.data_parallel_id
    for step in range(2):
        engine.train_batch(iter(step_batches(1000 * seed + step, "plain")[rank::expert_parallel]))
    masters = PipelineMasters(engine.control, engine.module, engine.optimizer, engine.experts.fetch)
    names = sorted(masters.numels())
    found = masters.gather(names)
    in_order = Placement.contiguous(5, expert_parallel)
    moved = any(layer.placement != in_order for layer in engine.expert_layers.values())
    return None if found is None else (dict(zip(names, found, strict=True)), moved)


def test_experts_average_wherever_they_lie() -> None:
    """On two ranks in another order than the model's, and all of them on one rank."""
    with lighthouses(1) as (light,):
        found = run_islands([Island(expert_island, size, (light, ROUNDS, 2 - size, size)) for size in (2, 1)])
    alone = [run_ranks(expert_island, size, light, None, 2 - size, size) for size in (2, 1)]
    ((here, moved), *_), ((there, _), *_) = found
    assert moved
    assert_equal(here, there)
    assert_near(here, mean_of([ranks[0][0] for ranks in alone]), 2e-6)


def rates_of_updates(lights: list[str]) -> list[list[float]]:
    """Learning rates that the updates have had, with a flush and without."""
    import paceline

    found = []
    for light, schedule in zip(lights, ("1f1b", "one_direction"), strict=True):
        averaging = {"every_tokens": 10**9, "decay_tokens": 5 * TOKENS, "scale_learning_rate": False}
        changes = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_accumulation_steps": MICRO_BATCHES}
        config = config_of(light, 2, averaging, **changes)
        config["paceline"]["pipeline"]["schedule"] = schedule
        engine, *_ = paceline.initialize(model=model_config(), config=config)
        rates: list[float] = []
        found.append(rates)
        engine.basic_optimizer.register_step_pre_hook(lambda o, *_, r=rates: r.append(o.param_groups[0]["lr"]))
        for step in range(3):
            engine.train_batch(iter(step_batches(step, "plain")))
        engine.flush()
        engine.destroy()
    return found


def test_rates_that_fall_with_tokens_are_those_of_the_steps_on_all_stages() -> None:
    with lighthouses(2) as lights:
        found = run_ranks(rates_of_updates, 2, lights, env={"PACELINE_ISLAND": "0"})
    wanted = pytest.approx([0.1 ** (step / 5) for step in range(3)])
    assert found == [[wanted, wanted]] * 2


def test_one_island_is_the_job_without_averaging_in_every_bit() -> None:
    stages = 2
    changes = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0.5}
    with lighthouses(1) as (light,):
        averaging = {"every_tokens": 2 * TOKENS}
        (found,) = run_islands([Island(pipeline_island, stages, (light, stages, averaging, 6, 0, changes))])
    alone = run_ranks(pipeline_island, stages, light, stages, None, 6, 0, changes)
    for rank, other in zip(found, alone, strict=True):
        assert rank["losses"] == other["losses"]
        for weights, others in zip(rank["weights"], other["weights"], strict=True):
            assert_equal(weights, others)
        assert_equal(rank["final"], other["final"])
        assert rank["rounds"] == 3
