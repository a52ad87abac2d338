"""Models that the job's flags name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from paceline.hf.activations import count_items
from paceline.hf.arguments import ModelArguments
from paceline.launch.inputs import _model_config


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (None, r"there is no model: give --model_name_or_path, or .* --config_name or --model_type\."),  # of a JSON
        ("lama", r"--model_type lama: transformers has no such type; did you mean llama\?"),
        ("x", r"--model_type x: transformers has no such type; give a model_type of transformers"),
    ],
)
def test_a_model_that_is_none(model_type: str | None, message: str) -> None:
    tokenizer: Any = None
    with pytest.raises(ValueError, match=message):
        _model_config(ModelArguments(model_type=model_type), tokenizer)


def test_scores_that_eager_attention_keeps_are_counted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(**sizes, vocab_size=97).save_pretrained(tmp_path)
    tokenizer: Any = None
    kept = []
    for attention in (None, "eager"):
        flags = ModelArguments(model_name_or_path=str(tmp_path), attn_implementation=attention)
        config = _model_config(flags, tokenizer)
        items = count_items(config, dtype=torch.float32, micro_batch_size=2, sequence_length=128)
        kept.append(items[1].saved_bytes)
    scores = 2 * 4 * 128 * 128 * 4
    assert kept[1] - kept[0] > 0.9 * scores
