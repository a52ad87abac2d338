"""``transformers/masking_utils.py``: is there padding, is a row packed? Answered without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.hf.masks import known_facts
from paceline.patches.registry import Patch

_APPLIED_BY = "paceline.initialize, for a pipeline of a Hugging Face model, and check-model"


def find_packed_sequence_indices(original: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Take from the batch's facts whether there is more than one sample in a row; which, is computed as upstream."""

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        facts = known_facts()
        if facts is None:
            return original(position_ids)
        if not facts.is_packed:
            return None
        difference = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (difference != 1).cumsum(-1)

    return find_packed_sequence_indices


def fast_all(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Take from the batch's facts whether no token of its mask ``[B, S]`` is padding."""

    def fast_all(tensor: Tensor) -> Any:
        facts = known_facts()
        return original(tensor) if facts is None or tensor.dim() != 2 else not facts.is_padded

    return fast_all


def _patch(function: Callable[..., Any], fingerprint: str) -> Patch:
    target = f"transformers.masking_utils:{function.__name__}"
    return Patch(
        target=target,
        make=function,
        requires="transformers>=5.17",
        reason="every forward of every stage waits for the device to learn what the batch on the CPU has told",
        removable_when="transformers takes as an argument whether a batch is packed or padded",
        watches=target,
        fingerprint=fingerprint,
        applied_by=_APPLIED_BY,
        optional=True,  # without it the numbers are the same
    )


PATCHES = (_patch(find_packed_sequence_indices, "ebd2ac7ca795"), _patch(fast_all, "cc9d0400c0fa"))
