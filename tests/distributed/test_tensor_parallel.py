"""Layers in slices on several ranks of a stage train as whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.jobs import train, train_alone
from support.ranks import OneAfterAnother, on

STEPS = 4


def sliced(ranks: int, stages: int, **options: Any) -> Any:
    more = {"tensor_parallel": {"autotp_size": 2}, **options.pop("more", {})}
    return on(ranks, stages, more=more, steps=STEPS, **options)


BF16 = {"bf16": {"enabled": True}}
UNTIED = {"tie_word_embeddings": False}
SCHEDULES = ("kfkb", "zbh1", "gpipe")
IN_CHUNKS = ("interleaved", "zbv")
FOUR_PARTS = [0, 2, 3, 4, 6]
RUNS = OneAfterAnother(
    train,
    {
        "a stage": sliced(2, 1),
        "a stage, untied": sliced(2, 1, **UNTIED),
        "two stages, untied": sliced(4, 2, **UNTIED),
        "two stages": sliced(4, 2),
        "replicas": sliced(4, 1, zero=1, clipping=0.05),
        "three": sliced(8, 2, zero=1, clipping=0.05),
        "qwen3": sliced(4, 2, family="qwen3", clipping=0.05),
        "olmo2": sliced(4, 2, family="olmo2"),
        "bias": sliced(4, 2, attention_bias=True, mlp_bias=True),
        "recomputed": sliced(4, 2, checkpointing=True),
        "packed": sliced(4, 2, kind="packed"),
        "ragged": sliced(4, 2, kind="ragged"),
        **{name: sliced(4, 2, schedule={"type": name}) for name in SCHEDULES},
        **{name: sliced(4, 2, partition=FOUR_PARTS, schedule={"type": name}) for name in IN_CHUNKS},
        "bf16": sliced(4, 2, more=BF16),
    },
    at_once=10,
)
ALONE = OneAfterAnother(
    train_alone,
    {
        "llama": on(1, steps=STEPS),
        "clipping": on(1, steps=STEPS, clipping=0.05),
        "qwen3": on(1, steps=STEPS, family="qwen3", clipping=0.05),
        "olmo2": on(1, steps=STEPS, family="olmo2"),
        "bias": on(1, steps=STEPS, attention_bias=True, mlp_bias=True),
        "packed": on(1, steps=STEPS, kind="packed"),
        "ragged": on(1, steps=STEPS, kind="ragged"),
    },
)
"""The same by one process with whole layers."""

REFERENCES = {
    **dict.fromkeys(("a stage", "two stages", "recomputed", *SCHEDULES, *IN_CHUNKS), "llama"),
    **dict.fromkeys(("replicas", "three"), "clipping"),
    **{name: name for name in ("qwen3", "olmo2", "bias", "packed", "ragged")},
}


def whole_weights(runs: list[dict[str, Any]], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in like.items():
        parts = [rank["state"][name] for rank in runs if name in rank["state"]]
        if parts[0].shape == weight.shape:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            found[name] = parts[0]
        else:
            dim = 0 if parts[0].shape[0] != weight.shape[0] else 1
            found[name] = torch.cat(parts[:2], dim)
    return found


@pytest.mark.parametrize("run", REFERENCES)
def test_losses_and_weights_are_those_of_whole_layers(run: str) -> None:
    runs, (wanted,) = RUNS[run], ALONE[REFERENCES[run]]
    for rank in runs:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
        assert rank["norms"] == pytest.approx(wanted["norms"] or rank["norms"], rel=2e-5)
        assert rank["evaluation"]["eval_loss"] == pytest.approx(wanted["evaluation"]["eval_loss"], rel=2e-6)
        assert rank["evaluation"]["eval_tokens"] == wanted["evaluation"]["eval_tokens"]
    for name, whole in whole_weights(runs, wanted["state"]).items():
        assert (whole - wanted["state"][name]).abs().max() < 2e-4, name


def test_stages_change_no_bit() -> None:
    one, two = RUNS["a stage, untied"], RUNS["two stages, untied"]
    assert two[0]["losses"] == one[0]["losses"]
    for slice_number in range(2):
        for rank in (two[slice_number], two[2 + slice_number]):
            for name, weight in rank["state"].items():
                assert torch.equal(weight, one[slice_number]["state"][name]), name


def test_bf16_trains() -> None:
    losses = RUNS["bf16"][0]["losses"]
    assert losses == pytest.approx(RUNS["two stages"][0]["losses"], rel=5e-3)
