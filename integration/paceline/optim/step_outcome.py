"""The outcome of optimizer steps: their norms, those that are skipped, and the loss scale that follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("paceline")

MOST_SKIPPED = 50
"""Steps in a row whose gradients, or changes, are not finite, after which training ends."""

SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class StepOutcome:
    """The gradient norm of the last step, whether it was skipped, and the loss scale of the next; alike on all ranks.

    Args:
        loss_scaler: of DeepSpeed; None for a scale of 1.
    """

    def __init__(self, loss_scaler: Any = None) -> None:
        self.grad_norm: float | None = None
        self.overflow = False
        self.change: dict[str, float] | None = None
        """If changes have limits and the gradients were finite: the ``norm`` of all changes as they were made, and
        ``num_limited``, the layers that would have gone farther than their own limit."""
        self._loss_scaler, self._num_skipped = loss_scaler, 0

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._loss_scaler is None else self._loss_scaler.loss_scale

    def note_gradients(self, squares: float, scale: float) -> None:
        """Note gradients that are multiplied by ``scale`` and have this sum of squares; the loss scale goes on.

        Raises:
            FloatingPointError: they are not finite, and the loss scale cannot become smaller.
        """
        self.grad_norm, self.overflow = norm_of(squares, scale), not math.isfinite(squares)
        self.change = None
        if self._loss_scaler is not None:
            try:
                self._loss_scaler.update_scale(self.overflow)
            except Exception as error:
                if type(error) is not Exception:  # DeepSpeed's has no kind of its own
                    raise
                raise FloatingPointError(
                    f"a gradient is not finite, and the loss scale, {self.loss_scale:g}, is the smallest "
                    "(fp16.min_loss_scale): look for what is not finite in the data, lower the learning rate, write "
                    "bf16 instead, or go on from an earlier checkpoint."
                ) from error

    def complete(self) -> None:
        """The step changed the model."""
        self._num_skipped = 0

    def skip(self, cause: str = "gradient") -> None:
        """The step changed nothing, as a ``cause`` is not finite.

        Raises:
            FloatingPointError: too many in a row.
        """
        self.overflow = True
        self._num_skipped += 1
        if cause == "gradient" and self._loss_scaler is not None and self._loss_scaler.dynamic:
            return  # an overflow is how the scale finds its height
        message = f"a {cause} is not finite: the step is skipped"
        if self._num_skipped >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{message}, for the {self._num_skipped}th time in a row; lower the learning rate, clip gradients, or "
                "go on from an earlier checkpoint."
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("%s (%d in a row)", message, self._num_skipped)


def norm_of(squares: float, scale: float) -> float:
    """Norm of gradients without their ``scale``."""
    return math.sqrt(squares) / scale if squares >= 0 else math.nan


def scaler_state(scaler: Any) -> dict[str, Any]:
    """State of a dynamic loss scaler of DeepSpeed, for checkpoints; a static one has its scale from the JSON."""
    if scaler is None or not scaler.dynamic:
        return {}
    return {name: getattr(scaler, name) for name in SCALER_STATE if hasattr(scaler, name)}


def load_scaler_state(scaler: Any, state: Mapping[str, Any]) -> None:
    """Put :func:`scaler_state` back, if the scaler is a dynamic one too."""
    for name, value in state.items():
        if scaler is not None and scaler.dynamic:
            setattr(scaler, name, value)
