"""The learning rate of an island's optimizer, scaled at each step only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ScaledRate:
    """Multiplies the learning rates of ``optimizer`` while it steps; its scheduler sees those that it has set.

    A copy of it that steps beside the computation is left as it is: its rates are those of an earlier step.

    Args:
        factor: called at each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._rates: list[Any] | None = None
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._restore)

    def _scale(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        factor = self._factor() if optimizer is self._optimizer else 1.0
        if factor != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if self._rates is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._rates = None
