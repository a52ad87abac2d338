"""A line that the model completes while it trains, in the pipeline that it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

NEW_TOKENS = 24


def complete(engine: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, num_tokens: int = NEW_TOKENS) -> str:
    """The likeliest tokens after ``prompt``, one by one. Collective; the same on every rank.

    Each token takes one forward of the whole line through all stages, since training keeps no cache of keys and values:
    about as long as evaluating ``num_tokens`` rows of that length one after another. Nothing is gathered or written.
    Replicas compute alike; none ends before the others, whatever token it sees.
    """
    ids: Tensor = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)["input_ids"]  # [1, S]
    begun = ids.shape[1]
    most = getattr(engine.module.config.get_text_config(), "max_position_embeddings", None) or begun + num_tokens
    while ids.shape[1] < min(begun + num_tokens, most):
        batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
        ((_, token),) = engine.predict([batch], lambda logits, _: logits[:, -1].argmax(-1))  # [1]
        ids = torch.cat((ids, token[:, None].to(ids.dtype)), dim=1)
    new = ids[0, begun:].tolist()
    end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else len(new)
    return str(tokenizer.decode(new[:end], skip_special_tokens=True))
