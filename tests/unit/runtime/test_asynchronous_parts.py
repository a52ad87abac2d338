"""Parts of a run without a flush: its optimizer's options, its losses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import ScheduleChoice
from paceline.optim.step_options import StepOptions
from paceline.runtime import state_owners
from paceline.runtime.late_losses import LateLosses
from paceline.runtime.state_owners import Mirrors
from paceline.supervise.watch import EVERYONE, WATCH


@pytest.mark.parametrize(
    ("zero", "by_default", "overlaps"),
    [
        ({}, False, True),  # NCCL
        ({}, True, True),  # gloo
        ({"overlap_comm": True}, True, True),
        ({"overlap_comm": False}, False, False),
        ({"overlap_comm": False}, True, True),
    ],
)
def test_updates_are_beside_the_computation_unless_the_user_says_otherwise(
    zero: dict[str, Any], by_default: bool, overlaps: bool
) -> None:
    options = state_owners.over_directions(
        StepOptions(overlap=by_default, shard=False),
        Mirrors(ranks=(0,), group=None, model_group=None, stages=(0,), owners=(None,)),
        lambda parameter: 0,
        ScheduleChoice("one_direction"),
        {"zero_optimization": zero},
        ties=list,
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
