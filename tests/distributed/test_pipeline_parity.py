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


UNTIED = {"tie_word_embeddings": False, "steps": 6}
KINDS = ("prompt", "packed", "ragged")
PARTITIONS = ([0, 1, 6], [0, 5, 6], "parameters", "type:LlamaDecoderLayer")
SHAPES = [(stages, replicas, zero) for stages in (1, 2, 3, 4) for replicas in (1, 2) for zero in (0, 1)]
RUNS = OneAfterAnother(
    train,
    {
        **{(*shape, "tied"): on(shape[0] * shape[1], shape[0], zero=shape[2], clipping=0.5) for shape in SHAPES},
        **{(*shape, "untied"): on(shape[0] * shape[1], shape[0], zero=shape[2], **UNTIED) for shape in SHAPES},
        **{kind: on(4, 2, kind=kind, steps=5) for kind in KINDS},
        **{(family, n): on(n, n, family=family, steps=5) for family in ("gpt2", "mixtral") for n in (2, 3)},
        **{
            (family, is_on): on(2, 2, family=family, steps=5, checkpointing=is_on)
            for family in ("llama", "mixtral")
            for is_on in (False, True)
        },
        **{str(partition): on(2, 2, partition=partition, steps=5) for partition in PARTITIONS},
        **{
            f"bf16, ZeRO {zero}": on(2, 2, zero=zero, clipping=0.5, more={"bf16": {"enabled": True}}) for zero in (0, 1)
        },
    },
    at_once=8,
)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipeline_is_single_process(stages: int, replicas: int, zero: int) -> None:
    ranks = RUNS[stages, replicas, zero, "tied"]
    wanted = reference(clipping=0.5)
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


@pytest.mark.parametrize(("replicas", "zero"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_stage_counts_agree_bitwise(replicas: int, zero: int) -> None:
    """Without clipping no sum runs over stages, so nothing may differ: not the losses, not a bit of any weight.

    Weights are not tied here: of a tied weight the head's and the embedding's gradients are two sums on two stages.
    """
    runs = [RUNS[stages, replicas, zero, "untied"] for stages in (1, 2, 3, 4)]
    whole = runs[0][0]
    for run in runs[1:]:
        for rank in run:
            assert rank["losses"] == whole["losses"]
            for name, tensor in rank["state"].items():
                assert torch.equal(tensor, whole["state"][name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_exact_for_every_kind_of_batch(kind: str) -> None:
    assert_close(RUNS[kind][0]["losses"], reference(kind=kind, steps=5)["losses"])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize("stages", [2, 3])
def test_other_families(family: str, stages: int) -> None:
    """Position embeddings that are added; the router's auxiliary loss, whose sums ride along with the activations."""
    ranks = RUNS[family, stages]
    wanted = reference(family=family, steps=5)
    assert_close(ranks[0]["losses"], wanted["losses"])
    assert_close([ranks[0]["evaluation"]["eval_loss"]], [wanted["evaluation"]["eval_loss"]])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_activation_checkpointing_changes_nothing(family: str) -> None:
    plain, checkpointed = (RUNS[family, is_on][0] for is_on in (False, True))
    assert plain["losses"] == checkpointed["losses"]
    for name, tensor in plain["state"].items():
        assert torch.equal(tensor, checkpointed["state"][name]), name


@pytest.mark.parametrize("partition", [*map(str, PARTITIONS)])
def test_any_partition(partition: str) -> None:
    """Also a stage that holds nothing but the embedding, and one that holds nothing but norm and head."""
    assert_close(RUNS[partition][0]["losses"], reference(steps=5)["losses"])


@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_follows_fp32(zero: int) -> None:
    ranks = RUNS[f"bf16, ZeRO {zero}"]
    wanted = reference(clipping=0.5)
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
