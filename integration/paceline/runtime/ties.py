"""Weights that two stages have, so that their gradients are added up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Tie(NamedTuple):
    """A weight here that another rank has too, or some rows of it.

    Args:
        group: of the two ranks.
        rows: first row and end of those that both have; None: all.
    """

    weight: nn.Parameter
    group: torch.distributed.ProcessGroup
    rows: tuple[int, int] | None = None

    def shared(self, tensor: Tensor) -> Tensor:
        """The part of the weight, or of its gradient, that both have."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]

    @property
    def num_bytes(self) -> int:
        shared = self.shared(self.weight)
        return shared.numel() * shared.element_size()
