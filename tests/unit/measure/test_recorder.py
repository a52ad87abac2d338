"""When the computations of a step ran, and what a forward keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.measure import clock
from paceline.measure.recorder import STEPS, Recorded, Recorder, SavedBytes, StepTimes

CPU = torch.device("cpu")
FLOAT = 4


def recorded(*spans: tuple[str, int, float, float]) -> StepTimes:
    return StepTimes(0.0, 9.0, [Recorded(*span) for span in spans])


def test_the_mean_of_a_kind_is_what_its_computations_add_up_to() -> None:
    step = recorded(("F", 0, 0.0, 5.0), ("F", 1, 5.0, 6.0), ("B", 0, 6.0, 8.0), ("F", 2, 8.0, 11.0))
    assert step.durations("F") == [5.0, 1.0, 3.0]
    assert step.mean("F") == 3.0
    assert step.mean("B") == 2.0
    assert step.mean("wait") is None


def test_a_computation_that_something_was_done_beside_does_not_count_if_there_are_others() -> None:
    recorder = Recorder()
    recorder.begin()
    recorder.add(Recorded("F", 0, 0.0, 3.0))
    recorder.leave_out("F", 0)
    recorder.add(Recorded("B", 0, 3.0, 5.0))
    recorder.add(Recorded("F", 1, 5.0, 6.0))
    recorder.end()
    (step,) = recorder.steps()
    assert (step.mean("F"), step.mean("B")) == (1.0, 2.0)
    assert [span.kind for span in step.spans] == ["F", "B", "F"]
    step.spans.pop()
    assert step.mean("F") == 3.0


def test_chunks_are_told_apart() -> None:
    step = StepTimes(
        0.0, 9.0, [Recorded("F", 0, 0.0, 1.0), Recorded("F", 0, 1.0, 4.0, 1), Recorded("F", 1, 4.0, 6.0, 1)]
    )
    step.unusual.add(("F", 0, 1))
    assert step.durations("F") == [1.0], "the unusual one is of the other chunk"
    assert step.durations("F", 1) == [2.0]
    assert step.mean("B", 1) is None


def test_steps_are_there_oldest_first_until_they_are_known() -> None:
    recorder = Recorder()
    for key in "ab":
        recorder.begin(key)
        recorder.add(Recorded("F", 3, 1.0, 2.0))
        recorder.end()
    steps = recorder.steps()
    assert [(step.key, step.spans) for step in steps] == [(key, [Recorded("F", 3, 1.0, 2.0)]) for key in "ab"]
    assert all(step.begun_s <= step.ended_s for step in steps)
    assert recorder.steps() == steps
    recorder.forget()
    assert recorder.steps() == []


def test_only_the_last_steps_are_kept() -> None:
    recorder = Recorder()
    for key in range(STEPS + 3):
        recorder.begin(key)
        recorder.end()
    assert [step.key for step in recorder.steps()] == list(range(3, STEPS + 3))


def test_what_runs_outside_of_a_step_or_in_one_that_failed_is_not_kept() -> None:
    recorder = Recorder()
    recorder.add(Recorded("F", 0, 0.0, 1.0))  # an evaluation
    recorder.end()
    recorder.begin()
    recorder.add(Recorded("F", 0, 0.0, 1.0))
    recorder.drop()
    recorder.add(Recorded("F", 0, 0.0, 1.0))
    recorder.end()
    assert recorder.steps() == []


class Device:
    """As CUDA's streams and events: the host runs ahead, and its events happen when the work before them is done."""

    def __init__(self) -> None:
        self.host_s = self.free_s = 100.0

    def work(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.host_s) + seconds

    def now(self) -> Event:
        return Event(self, max(self.free_s, self.host_s))


class Event:
    def __init__(self, device: Device, at_s: float) -> None:
        self.device, self.at_s, self.is_done = device, at_s, False

    def synchronize(self) -> None:
        self.device.host_s = max(self.device.host_s, self.at_s)
        self.is_done = True

    def elapsed_time(self, other: Event) -> float:
        assert self.is_done, "not waited for"
        assert other.is_done, "not waited for"
        return (other.at_s - self.at_s) * 1e3


def test_a_step_begins_on_the_device_when_the_update_of_the_step_before_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: device.host_s))
    recorder = Recorder(device.now)
    device.work(0.2)  # an update that the host has issued and not waited for
    update_done_s = device.free_s
    recorder.begin()
    start = device.now()
    device.work(0.05)
    recorder.add(Recorded("F", 0, start, device.now()))
    recorder.add(Recorded("wait", 0, 7.0, 8.0))  # the host's own clock
    recorder.end()
    (step,) = recorder.steps()
    assert step.begun_s == pytest.approx(update_done_s)  # by the host's clock
    assert [span.kind for span in step.spans] == ["F", "wait"]
    forward = step.spans[0]
    assert forward.start - step.begun_s == pytest.approx(0.0, abs=1e-6)
    assert forward.end - forward.start == pytest.approx(0.05, abs=1e-6)
    assert step.ended_s - step.begun_s == pytest.approx(0.05, abs=1e-6)
    assert step.spans[1] == Recorded("wait", 0, 7.0, 8.0)
    assert recorder.steps()[0].spans == step.spans  # read once, they stay


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    with SavedBytes(module, CPU) as saved:
        y = module(x)
    y.sum().backward()  # the graph is whole, and outside nothing is counted
    return saved.num_bytes


def test_saved_bytes_are_those_counted_by_hand() -> None:
    # A linear layer keeps its input, tanh its output; parameters and what nobody differentiates do not count.
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    assert saved_bytes(model, torch.ones(2, 5)) == FLOAT * (2 * 5 + 2 * 7)
    assert saved_bytes(model, torch.ones(4, 5)) == 2 * FLOAT * (2 * 5 + 2 * 7)
    with torch.no_grad(), SavedBytes(model, CPU) as saved:
        model(torch.ones(2, 5))
    assert saved.num_bytes == 0


def test_a_storage_that_several_operations_keep_counts_once_and_whole() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)  # kept by tanh, and by the product below twice
            half = y[:, :2]  # a view keeps all of y alive
            return y.sum() + (half * half).sum()

    assert saved_bytes(Twice(), torch.ones(3, 5)) == FLOAT * (3 * 5 + 3 * 5)


def test_recomputed_layers_are_not_counted_inside() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    x = torch.ones(2, 5, requires_grad=True)
    assert saved_bytes(Checkpointed(), x) < FLOAT * 2 * 64


def test_an_error_in_the_forward_leaves_no_hook_behind() -> None:
    model = nn.Linear(2, 2)
    saved = SavedBytes(model, CPU)
    with pytest.raises(KeyError), saved:
        raise KeyError
    model(torch.ones(1, 2)).sum().backward()
    assert saved.num_bytes == 0
