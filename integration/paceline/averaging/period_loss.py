"""The loss that an island reports."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .background_rounds import Messages


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
