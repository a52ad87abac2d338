"""How far parameters may move in one update: each layer by itself, and all of them together.

Source: Povey, Zhang, Khudanpur, arXiv 1410.7455; the order and the limits are those of Kaldi's ``nnet3``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def max_change_factors(norms: Tensor, limits: Tensor, total_limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """``(factors, norm)``: what each layer's change is multiplied by, and the norm of all changes after that.

    A layer's change is scaled down to its limit; then, if the norm of all is still larger than ``total_limit``,
    everything is scaled down to that.

    Args:
        norms: of the layers' changes, learning rate included, weight and bias together, of shape (C,).
        limits: of each, of shape (C,); 0 for none.
        total_limit: 0 for none.

    Returns:
        Both on the device of ``norms``, in float64. ``norm`` is not finite where a change is not: then the update is to
        be left out, which no factor does.
    """
    norms, limits = norms.double(), limits.double().to(norms.device)
    factors = torch.where((limits > 0) & (norms > limits), limits / norms, 1.0)
    changes = torch.where(norms.isfinite(), factors * norms, norms)
    norm = torch.linalg.vector_norm(changes)
    if total_limit > 0:
        factors = factors * torch.where(norm > total_limit, total_limit / norm, 1.0)
        norm = torch.where(norm.isfinite(), norm.clamp_max(total_limit), norm)
    return factors, norm
