"""transformers' masks, made with what is known of a batch and without: the same in every bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from paceline.hf.masks import MaskFacts, facts_of, known
from paceline.patches.registry import applied
from paceline.patches.transformers_masking_utils import PATCHES

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
        return make(config, torch.zeros(B, S, 4), past_key_values=None, **given)

    assert facts_of(side) == facts
    wanted = mask()
    with applied(*PATCHES):
        assert _same(mask(), wanted)  # nobody has told
        with known(facts):
            assert _same(mask(), wanted)


def _same(one, other) -> bool:
    return (one is None and other is None) or torch.equal(one, other)
