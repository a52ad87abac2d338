"""Decoder layers cut between attention and MLP train exactly as whole ones do."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from support.jobs import LAYERS, assert_equal, train, train_alone
from support.ranks import OneAfterAnother, on, run_ranks

STEPS = 4
UNTIED = {"tie_word_embeddings": False, "steps": STEPS}
BF16 = {"bf16": {"enabled": True}}


def halves(ranks: int, partition: Any = "work", stages: int | None = None, **options: Any) -> Any:
    return on(ranks, stages or ranks, partition=partition, half_layers=True, **options)


LAST = 2 * LAYERS + 2
"""The last boundary: embedding, two halves a layer, head."""
MIDDLE = {2: [0, 4, LAST], 3: [0, 2, 5, LAST], 4: [0, 2, 4, 7, LAST]}
"""Boundaries within decoder layers, by the number of stages."""
RUNS = OneAfterAnother(
    train,
    {
        "whole": on(1, 1, **UNTIED),
        **{("halves", n): halves(n, MIDDLE[n], **UNTIED) for n in (2, 3)},
        "bf16, ZeRO 1, whole": on(4, 2, zero=1, more=BF16, **UNTIED),
        "bf16, ZeRO 1": halves(4, MIDDLE[2], 2, zero=1, more=BF16, **UNTIED),
        **{family: halves(3, MIDDLE[3], family=family, steps=STEPS) for family in ("gpt2", "mixtral")},
        "recomputed": halves(2, MIDDLE[2], checkpointing=True, **UNTIED),
        **{kind: halves(2, MIDDLE[4], schedule={"type": kind}, **UNTIED) for kind in ("interleaved", "zbv")},
        "work": halves(3, **UNTIED),
    },
    at_once=8,
)


@lru_cache
def alone(family: str) -> dict[str, Any]:
    return run_ranks(train_alone, 1, family=family, steps=STEPS)[0]


@pytest.mark.parametrize("stages", [2, 3])
def test_no_bit_differs_from_whole_layers(stages: int) -> None:
    assert_equal(RUNS["halves", stages], RUNS["whole"])


def test_each_half_is_on_one_rank() -> None:
    first, second = RUNS["halves", 2]  # the cut is after the attention of layer 1
    of_layer = "model.layers.1."
    assert {name.split(".")[3] for name in first["state"] if name.startswith(of_layer)} == {
        "self_attn",
        "input_layernorm",
    }
    assert {name.split(".")[3] for name in second["state"] if name.startswith(of_layer)} == {
        "mlp",
        "post_attention_layernorm",
    }
    assert not first["state"].keys() & second["state"].keys()


def test_replicas_and_sharded_states_in_bf16() -> None:
    assert_equal(RUNS["bf16, ZeRO 1"], RUNS["bf16, ZeRO 1, whole"])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families(family: str) -> None:
    """Position embeddings that are added; the router's auxiliary loss, of the halves that have a router."""
    wanted = alone(family)
    for rank in RUNS[family]:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert rank["evaluation"]["eval_loss"] == pytest.approx(wanted["evaluation"]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules(schedule: str) -> None:
    assert_equal(RUNS[schedule], RUNS["whole"])


def test_activation_checkpointing() -> None:
    assert_equal(RUNS["recomputed"], RUNS["whole"])


def test_work_decides_where_layers_are_cut() -> None:
    assert_equal(RUNS["work"], RUNS["whole"])
