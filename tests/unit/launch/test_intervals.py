"""At which steps a run reports, saves, evaluates and completes a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.hf.arguments import TrainArguments
from paceline.launch.intervals import Intervals

STEPS = 10


def due(asks: Callable[[int], bool]) -> list[int]:
    return [step for step in range(1, STEPS + 1) if asks(step)]


def intervals(steps_per_epoch: int | None = 4, **flags: Any) -> Intervals:
    return Intervals(TrainArguments(**flags), STEPS, steps_per_epoch)


def test_reports_end_with_the_last_step() -> None:
    assert due(intervals(logging_steps=4).reports_at) == [4, 8, 10]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"save_steps": 4}, [4, 8, 10]),
        ({}, [10]),  # 500, and the last one
        ({"save_strategy": "epoch"}, [4, 8]),
        ({"save_strategy": "no"}, []),
    ],
)
def test_saves(flags: dict[str, Any], steps: list[int]) -> None:
    assert due(intervals(**flags).saves_at) == steps


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"eval_steps": 3}, [3, 6, 9, 10]),
        ({"eval_strategy": "epoch"}, [4, 8, 10]),
        ({"eval_strategy": "no"}, [10]),
        ({"eval_strategy": "steps", "logging_steps": 5}, [5, 10]),
    ],
)
def test_evaluations_end_with_the_last_step(flags: dict[str, Any], steps: list[int]) -> None:
    assert due(intervals(**flags).evaluates_at) == steps


def test_completions() -> None:
    assert due(intervals().completes_at) == []
    assert due(intervals(sample_every=5, sample_prompt="once").completes_at) == [5, 10]


def test_a_stream_has_no_epochs() -> None:
    assert intervals().epoch_at(6) == 1.5
    assert intervals(steps_per_epoch=None).epoch_at(6) is None
    assert due(intervals(steps_per_epoch=None, save_strategy="epoch").saves_at) == []
