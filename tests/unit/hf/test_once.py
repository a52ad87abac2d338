"""Answers that are found once for a config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from paceline.hf.once import once_a_config


def test_the_same_config_is_asked_once_and_a_changed_one_again() -> None:
    asked: list[Any] = []

    @once_a_config
    def find(config: LlamaConfig, *, length: int) -> int:
        asked.append((config.num_hidden_layers, length))
        if length < 0:
            raise ValueError(length)
        return len(asked)

    config = LlamaConfig(num_hidden_layers=2)
    assert [find(config, length=8), find(LlamaConfig(num_hidden_layers=2), length=8), find(config, length=9)] == [
        1,
        1,
        2,
    ]
    config.num_hidden_layers = 3
    assert find(config, length=8) == 3
    config._attn_implementation = "eager"
    assert find(config, length=8) == 4
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            find(config, length=-1)
    config.anything = object()
    assert find(config, length=8) != find(config, length=8), "nobody knows what it holds"
