"""What an engine without a flush asks of its optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import ScheduleChoice
from paceline.optim.step_options import StepOptions
from paceline.runtime.asynchronous_engine import AsynchronousEngine
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
    engine: Any = SimpleNamespace(
        _stage_of={},
        _mirrors=SimpleNamespace(group=None, model_group=None),
        _routes=((0, 1),),
        plan=SimpleNamespace(ds_config={"zero_optimization": zero}, schedule=ScheduleChoice("one_direction")),
        _trained_ties=list,
    )
    options = AsynchronousEngine._own_options(engine, StepOptions(overlap=by_default, shard=False))
    assert options.overlap is overlaps
    assert options.is_asynchronous


def test_who_looks_at_a_loss_waits_for_everyone() -> None:
    """Between steps nobody is watched: a loss that never comes would be waited for until the transport gives up."""
    seen: list[Any] = []

    def wait() -> torch.Tensor:
        seen.append(WATCH._doing(0.0))
        return torch.tensor(2.5, dtype=torch.float64)

    engine: Any = SimpleNamespace(
        total_loss=None, _losses=SimpleNamespace(add=lambda loss: wait), _naming_lost_peers=nullcontext
    )
    WATCH.idle()
    loss = AsynchronousEngine._loss_of_step(engine)
    assert seen == []
    assert loss.item() == 2.5
    assert [(doing.operation, doing.peer) for doing in seen] == [("waiting for the loss", EVERYONE)]
    assert (WATCH.operation, WATCH._doing(0.0).peer) == ("", None)
