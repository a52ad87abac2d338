"""When each forward and backward of a step ran on this rank, and what a forward keeps alive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any, Generic

import torch
from torch import Tensor, nn

from ..schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from .clock import Moment, host_seconds

COMPUTED = frozenset((FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE))
"""Kinds of computations."""

STEPS = 8
"""Steps that are remembered."""


@dataclass(frozen=True)
class Recorded(Generic[Moment]):
    """Something that a rank did between two moments.

    Args:
        kind: those of :data:`COMPUTED`, or another.
        number: of the micro-batch; where steps run into each other it counts on from step to step. −1: of none.
        chunk: of the stage among those of the rank.
    """

    kind: str
    number: int
    start: Moment
    end: Moment
    chunk: int = 0


@dataclass
class StepTimes:
    """One step of one rank, in seconds of the host's clock (monotonic)."""

    begun_s: Any
    """When the device began with it, behind all that the step before had left to it."""
    ended_s: Any = 0.0
    spans: list[Recorded[Any]] = field(default_factory=list)
    key: Any = None
    """What the step ran under: times of different keys are not mixed."""
    unusual: set[tuple[str, int, int]] = field(default_factory=set)
    """Kind, number and chunk of computations that something was done beside: their times do not count."""
    kept_shares: dict[int, float] = field(default_factory=dict)
    """By chunk, the share of the activations that might be computed again which the step kept instead."""

    def read(self, seconds: Callable[[Any], float]) -> None:
        """Turn events into seconds of the host's clock."""
        self.begun_s, self.ended_s = seconds(self.begun_s), seconds(self.ended_s)
        self.spans = [replace(span, start=seconds(span.start), end=seconds(span.end)) for span in self.spans]

    def durations(self, kind: str, chunk: int = 0) -> list[float]:
        """Seconds of each forward (``"F"``) or backward (``"B"``), without the unusual ones if there are others. What
        was computed again before a backward's gradient came (``"R"``) is a part of the backward.
        """
        found = [span for span in self.spans if span.kind == kind and span.chunk == chunk]
        usual = [span for span in found if (kind, span.number, chunk) not in self.unusual]
        before = self._seconds_before(chunk) if kind in (BACKWARD, BACKWARD_INPUT) else {}
        return [span.end - span.start + before.get(span.number, 0.0) for span in usual or found]

    def _seconds_before(self, chunk: int) -> dict[int, float]:
        """By number: seconds of what was computed again before a backward's gradient came."""
        again = (span for span in self.spans if span.kind == RECOMPUTE and span.chunk == chunk)
        return {span.number: span.end - span.start for span in again}

    def mean(self, kind: str, chunk: int = 0) -> float | None:
        """Mean seconds of a forward or backward of a chunk."""
        found = self.durations(kind, chunk)
        return fmean(found) if found else None


class Recorder:
    """Keeps when the computations of the last steps ran.

    Moments are seconds of the host's clock, or, on a GPU, events that are read only when somebody asks.

    Args:
        now: this moment on the device (:meth:`paceline.measure.clock.Clock.now`).
    """

    def __init__(self, now: Callable[[], Any] = time.perf_counter) -> None:
        self._now = now
        self._steps: deque[StepTimes] = deque(maxlen=STEPS)
        self._current: StepTimes | None = None

    def begin(self, key: Any = None) -> None:
        """A step begins."""
        self._current = StepTimes(self._now(), key=key)

    def end(self) -> None:
        """The step is over."""
        if self._current is not None:
            self._current.ended_s = self._now()
            self._steps.append(self._current)
            self._current = None

    def drop(self) -> None:
        """The step was none: it failed."""
        self._current = None

    def add(self, span: Recorded[Any]) -> None:
        """Something ran between two moments."""
        if self._current is not None:
            self._current.spans.append(span)

    def computed_s(self) -> float:
        """Seconds of the forwards and backwards of the step that runs now. Waits for the device."""
        total = 0.0
        for span in self._current.spans if self._current is not None else ():
            if span.kind in COMPUTED:
                if isinstance(span.start, float):
                    total += span.end - span.start
                else:
                    span.end.synchronize()
                    total += span.start.elapsed_time(span.end) / 1e3
        return total

    def keeps(self, shares: Mapping[int, float]) -> None:
        """So large a share of the activations that might be computed again is kept, by chunk."""
        if self._current is not None:
            self._current.kept_shares = dict(shares)

    def leave_out(self, kind: str, number: int, chunk: int = 0) -> None:
        """Something was done beside a computation of this step: its seconds tell nothing of others."""
        if self._current is not None:
            self._current.unusual.add((kind, number, chunk))

    def forget(self) -> None:
        """What was measured so far is known."""
        self._steps.clear()

    def steps(self) -> list[StepTimes]:
        """The last steps, oldest first, since the last :meth:`forget`. Waits for the device."""
        seconds = host_seconds(self._now)
        for step in self._steps:
            step.read(seconds)
        return list(self._steps)


@cache
def _make_workspaces(device: torch.device) -> None:
    """Have the libraries of matrix products allocate what they keep for themselves, with a product or two."""
    one = torch.ones(16, 16, device=device)
    torch.addmm(one[0], one, one @ one)


class SavedBytes:
    """Counts what a forward keeps for the backward while it is entered: bytes.

    On a GPU what is allocated afterwards and was not before. On a CPU what autograd saves, each storage once, without
    parameters; what activation checkpointing keeps is not seen by autograd and is left out.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device if device.type == "cuda" else None
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        if self._device is not None:
            _make_workspaces(self._device)
            self.num_bytes = -torch.cuda.memory_allocated(self._device)
        else:
            self._hooks.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        if self._device is not None:
            self.num_bytes += torch.cuda.memory_allocated(self._device)
        else:
            self._hooks.__exit__(*args)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor
