"""The loss of a step that an island without a pipeline tells of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.averaging.period_loss import StepLoss

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
