"""The optimizer of the caller, over what trains on a stage."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.runtime.optimizer_setup import basic_optimizer, check_own_parameters

ENGINE: Any = SimpleNamespace(device="cpu")


def sorted_by_decay(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    own = list(parameters)
    matrices, others = [p for p in own if p.dim() > 1], [p for p in own if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.Adagrad(groups, lr=0.1)  # makes its states at once


def test_a_frozen_stage_has_the_groups_of_the_others() -> None:
    """The function got a dict, as it sorts parameters on other stages."""
    basic = basic_optimizer(ENGINE, sorted_by_decay, [])
    assert [(group["params"], group["weight_decay"]) for group in basic.param_groups] == [([], 0.1), ([], 0.0)]
    assert not basic.state
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    basic = basic_optimizer(ENGINE, sorted_by_decay, [weight, bias])
    assert [len(group["params"]) for group in basic.param_groups] == [1, 1]
    assert basic.state.keys() == {weight, bias}


def test_an_optimizer_that_calls_the_model_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"optimizer is a LBFGS, whose step needs a closure .*: choose one of .*AdamW"):
        basic_optimizer(ENGINE, torch.optim.LBFGS, parameters)
    assert basic_optimizer(ENGINE, torch.optim.SGD, parameters).param_groups[0]["params"] == parameters


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("grokadamw", "how many come before it"),
        ("schedulefree", "changes weights where"),
        ("torchao", "can be neither saved nor moved"),
    ],
)
def test_optimizers_that_stages_cannot_have_are_refused(package: str, why: str) -> None:
    kind = type("Own", (torch.optim.AdamW,), {"__module__": f"{package}.optim"})
    with pytest.raises(ValueError, match=rf"optimizer is {package}\.Own, .*{why} .*; choose one of .*AdamW"):
        basic_optimizer(ENGINE, kind, [nn.Parameter(torch.ones(2))])


def test_the_whole_models_parameters_are_refused_with_the_remedy() -> None:
    """A JSON that names an optimizer does not help where ``model_parameters`` were listed before the model was cut."""
    own, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    check_own_parameters(torch.optim.SGD([own]), {own})
    with pytest.raises(ValueError, match=r"parameter of shape \[3\] that is not .*; leave model_parameters out if"):
        check_own_parameters(torch.optim.SGD([own, other]), {own})
