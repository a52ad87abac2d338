"""What cannot be exchanged in place is refused, and what is alike for all elements stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.moe.wrapper_states import states_of


def engine(optimizer: Any, zero: int = 0) -> Any:
    return SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: zero)


@pytest.mark.parametrize(
    ("optimizer", "zero", "message"),
    [
        (None, 3, r"zero_optimization.stage is 3.*set one of these, or leave \"moe\" out of \"paceline\"."),
        (SimpleNamespace(cpu_offload=True), 1, r"zero_optimization.offload_optimizer keeps masters in host memory"),
        (SimpleNamespace(), 0, "experts do not move under SimpleNamespace: let DeepSpeed make the optimizer"),
    ],
)
def test_engines_whose_experts_cannot_move(optimizer: Any, zero: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        states_of(engine(optimizer, zero))


def stepped(optimizer_class: Any, parameter: nn.Parameter, **options: Any) -> Any:
    optimizer = optimizer_class([parameter], lr=0.1, **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_states_per_element_can_be_written_to() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = stepped(torch.optim.AdamW, parameter, amsgrad=True)
    parts = states_of(engine(optimizer))(parameter)
    assert [(part.kind, part.start, len(part.tensor)) for part in parts] == [
        ("value", 0, 6),
        ("exp_avg", 0, 6),
        ("exp_avg_sq", 0, 6),
        ("max_exp_avg_sq", 0, 6),
    ]
    for number, part in enumerate(parts):
        part.tensor[5] = number
    assert parameter[1, 2] == 0
    assert optimizer.state[parameter]["exp_avg"][1, 2] == 1


def test_without_an_optimizer_or_a_step_there_are_values() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    for optimizer in (None, torch.optim.AdamW([parameter]), stepped(torch.optim.SGD, parameter)):
        assert [part.kind for part in states_of(engine(optimizer))(parameter)] == ["value"]


def test_a_state_that_is_not_per_element_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, 4))
    states = states_of(engine(stepped(torch.optim.Adafactor, parameter)))
    with pytest.raises(
        ValueError, match=r"Adafactor keeps row_var of shape \[2, 3, 1\] for a parameter of shape \[2, 3"
    ):
        states(parameter)


def test_a_weight_that_is_not_contiguous_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match=r"an expert's weight of shape \[3, 2\] has strides \[1, 3\]"):
        states_of(engine(None))(parameter)
