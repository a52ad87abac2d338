"""What a batch's mask and positions hold, found on the CPU, so that no forward has to ask the device.

transformers decides by their values whether attention needs a mask at all: it waits for the device in every forward.
Who knows the batch says so with :func:`known`; ``paceline.patches.transformers_masking_utils`` makes transformers
listen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskFacts:
    """Of one batch.

    Args:
        is_padded: the attention mask masks a token.
        is_packed: in a row of the position ids one does not follow the one before: it holds several samples.
    """

    is_padded: bool = False
    is_packed: bool = False


def facts_of(side: Mapping[str, Tensor]) -> MaskFacts:
    """Of a batch on the CPU: ``attention_mask`` and ``position_ids`` ``[B, S]``, where it has them."""
    mask, positions = side.get("attention_mask"), side.get("position_ids")
    return MaskFacts(
        is_padded=mask is not None and not bool(mask.all()),
        is_packed=positions is not None and bool((torch.diff(positions, dim=-1) != 1).any()),
    )


@contextmanager
def known(facts: MaskFacts) -> Iterator[None]:
    """Forwards in this context are of the batch of ``facts``."""
    token = _KNOWN.set(facts)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_facts() -> MaskFacts | None:
    """Of the batch that is under way in this thread; None if nobody has told."""
    return _KNOWN.get()


_KNOWN: ContextVar[MaskFacts | None] = ContextVar("mask_facts", default=None)
