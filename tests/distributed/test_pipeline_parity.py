"""A pipeline trains exactly as a single process does: stages × replicas × ZeRO, padding, masks, tied weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from support.jobs import train, train_alone
from support.ranks import run_ranks


@lru_cache
def reference(**kwargs: Any) -> dict[str, Any]:
    return run_ranks(train_alone, 1, **kwargs)[0]


def assert_close(losses: list[float], wanted: list[float], relative: float = 1e-6) -> None:
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    assert max(differences) <= relative, f"step {differences.index(max(differences))}: {max(differences):.2e}"


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipeline_is_single_process(stages: int, replicas: int, zero: int) -> None:
    ranks = run_ranks(train, stages * replicas, stages, zero=zero, clipping=0.5)
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
    runs = [
        run_ranks(train, stages * replicas, stages, zero=zero, tie_word_embeddings=False, steps=6)
        for stages in (1, 2, 3, 4)
    ]
    whole = runs[0][0]
    for run in runs[1:]:
        for rank in run:
            assert rank["losses"] == whole["losses"]
            for name, tensor in rank["state"].items():
                assert torch.equal(tensor, whole["state"][name]), name


@pytest.mark.parametrize("kind", ["prompt", "packed", "ragged"])
def test_loss_is_exact_for_every_kind_of_batch(kind: str) -> None:
    ranks = run_ranks(train, 4, 2, kind=kind, steps=5)
    assert_close(ranks[0]["losses"], reference(kind=kind, steps=5)["losses"])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize("stages", [2, 3])
def test_other_families(family: str, stages: int) -> None:
    """Position embeddings that are added; the router's auxiliary loss, whose sums ride along with the activations."""
    ranks = run_ranks(train, stages, stages, family=family, steps=5)
    wanted = reference(family=family, steps=5)
    assert_close(ranks[0]["losses"], wanted["losses"])
    assert_close([ranks[0]["evaluation"]["eval_loss"]], [wanted["evaluation"]["eval_loss"]])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_activation_checkpointing_changes_nothing(family: str) -> None:
    plain, checkpointed = (run_ranks(train, 2, 2, family=family, steps=5, checkpointing=on)[0] for on in (False, True))
    assert plain["losses"] == checkpointed["losses"]
    for name, tensor in plain["state"].items():
        assert torch.equal(tensor, checkpointed["state"][name]), name


@pytest.mark.parametrize("partition", [[0, 1, 6], [0, 5, 6], "parameters", "type:LlamaDecoderLayer"])
def test_any_partition(partition: Any) -> None:
    """Also a stage that holds nothing but the embedding, and one that holds nothing but norm and head."""
    ranks = run_ranks(train, 2, 2, partition=partition, steps=5)
    assert_close(ranks[0]["losses"], reference(steps=5)["losses"])


@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_follows_fp32(zero: int) -> None:
    ranks = run_ranks(train, 2, 2, zero=zero, clipping=0.5, more={"bf16": {"enabled": True}})
    wanted = reference(clipping=0.5)
    assert_close(ranks[0]["losses"], wanted["losses"], 2e-3)
    assert_close(ranks[0]["norms"], wanted["norms"], 5e-2)
    assert ranks[0]["losses"] != wanted["losses"]
