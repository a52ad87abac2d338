"""``"scheduler"`` of a DeepSpeed JSON: a learning-rate schedule of DeepSpeed's own, or one of torch's.

DeepSpeed hands ``params`` on as they are, and a wrong one is a TypeError once the model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..messages import nearest
from .section import show, value_at

_ALL = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULERS = {
    "LRRangeTest": (
        *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
        "last_batch_iteration",
    ),
    "OneCycle": (
        *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom"),
        *("cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
    ),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_ALL),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_ALL),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_ALL),
}
"""DeepSpeed's schedules and the names of their parameters; a test compares them with the installed DeepSpeed."""


def check_scheduler(ds_config: Mapping[str, Any]) -> None:
    """Check the names in ``"scheduler"``; torch is imported only for a schedule that is not DeepSpeed's.

    Raises:
        ValueError: there is no such schedule, or it has no such parameter.
    """
    name, params = value_at(ds_config, "scheduler.type"), value_at(ds_config, "scheduler.params")
    if not isinstance(name, str):
        return
    known = SCHEDULERS.get(name) or _torch_parameters(name)
    for key in params if isinstance(params, Mapping) else ():
        if key not in known:
            raise ValueError(
                f"scheduler.params.{key} is not a parameter of {name}: write one of {', '.join(known)}, or leave it "
                "out."
            )


def _torch_parameters(name: str) -> tuple[str, ...]:
    from torch.optim import lr_scheduler

    names = [
        key
        for key, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler) and not key.startswith("_")
    ]
    if name not in names:
        near = nearest(name, [*SCHEDULERS, *names])
        remedy = f'did you mean "{near}"?' if near else f"choose one of {', '.join(SCHEDULERS)}."
        raise ValueError(f"scheduler.type is {show(name)}: neither DeepSpeed nor torch.optim has it; {remedy}")
    parameters = inspect.signature(getattr(lr_scheduler, name)).parameters
    return tuple(key for key in parameters if key != "optimizer")
