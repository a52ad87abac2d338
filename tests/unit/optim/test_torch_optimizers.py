"""Optimizers of ``torch.optim`` by their names in a JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.optim.torch_optimizers import check_deepspeeds, make_optimizer


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {"betas": 0.9}), ("AdamW", {"betas": [0.9]}), ("SGD", {"rho": 1}), ("Adam", {"eps": -1})],
)
def test_options_that_do_not_fit_are_named_with_the_remedy(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"optimizer {name} with params .*; correct optimizer\.params"):
        make_optimizer(name, [nn.Parameter(torch.zeros(1))], options, torch.device("cpu"))


def test_deepspeeds_kernels_are_looked_for_where_ranks_compute() -> None:
    for name, device in (("Lamb", "cuda"), ("Lion", "cuda"), ("OneBitAdam", "cpu")):
        check_deepspeeds(name, torch.device(device))
    with pytest.raises(ValueError, match=r"optimizer\.type is Lamb: DeepSpeed has its kernels for GPUs only"):
        check_deepspeeds("Lamb", torch.device("cpu"))
