"""Tokens of a sample where nobody says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import GPT2Config, LlamaConfig

from paceline.measure.tokens import tokens_of_sample


@pytest.mark.parametrize(
    ("asked", "positions", "tokens"), [(None, 128, 128), (None, 4096, 1024), (2048, 4096, 2048), (7, 128, 7)]
)
def test_as_asked_or_what_the_model_takes(asked: int | None, positions: int, tokens: int) -> None:
    assert tokens_of_sample(asked, LlamaConfig(max_position_embeddings=positions)) == tokens
    assert tokens_of_sample(asked, GPT2Config(n_positions=positions)) == tokens


def test_it_is_known_without_torch() -> None:
    code = "import sys, paceline.measure.tokens; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
