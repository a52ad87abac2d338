"""Masters of DeepSpeed's optimizers and the model's parameters, without an optimizer: FP16_Optimizer needs a GPU."""

from __future__ import annotations

import torch
from torch import nn

from paceline.optim.zero_partitions import _copies


def test_masters_are_published_to_the_parameters_that_have_some() -> None:
    trained, other = (nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2))
    masters = _copies({trained: torch.tensor([1.0, 2.0])})
    assert masters.are_whole
    assert masters.segment(other) is None
    segment = masters.segment(trained)
    assert segment is not None
    segment.mul_(2)
    masters.publish()
    assert trained.tolist() == [2.0, 4.0]
    assert other.tolist() == [0.0, 0.0]
