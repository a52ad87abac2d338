"""The loss of a causal LM a piece of its rows at a time: logits of all tokens in float32 never exist at once.

Same bits as transformers' own: rows do not depend on one another, and what is added up is added up at once.

Legend: B batch, S sequence, V vocabulary, N = B·S rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

IGNORED = -100

PIECE_BYTES = 1 << 28
"""Bytes of a piece's logits in float32. Smaller logits go to transformers' own function."""


def takes_pieces(loss_function: Any, logits: Tensor) -> bool:
    """Whether :func:`cross_entropy_in_pieces` stands in for ``loss_function`` on logits ``[B, S, V]`` of this size."""
    return loss_function is ForCausalLMLoss and 4 * logits.numel() > PIECE_BYTES


def working_bytes(loss_function: Any, logits: Tensor) -> int:
    """Bytes that the backward of the loss of logits ``[B, S, V]`` takes at a time, beside what the forward keeps for
    it: gradients of the logarithms and of the logits, in float32. In pieces these and the logarithms of one, and
    the gradient of all logits."""
    if not takes_pieces(loss_function, logits):
        return 2 * 4 * logits.numel()
    return 3 * PIECE_BYTES + logits.numel() * logits.element_size()


def cross_entropy_in_pieces(logits: Tensor, labels: Tensor, num_items: Tensor | float | None) -> Tensor:
    """``ForCausalLMLoss``: next-token cross entropy over its label tokens, divided by ``num_items`` (None: by theirs).

    The backward computes each piece anew.

    Args:
        logits: ``[B, S, V]``.
        labels: ``[B, S]``, not shifted; -100 is no label.
    """
    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1).to(logits.device)
    total: Tensor = _Sum.apply(logits.reshape(-1, logits.shape[-1]), targets)
    return total / ((targets != IGNORED).sum() if num_items is None else num_items)


class _Sum(torch.autograd.Function):
    """Sum of the cross entropies of rows ``[N, V]`` with a target that is not ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        of_targets = torch.empty(len(targets), 1, dtype=torch.float32, device=logits.device)
        for part in pieces_of(logits):
            logs = F.log_softmax(logits[part].float(), dim=-1)
            of_targets[part] = logs.gather(1, targets[part, None].clamp(min=0))
        # Added up by the kernel that would have done it, in its order.
        return F.nll_loss(of_targets, targets.clamp(max=0), ignore_index=IGNORED, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        found = torch.empty_like(logits)
        for part in pieces_of(logits):
            with torch.enable_grad():
                rows = logits[part].detach().requires_grad_()
                total = F.cross_entropy(rows.float(), targets[part], ignore_index=IGNORED, reduction="sum")
            (found[part],) = torch.autograd.grad(total, rows, gradient)
        return found, None


def pieces_of(logits: Tensor) -> list[slice]:
    """The rows of logits ``[N, V]`` of which :data:`PIECE_BYTES` have room for float32, a piece at a time."""
    num_rows, size = len(logits), max(1, PIECE_BYTES // (4 * logits.shape[1]))
    return [slice(start, start + size) for start in range(0, num_rows, size)]
