"""A scheduler over an optimizer that does not train would be accepted and never act."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from paceline.runtime.rate import check_scheduler_object


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


class Wrapped:
    """As accelerate's."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner


def test_what_acts() -> None:
    own = optimizer()
    check_scheduler_object(None, None)
    check_scheduler_object(lambda optimizer: StepLR(optimizer, 1), None)
    check_scheduler_object(StepLR(own, 1), own)
    scheduler = StepLR(own, 1)
    scheduler.optimizer = Wrapped(own)
    check_scheduler_object(scheduler, own)
    check_scheduler_object(object(), own)


@pytest.mark.parametrize("engines", [None, optimizer(), torch.optim.SGD])
def test_what_does_not(engines: Any) -> None:
    with pytest.raises(ValueError, match=r"StepLR over another .*SGD.* never act; .*lambda optimizer: StepLR\("):
        check_scheduler_object(StepLR(optimizer(), 1), engines)
