"""The loss that an island reports."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..hf.masks import IGNORED
from .background_rounds import Messages


class StepLoss:
    """The loss of a step without a pipeline, from those of its micro-batches.

    A micro-batch without a label counts nothing: its mean is NaN, and its gradients are zero.
    """

    def __init__(self) -> None:
        self._told: list[tuple[Tensor, Tensor]] = []
        self._of_forwards: list[tuple[Tensor, Tensor]] = []
        """Losses that the model returns, for where nobody tells one."""
        self._adds_up = False
        self._counts: Tensor | None = None
        self._last = torch.tensor(math.nan)

    @property
    def is_known(self) -> bool:
        """Whether a loss was told since :meth:`take`."""
        return bool(self._told or self._of_forwards)

    def begin(self, labels: object) -> None:
        """A micro-batch has these labels ``[B, S]``, which the model shifts; or the model gets none."""
        self._counts = None
        if isinstance(labels, Tensor):
            self._counts = (labels[..., 1:] if labels.dim() > 1 else labels).ne(IGNORED).any().float()

    def add_forwards(self, loss: Tensor) -> None:
        """The model has returned this loss."""
        self._of_forwards.append(self._counted(loss))

    def tell(self, loss: Tensor, *, adds_up: bool) -> None:
        """The loss of the micro-batch, as its gradients are computed.

        Args:
            adds_up: losses of micro-batches are shares in that of the step, as Trainer's are.
        """
        self._told.append(self._counted(loss.detach().float()))
        self._adds_up = adds_up

    def _counted(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and 1 or 0 beside it: whether it counts. The host waits for neither."""
        return loss, torch.ones_like(loss) if self._counts is None else self._counts.to(loss.device)

    def take(self) -> Tensor:
        """End the step: its loss, that of the step before where no micro-batch counts, NaN where none is told."""
        told = self._told or self._of_forwards
        self._told, self._of_forwards = [], []
        if not told:
            return torch.tensor(math.nan)
        losses, counts = map(torch.stack, zip(*told, strict=True))
        loss = torch.where(counts > 0, losses, 0.0).sum() / (1.0 if self._adds_up else counts.sum())
        self._last = torch.where(counts.sum() > 0, loss, self._last.to(loss.device))
        return self._last


class PeriodLoss:
    """Mean loss over the tokens since the last exchange."""

    def __init__(self) -> None:
        self.tokens = 0
        """Since the last exchange began."""
        self.last = math.nan
        """Mean of the period before."""
        self.sum: Tensor | float = 0.0

    def add(self, loss: Tensor | float, tokens: int) -> None:
        self.sum = self.sum + loss * tokens
        self.tokens += tokens

    def take(self, messages: Messages) -> tuple[float, int]:
        """The mean over all ranks of this island, and the tokens that it is of; another period begins.

        Ranks have the same tokens, and may have other losses. Where there are none it is the mean of the period before,
        whose values are averaged part by part.
        """
        if self.tokens:
            self.last = float(self.sum) / self.tokens
        loss, tokens = self.last, self.tokens
        self.forget()
        told = messages.sum(torch.tensor([loss, 1.0], dtype=torch.float64))
        return (told[0] / told[1]).item(), tokens

    def forget(self) -> None:
        self.sum, self.tokens = 0.0, 0
