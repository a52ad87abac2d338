"""Seconds that pass by work only: what ranks measure of themselves, and so what they choose, is the same anywhere.

On a machine that is busy a real clock tells mostly of the others, and layers that sleep wake up late.
"""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from paceline.measure.clock import Clock

TICK_S = 1e-5
"""Of a look at the clock: nothing takes no time at all."""

MESSAGES_S = 1e-3
"""When all messages of a step begin and end: they take no time. Not in the thread that works, so not by its clock."""

SWITCHING = ("runtime.migration", "runtime.schedule_actuator", "moe.rebalancer", "moe.moving")
"""Modules that time changes, which are to take next to nothing."""


class WorkTime:
    """A clock of this rank, from 0 in each step. One a process."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, TICK_S)

    def begin_step(self) -> None:
        """All ranks begin a step together."""
        self.now_s = 0.0

    def rule(self) -> None:
        """From now on modules that time something see this clock, as does the emulated device."""
        own = {"perf_counter": self.perf_counter, "sleep": self.sleep}
        for name in ("lab.device", "paceline.runtime.engine", *(f"paceline.{name}" for name in SWITCHING)):
            _set_time(name, own)
        for name in ("paceline.comm.transport", "paceline.runtime.rank_reports"):
            _set_time(name, {"perf_counter": lambda: MESSAGES_S})
        timing: Any = import_module("paceline.moe.timing")
        timing.Clock = partial(Clock, host_s=self.perf_counter)  # of experts

    def time(self, engine: Any) -> None:
        """Have ``engine`` see it: its computations, its waits and its layers."""
        engine.clock.host_s = self.perf_counter


def _set_time(module: str, changes: dict[str, Any]) -> None:
    import_module(module).time = SimpleNamespace(**{**vars(time), **changes})  # type: ignore[attr-defined]


WORK_TIME = WorkTime()


class Work(torch.autograd.Function):
    """A tensor as it is, and so many seconds of work; twice as many where its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        WORK_TIME.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        WORK_TIME.sleep(2 * ctx.seconds)
        return gradient, None
