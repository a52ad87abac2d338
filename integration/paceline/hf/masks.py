"""Facts of a batch's mask and positions, found on the CPU, so that no forward has to ask the device.

transformers decides by their values whether attention needs a mask at all: it waits for the device in every forward.
Who knows the batch says so with :func:`known`; ``paceline.patches.transformers_masking_utils`` makes transformers
listen.

Padding behind the tokens of a row needs no mask in training: in a causal model no token sees what comes after it, and
outputs at padding have no label, so that neither the loss nor a gradient depends on them. Only natural gradients do,
whose estimates are of all rows: they keep every mask. Without one a GPU has its flash kernels, keys and values of
grouped queries are not copied for each query head, and FlashAttention need not gather the tokens in every layer, for
which it would wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that has no loss."""


@dataclass(frozen=True)
class MaskFacts:
    """Facts of one batch.

    Args:
        is_padded: the attention mask masks a token.
        is_packed: in a row of the position ids one does not follow the one before: it holds several samples.
        is_dispensable: the loss and its gradients are the same without the mask: it masks tokens without a label only,
            which come after the others of their row, and a row is one sample.
    """

    is_padded: bool = False
    is_packed: bool = False
    is_dispensable: bool = False


def facts_of(side: Mapping[str, Tensor], labels: Tensor | None = None) -> MaskFacts:
    """Facts of a batch on the CPU, from ``attention_mask`` and ``position_ids`` ``[B, S]`` where it has them.

    Args:
        labels: ``[B, S]``; where they are not known, a mask is never dispensable.
    """
    mask, positions = side.get("attention_mask"), side.get("position_ids")
    is_packed = positions is not None and bool((torch.diff(positions, dim=-1) != 1).any())
    if mask is None or bool(mask.all()):
        return MaskFacts(is_packed=is_packed)
    is_last = bool((torch.diff(mask, dim=-1) <= 0).all())
    has_label = labels is None or bool((labels[mask == 0] != IGNORED).any())
    return MaskFacts(is_padded=True, is_packed=is_packed, is_dispensable=is_last and not has_label and not is_packed)


def needs_mask(device: torch.device) -> bool:
    """Whether a forward on this device takes a mask that is dispensable, as the facts of its batch are known here.

    On a CPU it does: attention there has the same kernel, and its gradients the same bits as those of the whole model.
    """
    facts = known_facts()
    return facts is None or not facts.is_dispensable or device.type == "cpu"


@contextmanager
def known(facts: MaskFacts) -> Iterator[None]:
    """Forwards in this context are of the batch of ``facts``."""
    token = _KNOWN.set(facts)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_facts() -> MaskFacts | None:
    """Facts of the batch that is under way in this thread; None if they are not set."""
    return _KNOWN.get()


_KNOWN: ContextVar[MaskFacts | None] = ContextVar("mask_facts", default=None)
