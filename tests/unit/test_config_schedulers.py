"""Learning-rate schedules of a DeepSpeed JSON are checked before a model is loaded."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from paceline.config import check_scheduler, fill_auto
from paceline.config.schedulers import SCHEDULERS


def test_the_list_is_deepspeeds() -> None:
    from deepspeed.runtime import lr_schedules

    found = {
        name: set(inspect.signature(getattr(lr_schedules, name)).parameters) - {"optimizer"}
        for name in lr_schedules.VALID_LR_SCHEDULES
    }
    assert {name: set(keys) for name, keys in SCHEDULERS.items()} == found


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "scheduler.params.warmup_steps is not a parameter of WarmupLR: write one of warmup_min_lr, warmup_max_lr, "
            "warmup_num_steps, warmup_type, last_batch_iteration, or leave it out.",
        ),
        ({"type": "StepLR", "params": {"step": 3}}, "scheduler.params.step is not a parameter of StepLR: write one of"),
        (
            {"type": "WarmUpLR"},
            'scheduler.type is "WarmUpLR": neither DeepSpeed nor torch.optim has it; did you mean "WarmupLR"?',
        ),
        ({"type": "Slow"}, "neither DeepSpeed nor torch.optim has it; choose one of LRRangeTest, OneCycle, WarmupLR"),
    ],
)
def test_refused_by_name(scheduler: dict[str, Any], message: str) -> None:
    for check in (check_scheduler, lambda config: fill_auto(config, None, data_parallel=1)):
        with pytest.raises(ValueError, match=re.escape(message)):
            check({"scheduler": scheduler})


def test_a_schedule_that_fits_passes() -> None:
    for scheduler in (
        {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
        {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.5}},
        {"type": "OneCycle"},
        {},
    ):
        check_scheduler({"scheduler": scheduler})
