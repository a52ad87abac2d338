"""What a rank books of its computations: by chunk."""

from __future__ import annotations

import torch
from torch import nn

from paceline.measure.clock import Clock
from paceline.runtime.meter import Meter

CPU = torch.device("cpu")


def keeps(num_floats: int) -> None:
    x = torch.ones(num_floats, requires_grad=True)
    x.exp()  # which keeps its output


def test_each_chunk_tells_once_what_its_forward_keeps() -> None:
    meter = Meter(Clock(CPU), nn.Identity(), CPU)
    meter.recorder.begin()
    meter.compute("F", 0, lambda: keeps(99))
    assert meter.saved_bytes == {}, "nobody asked"
    meter.measures_memory_of = 2
    for number, (chunk, size) in enumerate([(1, 5), (0, 3), (1, 7), (0, 8)]):
        meter.compute("F", number, lambda size=size: keeps(size), chunk)  # type: ignore[misc]
    meter.compute("B", 0, lambda: keeps(99), 1)
    assert meter.saved_bytes == {2: {1: 20.0, 0: 12.0}}
    meter.recorder.end()
    (step,) = meter.recorder.steps()
    assert step.unusual == {("F", 0, 1), ("F", 1, 0)}
    assert [(span.kind, span.number, span.chunk) for span in step.spans] == [
        *(("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 2, 1), ("F", 3, 0), ("B", 0, 1)),
    ]
    meter.measures_memory_of = 4
    meter.compute("F", 0, lambda: keeps(6), 1)
    assert meter.saved_bytes[4] == {1: 24.0}, "another size is another matter"


def test_what_is_left_for_later_counts_as_the_most_that_it_can_be_until_it_is_measured() -> None:
    meter = Meter(Clock(CPU), nn.Identity(), CPU)
    meter.may_defer(lambda: 9.0, 0)
    assert meter.deferred_bytes == {}, "nobody asked"
    meter.measures_memory_of = 2
    for most in (None, 9.0, 8.0):
        meter.may_defer(lambda most=most: most, 0)  # type: ignore[misc]
    meter.may_defer(lambda: None, 1)
    assert meter.deferred_bytes == {2: {0: 9.0}}
    meter.deferred(lambda: 5, 0)
    meter.deferred(lambda: 3, 1)
    assert meter.deferred_bytes == {2: {0: 5.0, 1: 3.0}}
    meter.forget_stage()
    assert meter.deferred_bytes == {}
