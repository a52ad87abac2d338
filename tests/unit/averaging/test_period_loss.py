"""Losses of an island: of a step, without a pipeline, and of the steps between two exchanges."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.averaging.period_loss import PeriodLoss, StepLoss

LABELS, NO_LABELS = torch.tensor([[5, 7, -100]]), torch.tensor([[5, -100, -100]])  # the first one is of no token


def step(losses: StepLoss, micro_batches: list[tuple[Tensor | None, float]], *, adds_up: bool = False) -> float:
    for labels, loss in micro_batches:
        losses.begin(labels)
        losses.add_forwards(torch.tensor(9.0))
        losses.tell(torch.tensor(loss), adds_up=adds_up)
    assert losses.is_known
    return float(losses.take())


def test_micro_batches_without_a_label_count_nothing() -> None:
    losses = StepLoss()
    assert step(losses, [(LABELS, 2.0), (NO_LABELS, math.nan), (LABELS, 4.0)]) == 3.0
    assert not losses.is_known
    assert step(losses, [(NO_LABELS, math.nan)] * 2) == 3.0  # of the step before
    assert step(losses, [(LABELS, 0.5), (LABELS, 0.75)], adds_up=True) == 1.25
    assert step(losses, [(None, 2.0), (None, 3.0)]) == 2.5


def test_a_loss_that_is_not_finite_though_there_are_labels_is_told() -> None:
    losses = StepLoss()
    for labels in (LABELS, None):
        assert math.isnan(step(losses, [(labels, math.nan), (NO_LABELS, math.nan), (LABELS, 1.0)]))


def test_losses_of_forwards_stand_for_those_that_nobody_tells() -> None:
    losses = StepLoss()
    losses.begin(LABELS)
    losses.add_forwards(torch.tensor(2.0))
    assert float(losses.take()) == 2.0
    assert math.isnan(float(losses.take()))


class TwoRanks:
    """Messages of an island whose other rank has the loss 4."""

    rank = 0

    def sum(self, values: Tensor) -> Tensor:
        return values + torch.tensor([4.0, 1.0], dtype=values.dtype)

    def from_first(self, value: Any) -> Any:
        return value


def test_a_period_has_the_losses_and_tokens_of_its_own_steps() -> None:
    losses, ranks = PeriodLoss(), TwoRanks()
    losses.add(torch.tensor(1.0), 30)
    losses.add(5.0, 10)
    assert losses.take(ranks) == (3.0, 40)  # 2 here
    losses.add(6.0, 20)
    assert losses.take(ranks) == (5.0, 20)
    assert losses.take(ranks) == (5.0, 0)  # no step since
    losses.add(100.0, 10)
    losses.forget()
    losses.add(8.0, 5)
    assert losses.take(ranks) == (6.0, 5)
