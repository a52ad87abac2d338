"""transformers' masks, made with what is known of a batch and without: the same in every bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from paceline.hf.masks import MaskFacts, facts_of, known, needs_mask
from paceline.patches.registry import applied
from paceline.patches.transformers_masking_utils import PATCHES
from paceline.runtime.micro_batches import MicroBatch, shape_of

B, S = 3, 8
ROWS = torch.arange(S).expand(B, -1)
PADDED = (torch.arange(S) < torch.tensor([[8], [5], [1]])).long()
LEFT = PADDED.flip(1)
PACKED = torch.cat([ROWS[:, :3], ROWS[:, :5]], 1)
ONE_PACKED = torch.where(torch.arange(B)[:, None] == 1, PACKED, ROWS)


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("side", "facts"),
    [
        ({}, MaskFacts()),
        ({"attention_mask": PADDED}, MaskFacts(is_padded=True)),
        ({"attention_mask": LEFT}, MaskFacts(is_padded=True)),
        ({"attention_mask": torch.ones(B, S, dtype=torch.int64)}, MaskFacts()),
        ({"position_ids": ROWS}, MaskFacts()),
        ({"position_ids": ROWS + 5}, MaskFacts()),
        ({"position_ids": PACKED}, MaskFacts(is_packed=True)),
        ({"position_ids": ONE_PACKED}, MaskFacts(is_packed=True)),
        ({"position_ids": PACKED, "attention_mask": PADDED}, MaskFacts(True, True)),
        ({"position_ids": PACKED, "attention_mask": torch.ones_like(PADDED)}, MaskFacts(False, True)),
    ],
)
def test_known_facts_change_no_mask(make, attention, side, facts) -> None:
    config = LlamaConfig(num_hidden_layers=1, sliding_window=4, attn_implementation=attention)
    given = {"attention_mask": None, "position_ids": ROWS, **side}

    def mask():
        return make(config, torch.zeros(B, S, 4), given["attention_mask"], None, given["position_ids"])

    assert facts_of(side) == facts
    wanted = mask()
    with applied(*PATCHES):
        assert _same(mask(), wanted)  # nobody has told
        with known(facts):
            assert _same(mask(), wanted)


LABELS = torch.where(PADDED.bool(), 5, -100)


@pytest.mark.parametrize(
    ("mask", "labels", "positions", "is_dispensable"),
    [
        (PADDED, LABELS, None, True),
        (PADDED, LABELS, ROWS, True),
        (PADDED, None, None, False),
        (PADDED, torch.full((B, S), 5), None, False),  # a label of padding is predicted from padding
        (PADDED, LABELS, PACKED, False),
        (LEFT, LABELS.flip(1), None, False),
        (PADDED * 0, torch.full((B, S), -100), None, True),
        (torch.ones_like(PADDED), LABELS, None, False),  # there is none
        (torch.tensor([[1, 0, 1]]), torch.tensor([[5, -100, 5]]), None, False),
    ],
)
def test_masks_that_no_label_depends_on(mask, labels, positions, is_dispensable) -> None:
    side = {"attention_mask": mask} | ({} if positions is None else {"position_ids": positions})
    facts = facts_of(side, labels)
    assert facts.is_dispensable is is_dispensable
    with known(facts):
        assert needs_mask(torch.device("cuda")) is not is_dispensable
        assert needs_mask(torch.device("cpu"))  # the same bits as the whole model's
    assert needs_mask(torch.device("cuda"))


def test_the_table_of_a_step_tells_all_stages() -> None:
    for side in (
        {},
        {"attention_mask": PADDED},
        {"attention_mask": LEFT},
        {"attention_mask": PADDED, "position_ids": PACKED},
    ):
        batch = MicroBatch(ROWS, LABELS, side)
        assert shape_of(batch.row).masks == facts_of(side, LABELS)
        assert shape_of(batch.row).side == tuple(side)


def _same(one, other) -> bool:
    return (one is None and other is None) or torch.equal(one, other)
