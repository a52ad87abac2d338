"""Parts of a run without a flush: its optimizer's options, its losses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import ScheduleChoice
from paceline.hf.masks import MaskFacts
from paceline.optim.step_options import StepOptions
from paceline.runtime import state_owners
from paceline.runtime.causal_lm_runner import CausalLMRunner, StepBook
from paceline.runtime.causal_lm_support import CausalLMSupport
from paceline.runtime.late_losses import LateLosses
from paceline.runtime.stage_runner import Live
from paceline.runtime.state_owners import Holders, Mirrors
from paceline.supervise.watch import EVERYONE, WATCH


@pytest.mark.parametrize(
    ("zero", "by_default", "experts", "overlaps"),
    [
        ({}, False, False, True),  # NCCL
        ({}, False, True, False),  # whose other collectives would be under way at the same time
        ({}, True, False, True),  # gloo
        ({}, True, True, True),
        ({"overlap_comm": True}, True, False, True),
        ({"overlap_comm": False}, False, False, False),
        ({"overlap_comm": False}, True, False, True),
    ],
)
def test_updates_are_beside_the_computation_unless_the_user_says_otherwise(
    zero: dict[str, Any], by_default: bool, experts: bool, overlaps: bool
) -> None:
    alone = Holders((0,), None, {0: None})
    options = state_owners.over_directions(
        StepOptions(overlap=by_default, shard=False),
        Mirrors(alone, alone, model_group=None),
        lambda parameter: 0,
        lambda parameter: False,
        ScheduleChoice("one_direction"),
        {"zero_optimization": zero},
        ties=list,
        spreads_experts=experts,
    )
    assert options.overlap is overlaps
    assert options.is_asynchronous


def test_who_looks_at_a_loss_waits_for_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps nobody is watched: a loss that never comes would be waited for until the transport gives up."""
    seen: list[Any] = []

    def wait() -> torch.Tensor:
        seen.append(WATCH._doing(0.0))
        return torch.tensor(2.5, dtype=torch.float64)

    monitored: Any = None
    losses = LateLosses(monitored, None, torch.device("cpu"), nullcontext)
    monkeypatch.setattr(losses, "_sums", SimpleNamespace(add=lambda loss: wait))
    WATCH.idle()
    loss = losses.of_step(None)
    assert seen == []
    assert loss.item() == 2.5
    assert [(doing.operation, doing.peer) for doing in seen] == [("waiting for the loss", EVERYONE)]
    assert (WATCH.operation, WATCH._doing(0.0).peer) == ("", None)


def test_a_late_backward_is_of_its_own_steps_tokens() -> None:
    """Natural gradients are of a loss summed over tokens, and a step's differ from the newest one's."""
    book = StepBook(shapes=[SimpleNamespace(masks=MaskFacts())] * 2)  # type: ignore[list-item]
    weight = torch.ones(1, requires_grad=True)
    runner: Any = SimpleNamespace(
        _book=book,
        _module=lambda *_: (weight * 2, None),
        _chunk=0,
        _graph=nullcontext,
        _around=SimpleNamespace(forward=nullcontext, backward=lambda completes, stage: nullcontext()),
        own_loss=None,
        is_last=False,
        stage=0,
    )
    runner._module.training = True
    lives = [Live(), Live()]
    for tokens, live in zip((30, 7), lives, strict=True):
        live.inputs, live.gradients = (None, {}, None), (torch.ones(1),)
        book.label_tokens = tokens
        CausalLMRunner.forward(runner, live, 0)
    seen = []
    for live in lives:
        CausalLMRunner.backward(runner, live, 0)
        seen.append(CausalLMSupport.sum_of_losses(SimpleNamespace(book=book), 5, 2))  # type: ignore[arg-type]
    assert seen == [30.0, 7.0]
