"""A pipeline trains exactly as a single process does: stages × replicas × ZeRO, padding, masks, tied weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches, train, train_alone
from support.ranks import OneAfterAnother, on, run_ranks


@lru_cache
def reference(**kwargs: Any) -> dict[str, Any]:
    return run_ranks(train_alone, 1, **kwargs)[0]


def assert_close(losses: list[float], wanted: list[float], relative: float = 1e-6) -> None:
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    assert max(differences) <= relative, f"step {differences.index(max(differences))}: {max(differences):.2e}"


STEPS = 4
CLIPPED = {"clipping": 0.5, "steps": STEPS}
UNTIED = {"tie_word_embeddings": False, "steps": STEPS}
KINDS = ("prompt", "packed", "ragged")
PARTITIONS = ([0, 1, 6], [0, 5, 6], "type:LlamaDecoderLayer")
SHAPES = [(1, 2, 1), (2, 1, 0), (2, 2, 1), (3, 2, 0), (4, 1, 1)]
"""Stages, replicas, ZeRO."""
UP_TO = {(1, 0): 4, (2, 1): 3}
"""Replicas and ZeRO, and the most stages."""
RUNS = OneAfterAnother(
    train,
    {
        **{(*shape, "tied"): on(shape[0] * shape[1], shape[0], zero=shape[2], **CLIPPED) for shape in SHAPES},
        **{
            (stages, replicas, zero, "untied"): on(stages * replicas, stages, zero=zero, **UNTIED)
            for (replicas, zero), most in UP_TO.items()
            for stages in range(1, most + 1)
        },
        **{kind: on(4, 2, kind=kind, steps=STEPS) for kind in KINDS},
        **{family: on(3, 3, family=family, steps=STEPS) for family in ("gpt2", "mixtral")},
        "recomputed": on(3, 3, family="mixtral", steps=STEPS, checkpointing=True),
        **{str(partition): on(2, 2, partition=partition, steps=STEPS) for partition in PARTITIONS},
        "bf16": on(2, 2, zero=1, more={"bf16": {"enabled": True}}, **CLIPPED),
    },
    at_once=8,
)


@pytest.mark.parametrize(("stages", "replicas", "zero"), SHAPES)
def test_pipeline_is_single_process(stages: int, replicas: int, zero: int) -> None:
    ranks = RUNS[stages, replicas, zero, "tied"]
    wanted = reference(**CLIPPED)
    for rank in ranks:
        assert_close(rank["losses"], wanted["losses"])
        assert_close(rank["norms"], wanted["norms"], 1e-5)
        assert rank["losses"] == ranks[0]["losses"]
        assert_close([rank["evaluation"]["eval_loss"]], [wanted["evaluation"]["eval_loss"]])
        assert rank["evaluation"]["eval_tokens"] == wanted["evaluation"]["eval_tokens"]
    # Adam turns the rounding of near-zero gradients into steps of the learning rate; weights agree to a few of those.
    for rank in ranks:
        for name, tensor in rank["state"].items():
            torch.testing.assert_close(tensor, wanted["state"][name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize(("replicas", "zero"), UP_TO)
def test_stage_counts_agree_bitwise(replicas: int, zero: int) -> None:
    """Without clipping no sum runs over stages, so nothing may differ: not the losses, not a bit of any weight.

    Weights are not tied here: of a tied weight the head's and the embedding's gradients are two sums on two stages.
    """
    runs = [RUNS[stages, replicas, zero, "untied"] for stages in range(1, UP_TO[replicas, zero] + 1)]
    whole = runs[0][0]
    for run in runs[1:]:
        for rank in run:
            assert rank["losses"] == whole["losses"]
            for name, tensor in rank["state"].items():
                assert torch.equal(tensor, whole["state"][name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_exact_for_every_kind_of_batch(kind: str) -> None:
    assert_close(RUNS[kind][0]["losses"], reference(kind=kind, steps=STEPS)["losses"])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families(family: str) -> None:
    """Position embeddings that are added; the router's auxiliary loss, whose sums ride along with the activations."""
    ranks = RUNS[family]
    wanted = reference(family=family, steps=STEPS)
    assert_close(ranks[0]["losses"], wanted["losses"])
    assert_close([ranks[0]["evaluation"]["eval_loss"]], [wanted["evaluation"]["eval_loss"]])


def test_activation_checkpointing_changes_nothing() -> None:
    """Routers among what is computed again."""
    for plain, recomputed in zip(RUNS["mixtral"], RUNS["recomputed"], strict=True):
        assert plain["losses"] == recomputed["losses"]
        for name, tensor in plain["state"].items():
            assert torch.equal(tensor, recomputed["state"][name]), name


@pytest.mark.parametrize("partition", [*map(str, PARTITIONS)])
def test_any_partition(partition: str) -> None:
    """Also a stage that holds nothing but the embedding, and one that holds nothing but norm and head."""
    assert_close(RUNS[partition][0]["losses"], reference(steps=STEPS)["losses"])


def test_bf16_follows_fp32() -> None:
    ranks = RUNS["bf16"]
    wanted = reference(**CLIPPED)
    assert_close(ranks[0]["losses"], wanted["losses"], 2e-3)
    assert_close(ranks[0]["norms"], wanted["norms"], 5e-2)
    assert ranks[0]["losses"] != wanted["losses"]


def freezes(stages: int, schedule: str | None) -> list[float]:
    """Losses; tied embeddings are frozen in the second step and the third. Nothing is stale."""
    import paceline

    section = {"pipeline": {"stages": stages, "partition": "uniform", "schedule": schedule}}
    engine, *_ = paceline.initialize(
        model=model_config(), config=ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section)
    )
    losses = []
    for step in range(5):
        for name, parameter in engine.module.named_parameters():
            if "embed_tokens" in name:
                parameter.requires_grad_(step not in (1, 2))
        losses.append(engine.train_batch(iter(step_batches(step))).item())
        engine.flush()
    return losses


@pytest.mark.parametrize("schedule", [None, "one_direction"])
def test_tied_weights_that_are_frozen_stay_as_they_are(schedule: str | None) -> None:
    """A weight without a gradient is not stepped, and its moments neither."""
    (wanted,) = run_ranks(freezes, 1, 1, None)
    for losses in run_ranks(freezes, 2, 2, schedule):
        assert_close(losses, wanted)
