"""Who reads masters and states between two steps waits for those that are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from torch import nn

from paceline.moe.late_states import LateStates
from paceline.moe.moving import StatePart


class Waited(Exception):
    """Somebody has waited for masters and states."""


def arrive() -> None:
    raise Waited


def expert() -> Any:
    """As ZeRO links a parameter with its master."""
    parameter: Any = nn.Parameter(torch.zeros(2))
    parameter._hp_mapping = None
    parameter.get_full_hp_param = lambda key=None: f"full {key}"
    parameter.set_full_hp_param = lambda value, key=None: None
    return parameter


def test_readers_wait_once() -> None:
    parameter, optimizer = expert(), SimpleNamespace(state_dict=lambda: {"step": 1})
    late = LateStates(optimizer, [parameter])
    states = late.settled(lambda parameter: [StatePart("value", 0, parameter.detach())])
    readers = [
        (lambda: safe_get_full_fp32_param(parameter), "full None"),
        (lambda: safe_get_full_optimizer_state(parameter, "exp_avg"), "full exp_avg"),
        (lambda: safe_set_full_fp32_param(parameter, torch.ones(2)), None),
        (optimizer.state_dict, {"step": 1}),
        (lambda: [part.kind for part in states(parameter)], ["value"]),
    ]
    for read, wanted in readers:
        late.expect(arrive)
        with pytest.raises(Waited):
            read()
        assert read() == wanted


def test_readers_wait_after_a_checkpoint_was_loaded_too() -> None:
    """DeepSpeed links parameters and masters anew then."""
    parameter = expert()

    def link() -> None:
        parameter.get_full_hp_param = lambda key=None: "linked anew"

    optimizer = SimpleNamespace(_link_all_hp_params=link)
    late = LateStates(optimizer, [parameter])
    optimizer._link_all_hp_params()
    late.expect(arrive)
    with pytest.raises(Waited):
        safe_get_full_fp32_param(parameter)
    assert safe_get_full_fp32_param(parameter) == "linked anew"


def test_what_is_expected_later_waits_for_what_was_before() -> None:
    late = LateStates(SimpleNamespace(), [])
    late.expect(arrive)
    with pytest.raises(Waited):
        late.expect(lambda: None)
