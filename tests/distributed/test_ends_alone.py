"""Stages that hold the embedding alone, or the head alone, train exactly as others do."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from support.jobs import LAYERS, MICRO_BATCHES, assert_equal, ds_config, model_config, step_batches, train, train_alone
from support.ranks import OneAfterAnother, on, run_ranks

STEPS = 3
UNTIED = {"tie_word_embeddings": False, "steps": STEPS}
BOTH = [0, 1, LAYERS + 1, LAYERS + 2]
"""Embedding | decoder layers | head."""
HEAD = [0, LAYERS + 1, LAYERS + 2]
FAMILIES = ("gpt2", "mixtral")
LARGE = {**UNTIED, "vocab_size": 2048, "max_position_embeddings": 64}
"""With a head that has more work than all layers."""
RUNS = OneAfterAnother(
    train,
    {
        "whole": on(1, 1, **UNTIED),
        "both": on(3, 3, partition=BOTH, **UNTIED),
        "zbh1": on(3, 3, partition=BOTH, schedule={"type": "zbh1"}, **UNTIED),
        "interleaved": on(
            2, 2, partition=[0, 1, 3, LAYERS + 1, LAYERS + 2], schedule={"type": "interleaved"}, **UNTIED
        ),
        "checkpointing": on(2, 2, partition=HEAD, checkpointing=True, **UNTIED),
        "replicas": on(4, 2, zero=1, **UNTIED),
        "replicas, head alone": on(4, 2, partition=HEAD, zero=1, **UNTIED),
        **{family: on(3, 3, partition=BOTH, family=family, steps=STEPS) for family in FAMILIES},
        "large head": on(2, 2, partition="work", **LARGE),
        "large head, whole": on(1, 1, **LARGE),
    },
    at_once=8,
)


@lru_cache
def alone(family: str) -> dict[str, Any]:
    return run_ranks(train_alone, 1, family=family, steps=STEPS)[0]


@pytest.mark.parametrize("kind", ["both", "zbh1", "interleaved", "checkpointing"])
def test_no_bit_differs_from_one_stage(kind: str) -> None:
    assert_equal(RUNS[kind], RUNS["whole"])


def test_replicas_and_sharded_states() -> None:
    assert_equal(RUNS["replicas, head alone"], RUNS["replicas"])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family: str) -> None:
    """Position embeddings that are added, a head that shares the embedding, a router's auxiliary loss."""
    wanted = alone(family)
    for rank in RUNS[family]:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert rank["evaluation"]["eval_loss"] == pytest.approx(wanted["evaluation"]["eval_loss"], rel=1e-6)


def test_by_work_a_large_head_is_a_stage_of_its_own() -> None:
    assert RUNS["large head"][1]["state"].keys() == {"model.norm.weight", "lm_head.weight"}
    assert_equal(RUNS["large head"], RUNS["large head, whole"])


def times_of(partition: list[int]) -> tuple[dict[int, Any], list[int]]:
    """Times of the items of this rank, measured in a step; and boundaries after the layers have moved."""
    import paceline

    section = {"pipeline": {"stages": 2, "partition": partition}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section)
    engine, *_ = paceline.initialize(model=model_config("llama", tie_word_embeddings=False), config=config)
    engine.meter.time_layers(engine.layers)
    engine.train_batch(iter(step_batches(0, "padded")))
    reports = engine.meter.stop_timing_layers(engine.layers, engine.micro_batch_size)
    engine.repartition([0, 3, LAYERS + 2])
    engine.repartition(HEAD)
    engine.train_batch(iter(step_batches(1, "padded")))
    return {item: report.times for item, report in reports.items()}, list(engine.layers.parts)


@pytest.mark.parametrize("partition", [HEAD, [0, 1, LAYERS + 2]], ids=["head", "embedding"])
def test_what_is_alone_is_timed_and_layers_move_to_it_and_away(partition: list[int]) -> None:
    (first, parts), (second, _) = run_ranks(times_of, 2, partition)
    assert parts == HEAD
    times = first | second
    assert times.keys() == set(range(LAYERS + 2))
    head = times[LAYERS + 1]
    assert all(found.forward_s > 0 and found.backward_s > 0 for found in times.values())
    assert head.output_bytes == 0 < head.saved_bytes
    assert times[0].output_bytes == times[1].output_bytes


def losses_with(what: str, partition: Any) -> list[float]:
    """Losses of two stages with natural gradients, or with adapters as all that is trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import paceline

    section: dict[str, Any] = {"pipeline": {"stages": 2, "partition": partition}}
    model = model_config("llama", tie_word_embeddings=False)
    if what == "adapters":
        torch.manual_seed(0)
        adapters = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_config(model), adapters)
    else:
        section["natural_gradient"] = {"alpha": 1.0}
    optimizer = {"type": "SGD", "params": {"lr": 1e-2}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section, optimizer=optimizer)
    engine, *_ = paceline.initialize(model=model, config=config)
    return [float(engine.train_batch(iter(step_batches(step, "full")))) for step in range(STEPS)]


WHAT = ("adapters", "natural gradients")
LOSSES = OneAfterAnother(
    losses_with,
    {(what, place): on(2, what, cut) for what in WHAT for place, cut in [("alone", HEAD), ("usual", "uniform")]},
)


@pytest.mark.parametrize("what", WHAT)
def test_a_head_alone_changes_no_loss(what: str) -> None:
    """With adapters the stage of the head has nothing to train."""
    usual = LOSSES[what, "usual"]
    assert LOSSES[what, "alone"] == usual
    assert len(set(usual[0])) == STEPS
