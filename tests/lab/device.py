"""The emulated accelerator of this process: how long a computation takes on it, now."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

AWAKE_S = 0.0005
"""Before the end of a computation: an accelerator is not late by what a sleeping process takes to wake up."""

AWAKE_SHARE = 0.05
"""Of a computation, at most: many short ones would keep the cores busy."""

GAP_S = 0.005
"""Between two layers of a stage, at most: an accelerator has been told of the next layer before it is done with one,
and does not notice that its host is busy for a moment."""

AHEAD_S = 0.001
"""The same before the gradient of a weight that is computed apart, which an accelerator has been told of as early."""


class Device:
    """An accelerator that computes one thing at a time.

    Attributes:
        speed: work of a second takes 1 / speed seconds.
        step: counts the steps that have begun.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self.step = 0
        self._noise, self._chance = 0.0, random.Random(0)
        self._last, self._free_at = ("", 0, 0), 0.0
        self._taken_s = defaultdict[str, float](float)
        self._begun: tuple[str | int, float] = "", 0.0

    def set_noise(self, noise: float, seed: int) -> None:
        """From now on a computation takes its time times a number drawn between 1 - noise and 1 + noise."""
        self._noise, self._chance = noise, random.Random(seed)

    def begin_step(self, speed: float) -> None:
        """A step begins, in which the device has ``speed``."""
        self.step += 1
        self.speed = speed
        self._last, self._free_at = ("", 0, 0), float("-inf")  # nothing follows the step before

    def begin(self, kind: str) -> None:
        """A computation of that kind, or of the backward of autograd that runs, begins before it is waited for."""
        self._begun = _graph() or kind, time.perf_counter()

    @contextmanager
    def computation(self, kind: str, position: int, work_s: float) -> Iterator[None]:
        """Lasts as long as ``work_s`` seconds of a device of speed 1 take.

        What follows the computation at the position before, of the same kind, begins when that was done, and so does
        what follows another one in the same backward of autograd: the layers of a stage take together what they should,
        whatever the host does in between. So does a ``"weight"``, the gradient of a weight, that is computed apart: it
        waits for no message.
        """
        seconds = work_s / self.speed
        if self._noise:
            seconds *= 1 + self._noise * self._chance.uniform(-1, 1)
        begin, graph = time.perf_counter(), _graph()
        has_begun = self._begun[0] == (graph or kind)
        if has_begun:
            begin = self._begun[1]
        self._begun = "", 0.0
        last_kind, last_position, last_graph = self._last
        follows = (kind, position - 1) == (last_kind, last_position) or 0 != graph == last_graph
        is_apart = kind == "weight" and not has_begun
        gap_s = begin - self._free_at
        if (follows and gap_s < GAP_S) or (is_apart and gap_s < AHEAD_S):
            begin = self._free_at
        begin -= self._taken_s[kind]
        self._taken_s[kind] = 0.0
        yield
        self._last, self._free_at = (kind, position, graph), begin + seconds
        _sleep_until(self._free_at, min(AWAKE_S, AWAKE_SHARE * seconds))

    @contextmanager
    def part_of_next(self, kind: str) -> Iterator[None]:
        """Time that the next computation of that kind takes less: the two are one."""
        begin = time.perf_counter()
        yield
        self._taken_s[kind] += time.perf_counter() - begin


def _graph() -> int:
    """Number of the backward of autograd that runs; 0 where none does."""
    number: int = torch._C._current_graph_task_id()
    return number + 1


def _sleep_until(moment: float, awake_s: float) -> None:
    if (seconds := moment - time.perf_counter() - awake_s) > 0:
        time.sleep(seconds)
    while time.perf_counter() < moment:
        time.sleep(0)


DEVICE = Device()
"""Of this process: what a layer takes depends on where it runs."""
