"""Models that know a fixed number of positions: from a table of learned or computed ones, they fail beyond it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PretrainedConfig

BY_POSITION = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gptj", "opt")
BY_LENGTH = ("gpt_neo", "mpt", "openai-gpt")
"""Also with ``position_ids`` that begin anew in a row: their mask, or their biases, have a fixed size, too."""


def positions_fault(config: PretrainedConfig, ids: Tensor, side: Mapping[str, Tensor]) -> str:
    """Why a batch has more positions than the model; empty if it has not.

    Args:
        ids: ``[B, S]``.
        side: ``attention_mask`` and ``position_ids`` ``[B, S]``, where there are.
    """
    if config.model_type not in (*BY_POSITION, *BY_LENGTH):
        return ""
    used = ids.shape[1]
    if config.model_type in BY_POSITION and "position_ids" in side:
        used = int(side["position_ids"].max()) + 1
    elif config.model_type == "opt" and "attention_mask" in side:  # counts what is not padding
        used = int(side["attention_mask"].sum(-1).max())
    most = config.max_seq_len if config.model_type == "mpt" else config.max_position_embeddings
    if used <= most:
        return ""
    return (
        f"a micro-batch has a sample of {used} tokens, the model has {most} positions: truncate samples to {most} "
        "tokens (max_length of SFTConfig or of the tokenizer), or take a model with more."
    )
