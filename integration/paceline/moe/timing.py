"""How long experts compute, and how long their tokens travel, from what a run itself does.

While a layer is timed, marks lie before and after the exchange of tokens; they do nothing to the numbers. Between two
marks is computing or travelling, in forward and backward alike. On a GPU the marks are events that are read later.

Legend: H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..hf.early_recomputation import is_repeated
from ..measure.clock import Clock

LEAVE, ARRIVE, COMPUTED, BACK = range(4)
"""Before the tokens leave, when they have arrived, when they are computed, and when they are back."""


class ExpertClock:
    """Moments of one layer on one rank.

    Attributes:
        rows: that were to be computed here since the clock began.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._is_cuda = device.type == "cuda"
        self._moments: list[tuple[int, bool, Any]] = []
        self.rows = 0

    def mark(self, x: Tensor, place: int) -> Tensor:
        """``x``, with the moment noted when it is computed, and again when its gradient is."""
        self._note(place, False)
        return _Mark.apply(x, self, place) if x.requires_grad else x

    def count(self, rows: int) -> None:
        """Add to ``rows``, unless this forward is computed a second time: that is no work of its own."""
        if not is_repeated():
            self.rows += rows

    def _note(self, place: int, backward: bool) -> None:
        self._moments.append((place, backward, self._clock.now()))

    def read(self) -> tuple[float, float]:
        """Seconds of computing and of travelling since the clock began. A GPU's host waits for it."""
        compute = travel = 0.0
        for (place, backward, begun), (next_place, next_backward, ended) in zip(
            self._moments, self._moments[1:], strict=False
        ):
            step = (place, next_place)
            if backward != next_backward or step not in (_BACKWARD if backward else _FORWARD):
                continue
            if self._is_cuda:
                ended.synchronize()
            seconds = begun.elapsed_time(ended) / 1e3 if self._is_cuda else ended - begun
            if step in ((ARRIVE, COMPUTED), (COMPUTED, ARRIVE)):
                compute += seconds
            else:
                travel += seconds
        return compute, travel


_FORWARD = ((LEAVE, ARRIVE), (ARRIVE, COMPUTED), (COMPUTED, BACK))
_BACKWARD = ((BACK, COMPUTED), (COMPUTED, ARRIVE), (ARRIVE, LEAVE))


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: ExpertClock, place: int) -> Tensor:
        ctx.clock, ctx.place = clock, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock._note(ctx.place, True)
        return gradient, None, None
