"""How many tokens a sample is taken to have where nobody says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_TOKENS = 1024
"""Of a sample, where nothing is said: as in the rows that a run makes of its data."""


def tokens_of_sample(asked: int | None, config: PretrainedConfig) -> int:
    """As many as asked for, or what the model has positions for, up to :data:`MOST_TOKENS`."""
    if asked is not None:
        return asked
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(MOST_TOKENS, positions or MOST_TOKENS)
