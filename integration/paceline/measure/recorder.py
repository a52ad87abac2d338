"""When each forward and backward of a step ran on this rank, and what a forward keeps alive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 8
"""Steps that are remembered."""


@dataclass
class StepTimes:
    """One step of one rank. Host clock (monotonic) in seconds; spans are (kind, micro-batch, start, end)."""

    begun_s: float
    ended_s: float = 0.0
    spans: list[tuple[str, int, float, float]] = field(default_factory=list)
    key: Any = None
    """What the step ran under: times of different keys are not mixed."""

    def typical(self, kind: str) -> float | None:
        """Median seconds of a forward (``"F"``) or backward (``"B"``)."""
        found = [end - start for k, _, start, end in self.spans if k == kind]
        return median(found) if found else None


class Recorder:
    """Times the computations of steps; on a GPU with events that are read only when somebody asks.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: deque[StepTimes] = deque(maxlen=STEPS)
        self._events: dict[int, list[Any]] = {}
        self._current: StepTimes | None = None

    def begin(self, key: Any = None) -> None:
        """A step begins."""
        self._current = StepTimes(time.perf_counter(), key=key)
        if self._cuda:
            self._origin = _event()

    def end(self) -> None:
        """The step is over."""
        if self._current is None:
            return
        self._current.ended_s = time.perf_counter()
        if len(self._steps) == STEPS:
            self._events.pop(id(self._steps[0]), None)
        self._steps.append(self._current)
        self._current = None

    def drop(self) -> None:
        """The step was none: it failed."""
        self._current = None

    @contextmanager
    def span(self, kind: str, micro_batch: int) -> Iterator[None]:
        """Time what runs inside."""
        if self._current is None:
            yield
            return
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._current.spans.append((kind, micro_batch, start, time.perf_counter()))
            return
        first = _event()
        yield
        events = self._events.setdefault(id(self._current), [self._origin])
        events.append((kind, micro_batch, first, _event()))

    def take(self) -> list[StepTimes]:
        """The steps since the last time, the last ones if they were many, oldest first. Waits for the device."""
        steps = self.steps()
        self._steps.clear()
        return steps

    def steps(self) -> list[StepTimes]:
        """The last steps, oldest first, which are kept. Waits for the device."""
        for step in self._steps:
            events = self._events.pop(id(step), None)
            if not events:
                continue
            origin, *spans = events
            for kind, micro_batch, first, last in spans:
                last.synchronize()
                start, end = (step.begun_s + origin.elapsed_time(event) / 1e3 for event in (first, last))
                step.spans.append((kind, micro_batch, start, end))
        return list(self._steps)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


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
