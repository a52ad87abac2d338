"""The tuner's order of events, with an engine that only writes down what it is to run."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.schedules import ScheduleChoice
from paceline.measure.recorder import Recorder, StepTimes
from paceline.planning.candidates import Candidate
from paceline.runtime import controller as subject
from paceline.runtime.controller import Controller
from paceline.runtime.observer import Report

STAGES, MICRO_BATCHES, CONFIGURED = 2, 8, 2


class Engine:
    """Two stages on one rank. Larger micro-batches take less time a sample, and ``saved`` bytes."""

    global_rank, num_stages, micro_batch_size, micro_batches = 0, STAGES, CONFIGURED, MICRO_BATCHES

    def __init__(self, saved: dict[int, float], latency_s: float = 0.0) -> None:
        self.control, self.recorder = self, Recorder()
        self.saved, self.latency_s = saved, latency_s
        self.measured: dict[int, float] = {}
        self.room = 1000.0
        self.cut, self.global_steps = CONFIGURED, 0
        self.ran: list[int] = []
        self.told: list[Candidate] = []

    def from_first(self, value: Any) -> Any:
        return value

    def run_candidate(self, candidate: Candidate) -> None:
        self.told.append(candidate)
        self.cut = candidate.micro_batch_size

    def train(self, controller: Controller, steps: int) -> None:
        for _ in range(steps):
            controller.before_step()
            self.measured[self.cut] = self.saved[self.cut]
            self.ran.append(self.cut)
            self.global_steps += 1

    def reports(self, *_: Any) -> list[Report]:
        each = 1.0 + 0.5 * self.cut
        spans = [("F", m, m * each, (m + 1) * each) for m in range(4)]
        spans += [("B", m, (m + 4) * each, (m + 5) * each) for m in range(4)]
        steps = [StepTimes(0.0, 8 * each, spans, ("1f1b", self.cut))]
        return [
            Report(stage, 0, "here", steps, {}, dict(self.measured), self.room, latency_s=self.latency_s)
            for stage in range(STAGES)
        ]


def make(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], **options: Any) -> tuple[Engine, Controller]:
    engine = Engine(**options)
    monkeypatch.setattr(subject, "gather_reports", engine.reports)
    return engine, Controller(engine, ScheduleChoice("adaptive", retune_every=3, micro_batch_sizes=sizes))


def test_each_size_runs_for_two_steps_and_then_comes_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, controller = make(monkeypatch, (1, 2, 4), saved={1: 10.0, 2: 20.0, 4: 40.0})
    engine.train(controller, 15)
    assert engine.ran[:8] == [2, 2, 2, 2, 1, 1, 4, 4]
    assert engine.told[:2] == [Candidate(1), Candidate(4)]
    assert [decision["step"] for decision in controller.decisions] == [8, 11, 14]
    assert controller.knowledge.sizes() == [1, 2, 4]


def test_a_size_that_cannot_fit_is_not_tried_and_the_next_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {1: 100.0, 2: 200.0, 4: 400.0, 8: 800.0, 16: 1600.0}
    engine, controller = make(monkeypatch, (1, 2, 4, 8, 16), saved=saved)
    engine.train(controller, 12)
    assert engine.ran[:8] == [2, 2, 2, 2, 1, 1, 4, 4]
    assert set(engine.ran) <= {1, 2, 4}
    assert [decision["step"] for decision in controller.decisions] == [8, 11]


def test_where_no_other_size_fits_the_choice_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, controller = make(monkeypatch, (2, 8), saved={2: 400.0, 8: 1600.0})
    engine.train(controller, 8)
    assert engine.told == []
    assert [decision["step"] for decision in controller.decisions] == [4, 7]


def test_a_size_that_turns_out_not_to_fit_is_left_although_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, controller = make(monkeypatch, (2, 4), saved={2: 100.0, 4: 600.0})  # 4 was expected to take 200
    engine.train(controller, 12)
    assert engine.ran[4:6] == [4, 4]
    assert set(engine.ran[6:]) == {2}


def test_what_no_longer_fits_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, controller = make(monkeypatch, (2,), saved={2: 100.0}, latency_s=9.0)
    engine.train(controller, 5)
    assert max(controller.current.peak_activations(STAGES, MICRO_BATCHES * CONFIGURED)) > STAGES
    engine.room = 250.0  # somebody else has taken the rest
    engine.train(controller, 3)
    assert controller.current == Candidate(2)
    engine.room = 1000.0
    engine.train(controller, 3)
    assert controller.current != Candidate(2)
