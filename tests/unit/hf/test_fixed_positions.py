"""Batches that are longer than a model's table of positions: refused where the whole model would fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.hf.family_configs import causal_lm_configs, tiny_configs
from paceline.hf.fixed_positions import BY_LENGTH, BY_POSITION, positions_fault
from paceline.hf.quiet_transformers import quiet

CONFIGS = {kind.model_type: kind for kind in causal_lm_configs()}


def fails(model: Any, **batch: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            model(**batch)
    except (IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("family", [*BY_POSITION, *BY_LENGTH, "llama", "gpt_neox", "xglm"])
def test_what_is_too_long_is_what_fails(family: str) -> None:
    """With rows that fit or not, padded on the right, and with positions that begin anew."""
    config = tiny_configs(CONFIGS[family])[0]
    positions = getattr(config, "max_position_embeddings", None) or 64
    with quiet():
        model = AutoModelForCausalLM.from_config(config).eval()
    longer = positions + 3
    padded = (torch.arange(longer) < positions).long()[None]
    anew = torch.arange(longer)[None] % positions
    cases: list[tuple[int, dict[str, torch.Tensor]]] = [
        (positions, {}),
        (longer, {}),
        (longer, {"attention_mask": padded}),
    ]
    if family not in ("mpt", "openai-gpt"):
        cases.append((longer, {"position_ids": anew}))
    for length, side in cases:
        ids = torch.ones(1, length, dtype=torch.int64)
        fault = positions_fault(config, ids, side)
        assert bool(fault) == fails(model, input_ids=ids, **side), (length, list(side))
        if fault:
            assert f"a sample of {longer} tokens, the model has {positions} positions: truncate samples to" in fault
