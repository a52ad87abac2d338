"""The controller's order of events, with pipelines that only write down what they are to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from paceline.comm.control import SHARED
from paceline.config.partitions import PartitionChoice
from paceline.config.schedules import ScheduleChoice
from paceline.measure.layer_timer import ItemTimes
from paceline.measure.recorder import Recorded, Recorder, StepTimes
from paceline.planning import partition_search
from paceline.planning.candidates import Candidate
from paceline.planning.switching import Decision
from paceline.planning.tuning import DecisionLog, DecisionRecord, Proposal, TuningInterval
from paceline.runtime import partition_actuator as subject
from paceline.runtime import schedule_actuator
from paceline.runtime.controller import Controller
from paceline.runtime.pipeline_tuning import pipeline_controller
from paceline.runtime.planning_process import PlanningProcess
from paceline.runtime.rank_reports import LayerReport, Report
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import one_f_one_b
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate

STAGES, MICRO_BATCHES, CONFIGURED = 2, 8, 2


class Job:
    """What the controller uses of a job whose one rank stands for all of them."""

    num_stages: int
    micro_batch_size, micro_batches = CONFIGURED, MICRO_BATCHES
    replica_micro_batches = (MICRO_BATCHES,)
    rank = global_steps = 0
    cut = CONFIGURED
    is_drawn = True

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.records_switches = False
        self.ran: list[int] = []

    def controller(self, schedule: ScheduleChoice, partition: PartitionChoice | None = None, **more: Any) -> Controller:
        """The controller of all its parts, which are this one fake."""
        part: Any = self
        partition = partition or PartitionChoice("uniform")
        more |= {"log": DecisionLog(), "timelines": part, "routes": (tuple(range(part.num_stages)),)}
        found = pipeline_controller(schedule, partition, *[part] * 5, **more)
        assert found is not None
        return found

    def from_first(self, value: Any) -> Any:
        return value


class Engine(Job):
    """Two stages on one rank. Larger micro-batches take less time a sample, and ``saved`` bytes."""

    num_stages = STAGES
    parts = (0, 1, 2)

    def __init__(self, saved: dict[int, float], latency_s: float = 0.0) -> None:
        super().__init__()
        self.saved, self.latency_s = saved, latency_s
        self.measured: dict[int, float] = {}
        self.room = 1000.0
        self.told: list[Candidate] = []
        self.order: Any = None

    @property
    def current(self) -> Candidate:
        return self.told[-1] if self.told else Candidate(CONFIGURED)

    def run_candidate(self, candidate: Candidate) -> None:
        self.told.append(candidate)
        self.cut = candidate.micro_batch_size

    def train(self, controller: Controller, steps: int) -> None:
        for _ in range(steps):
            controller.before_step()
            self.measured[self.cut] = self.saved[self.cut]
            self.ran.append(self.cut)
            self.global_steps += 1

    def gather(self, after: dict[str, int], **_: Any) -> list[Report]:
        each = 1.0 + 0.5 * self.cut
        spans = [Recorded("F", m, m * each, (m + 1) * each) for m in range(4)]
        spans += [Recorded("B", m, (m + 4) * each, (m + 5) * each) for m in range(4)]
        steps = [StepTimes(0.0, 8 * each, spans, ("1f1b", self.cut))]
        return [
            Report(
                stage,
                0,
                "here",
                steps,
                {},
                {size: {0: saved} for size, saved in self.measured.items()},
                self.room,
                latency_s=self.latency_s,
            )
            for stage in range(STAGES)
        ]


SPLIT = Candidate(CONFIGURED, family="zbh1")
"""Tried before the first choice, so that both parts of a backward are timed."""


def make(sizes: tuple[int, ...], **options: Any) -> tuple[Engine, Controller]:
    engine = Engine(**options)
    return engine, engine.controller(ScheduleChoice("adaptive", retune_every=3, micro_batch_sizes=sizes))


def test_each_size_runs_for_two_steps_and_then_comes_the_first_choice() -> None:
    engine, controller = make((1, 2, 4), saved={1: 10.0, 2: 20.0, 4: 40.0})
    engine.train(controller, 17)
    assert engine.ran[:10] == [2, 2, 2, 2, 1, 1, 4, 4, 2, 2]
    assert engine.told[:3] == [Candidate(1), Candidate(4), SPLIT]
    assert [decision["step"] for decision in controller.decisions] == [10, 13, 16]
    assert controller.measurements.costs.sizes() == [1, 2, 4]


def test_steps_beside_which_experts_move_count_for_nothing() -> None:
    """Experts' own controller says so at the end of the step before, whether a size is on trial or chosen."""
    engine, controller = make((1, 2, 4), saved={1: 10.0, 2: 20.0, 4: 40.0})
    left_out = []
    engine.skip_messages = lambda after: left_out.append(engine.global_steps)
    for until in (3, 6, 7, 15):
        engine.train(controller, until - engine.global_steps)
        controller.measurements.disturb_next()
    engine.train(controller, 2)
    assert left_out == [4, 7, 8, 16]
    assert engine.ran[:13] == [2, 2, 2, 2, 2, 1, 1, 1, 1, 4, 4, 2, 2], "two steps of each size count"
    assert controller.decisions[0]["step"] == 13


def test_a_size_that_cannot_fit_is_not_tried_and_the_next_takes_its_turn() -> None:
    saved = {1: 100.0, 2: 200.0, 4: 400.0, 8: 800.0, 16: 1600.0}
    engine, controller = make((1, 2, 4, 8, 16), saved=saved)
    engine.train(controller, 14)
    assert engine.ran[:10] == [2, 2, 2, 2, 1, 1, 4, 4, 2, 2]
    assert set(engine.ran) <= {1, 2, 4}
    assert [decision["step"] for decision in controller.decisions] == [10, 13]


def test_where_nothing_else_fits_the_choice_comes_at_once() -> None:
    engine, controller = make((2, 8), saved={2: 600.0, 8: 2400.0})
    engine.train(controller, 8)
    assert engine.told == []
    assert [decision["step"] for decision in controller.decisions] == [4, 7]


def test_a_size_that_turns_out_not_to_fit_is_left_although_it_is_fast() -> None:
    engine, controller = make((2, 4), saved={2: 100.0, 4: 600.0})  # 4 was expected to take 200
    engine.train(controller, 12)
    assert engine.ran[4:6] == [4, 4]
    assert set(engine.ran[6:]) == {2}


def test_what_no_longer_fits_is_left() -> None:
    engine, controller = make((2,), saved={2: 100.0}, latency_s=9.0)
    engine.train(controller, 7)
    assert max(engine.current.peak_activations(STAGES, MICRO_BATCHES * CONFIGURED)) > STAGES
    engine.room = 250.0  # somebody else has taken the rest
    engine.train(controller, 3)
    assert engine.current == Candidate(2)
    engine.room = 1000.0
    engine.train(controller, 3)
    assert engine.current != Candidate(2)


# -- partition -------------------------------------------------------------------------------------------------------

LAYERS, FORWARD_S, BACKWARD_S, NUM_PARAMETERS = 12, 0.1, 0.2, 1000
UNIFORM, UNIFORM_24 = (0, 4, 8, 12), (0, 8, 16, 24)
EVERY = 5


class Pipe(Job):
    """Three stages on one rank, whose equal layers take their time by the speed of their device now."""

    num_stages = 3

    def __init__(
        self,
        speeds: tuple[float, ...] = (1.0, 1.0, 1.0),
        *,
        noise: float = 0.0,
        latency_s: float = 0.0,
        num_layers: int = LAYERS,
        refuse: Callable[[tuple[int, ...]], Exception | None] = lambda parts: None,
    ) -> None:
        super().__init__()
        self.speeds, self.noise, self.latency_s, self.refuse = speeds, noise, latency_s, refuse
        self.num_layers = num_layers
        self.chance = random.Random(1)
        self.recorder = self  # type: ignore[assignment]
        self.parts = tuple(num_layers * stage // 3 for stage in range(4))
        self.order = one_f_one_b(3, MICRO_BATCHES)
        self.current = Candidate(CONFIGURED)
        self.migrations: list[dict[str, Any]] = []
        self.rebuild_s = 0.3
        self.sends_ahead = False
        self.steps_ahead = 1
        self.skipped_after: list[int] = []
        self.steps: list[StepTimes] = []
        self.log: list[tuple[int, str, Any]] = []

    def _note(self, what: str, value: Any = None) -> None:
        self.log.append((self.global_steps, what, value))

    def noted(self, what: str) -> list[tuple[int, Any]]:
        """Steps before which something was done, and with what."""
        return [(step, value) for step, kind, value in self.log if kind == what]

    def cuts(self) -> tuple[int, ...]:
        return tuple(range(1, self.num_layers))

    def time_layers(self, layers: Any) -> None:
        self._note("time")

    def stop_timing_layers(self, layers: Any, size: int) -> dict[int, LayerReport]:
        self._note("stop timing")
        return {
            item: LayerReport(
                ("layer", "layer"), NUM_PARAMETERS, ItemTimes(FORWARD_S / speed, BACKWARD_S / speed, 100.0, 8.0)
            )
            for (a, b), speed in zip(pairwise(self.parts), self.speeds, strict=True)
            for item in range(a, b)
        }

    def forget(self) -> None:
        self.steps.clear()

    def skip_messages(self, after: Any) -> None:
        assert not self.steps, "what a step took is dropped with its messages"
        self.skipped_after.append(self.global_steps)

    def write(self, reports: Any, costs: Any, step: int) -> None:
        self._note("record", step)

    def run_candidate(self, candidate: Candidate) -> None:
        self._note("schedule", candidate)
        self.current = candidate

    def prepare_repartition(self, parts: tuple[int, ...]) -> bool:
        self._note("prepare", parts)
        if error := self.refuse(parts):
            raise error
        return self.sends_ahead

    def repartition_is_prepared(self) -> bool:
        self.steps_ahead -= 1
        return self.steps_ahead <= 0

    def forget_repartition(self) -> None:
        self._note("forget")

    def repartition(self, parts: tuple[int, ...]) -> None:
        self._note("move", parts)
        if error := self.refuse(parts):
            raise error
        assert parts != self.parts, "nothing to move"
        self.parts = parts
        self.migrations.append({"rebuild_s": self.rebuild_s, "paused_bytes": 0, "transfer_s": 0.0})

    def train(self, controller: Controller, steps: int) -> None:
        for _ in range(steps):
            controller.before_step()
            self.steps.append(StepTimes(0.0, key=("", CONFIGURED)))
            self.global_steps += 1

    def stage_s(self, parts: tuple[int, ...], noise: float = 0.0) -> list[tuple[float, float]]:
        """Seconds of a forward and a backward of each stage."""
        factors = [(b - a) / s for (a, b), s in zip(pairwise(parts), self.speeds, strict=True)]
        factors = [factor * self.chance.uniform(1 - noise, 1 + noise) for factor in factors]
        return [(FORWARD_S * factor, BACKWARD_S * factor) for factor in factors]

    def gather(self, after: dict[str, int], *, layers: Any, uneven_s: Any, memory_bytes: int | None) -> list[Report]:
        self._note("gather")
        found = [
            Report(stage, 0, "here", [], {}, {CONFIGURED: {0: 100.0 * (b - a)}}, 1e9, latency_s=self.latency_s)
            for stage, (a, b) in enumerate(pairwise(self.parts))
        ]
        for _ in self.steps:
            for report, (forward_s, backward_s) in zip(found, self.stage_s(self.parts, self.noise), strict=True):
                whole = MICRO_BATCHES * (forward_s + backward_s)
                spans, now = [], 0.0
                # Nothing can be left for later here.
                backwards = [("I", backward_s), ("W", 0.0)] if self.current == SPLIT else [("B", backward_s)]
                for kind, seconds in [("F", forward_s)] * MICRO_BATCHES + backwards * MICRO_BATCHES:
                    spans.append(Recorded(kind, 0, now, now + seconds))
                    now += seconds
                report.steps.append(StepTimes(0.0, whole, spans, ("1f1b", CONFIGURED)))
        for report, (a, b) in zip(found, pairwise(self.parts), strict=True):
            report.layers = {item: layer for item, layer in layers.items() if a <= item < b}
            report.state_bytes = 16.0
        return found

    def step_s(self, parts: tuple[int, ...], schedule: Schedule | None = None) -> float:
        link = Link(float("inf"), self.latency_s)
        forward_s, backward_s = zip(*self.stage_s(parts), strict=True)
        costs = Costs(forward_s, backward_s, (8.0, 8.0), (link, link), (link, link))
        return simulate(schedule or self.order, costs).makespan_s

    def every_partition(self) -> list[tuple[int, ...]]:
        return [(0, *cuts, self.num_layers) for cuts in combinations(self.cuts(), 2)]

    def best_s(self) -> float:
        return min(map(self.step_s, self.every_partition()))


def follow(pipe: Pipe, schedule: ScheduleChoice | None = None, memory_bytes: int | None = None) -> Controller:
    partition = PartitionChoice("uniform", EVERY, memory_bytes=memory_bytes)
    return pipe.controller(schedule or ScheduleChoice("1f1b"), partition)


def test_layers_are_timed_once_and_then_come_the_looks() -> None:
    pipe = Pipe()
    pipe.train(follow(pipe), 16)
    assert [(step, what) for step, what, _ in pipe.log] == [
        *((1, "time"), (2, "stop timing"), (4, "gather"), (9, "gather"), (14, "gather")),
    ]


def test_the_first_look_waits_until_it_is_known_how_busy_experts_are() -> None:
    pipe = Pipe()
    known = {"at": 7}
    controller = pipe.controller(
        ScheduleChoice("1f1b"),
        PartitionChoice("uniform", EVERY),
        uneven_experts=lambda: {} if pipe.global_steps >= known["at"] else None,
    )
    pipe.train(controller, 16)
    assert [step for step, _ in pipe.noted("gather")] == [7, 12]
    other = Pipe()
    adaptive = ScheduleChoice("adaptive", EVERY)
    controller = other.controller(adaptive, uneven_experts=lambda: None)
    other.train(controller, 16)
    assert controller.decisions, "where layers stay, nothing waits"


@pytest.mark.parametrize("speeds", [(4.0, 2.0, 1.0), (1.0, 1.0, 2.0), (1.0, 3.0, 1.0)])
def test_the_first_look_finds_the_best_partition(speeds: tuple[float, ...]) -> None:
    pipe = Pipe(speeds)
    controller = follow(pipe)
    pipe.train(controller, 30)
    assert pipe.noted("move") == [(4, pipe.parts)]
    assert pipe.step_s(pipe.parts) == pytest.approx(pipe.best_s(), rel=1e-9)
    assert [decision["step"] for decision in controller.decisions] == [4, 9, 14, 19, 24, 29]
    assert controller.measurements.costs.parts == pipe.parts


def test_what_runs_stays_if_it_is_the_best() -> None:
    pipe = Pipe()
    controller = follow(pipe)
    pipe.train(controller, 20)
    assert pipe.noted("move") == []
    assert all(decision["why"] == "what runs is the best" for decision in controller.decisions)


def test_decisions_carry_the_numbers() -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    controller = follow(pipe)
    now_s = pipe.step_s(UNIFORM)
    pipe.train(controller, 10)
    first, second = controller.decisions
    most = max(a - b for a, b in zip(pipe.parts[1:], UNIFORM[1:], strict=True))
    assert first["why"].startswith(f"saves {EVERY * (now_s - pipe.best_s()):.4g} s in {EVERY} steps, more than the")
    assert first["predicted_now_s"] == pytest.approx(now_s)
    assert first["predicted_best_s"] == pytest.approx(pipe.best_s())
    assert {key: first[key] for key in first if key not in ("why", "predicted_now_s", "predicted_best_s")} == {
        "what": "partition",
        "step": 4,
        "switched": True,
        "from": list(UNIFORM),
        "to": list(pipe.parts),
        "schedule": f"1f1b, micro-batch {CONFIGURED}",
        "measured_s": pytest.approx(4 * MICRO_BATCHES * (FORWARD_S + BACKWARD_S)),
        "switch_s": subject.REBUILD_S,
        "moved_bytes": 0.0,
        "migration": pipe.migrations[0],
    }
    assert most > 0
    assert (second["switched"], second["from"], second["to"]) == (False, list(pipe.parts), list(pipe.parts))
    assert second["migration"] is None
    assert second["predicted_now_s"] == second["predicted_best_s"] == pytest.approx(pipe.best_s())


def test_a_device_that_slows_down_and_recovers() -> None:
    pipe = Pipe()
    controller = follow(pipe)
    pipe.train(controller, 11)
    pipe.speeds = (1.0, 0.5, 1.0)
    pipe.steps.clear()
    pipe.train(controller, 9)
    slow = pipe.parts
    assert [step for step, _ in pipe.noted("move")] == [14]
    assert pipe.step_s(slow) == pytest.approx(pipe.best_s())
    pipe.speeds = (1.0, 1.0, 1.0)
    pipe.steps.clear()
    pipe.train(controller, 20)
    assert [step for step, _ in pipe.noted("move")] == [14, 24]
    assert pipe.parts == UNIFORM


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (4.0, 2.0, 1.0)])
def test_noise_moves_nothing(speeds: tuple[float, ...]) -> None:
    pipe = Pipe(speeds, noise=0.1, num_layers=24)
    controller = follow(pipe)
    pipe.train(controller, 5 + 50 * EVERY)
    assert len(controller.decisions) == 51
    been = [UNIFORM_24, *(parts for _, parts in pipe.noted("move"))]
    # The first look may be mistaken by a layer; there is no way back to what was left.
    assert len(set(been)) == len(been) <= (4 if len(set(speeds)) > 1 else 1)
    assert pipe.step_s(pipe.parts) < 1.05 * pipe.best_s()


def test_a_gain_within_what_predictions_are_off_by_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = (1.0, 1.0, 1.3)
    pipe = Pipe(speeds, num_layers=60)
    gain = 1 - pipe.best_s() / pipe.step_s(pipe.parts)
    assert gain > 0.02, "the default would refuse it"
    for least, moves in ((gain * 1.01, 0), (gain * 0.99, 1)):
        monkeypatch.setattr(partition_search, "LEAST_GAIN", least)
        pipe = Pipe(speeds, num_layers=60)
        pipe.train(follow(pipe), 12)
        assert len(pipe.noted("move")) == moves


def test_a_move_too_dear_for_one_period_is_made_once_the_loss_exceeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    gain_s = pipe.step_s(UNIFORM) - pipe.best_s()
    monkeypatch.setattr(subject, "REBUILD_S", 2.5 * EVERY * gain_s)
    controller = follow(pipe)
    pipe.train(controller, 30)
    assert [step for step, _ in pipe.noted("move")] == [14]
    assert [d["switched"] for d in controller.decisions] == [False, False, True, False, False, False]
    assert "no more than" in controller.decisions[1]["why"]
    assert f"{2 * EVERY * gain_s:.4g} s lost so far, more than" in controller.decisions[2]["why"]


def test_what_the_last_move_took_counts_for_the_next() -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    pipe.rebuild_s = 1e6
    controller = follow(pipe)
    pipe.train(controller, 5)
    pipe.speeds = (1.0, 2.0, 4.0)
    pipe.train(controller, 10)
    assert [step for step, _ in pipe.noted("move")] == [4]
    assert controller.decisions[-1]["switch_s"] == 1e6


ADAPTIVE = ScheduleChoice("adaptive", retune_every=EVERY, micro_batch_sizes=(CONFIGURED,))


def test_schedule_and_partition_change_in_one_look() -> None:
    pipe = Pipe((4.0, 2.0, 1.0), latency_s=0.4)
    controller = follow(pipe, ADAPTIVE)
    pipe.train(controller, 14)
    assert [step for step, _ in pipe.noted("move")] == [6]
    assert {step for step, _ in pipe.noted("schedule")} == {4, 6}
    what = [(decision["what"], decision["step"], decision["switched"]) for decision in controller.decisions]
    assert what == [("schedule", 6, True), ("partition", 6, True), ("schedule", 11, False), ("partition", 11, False)]
    assert pipe.current != Candidate(CONFIGURED)
    assert controller.decisions[1]["schedule"] == pipe.current.name
    candidates = next(iter(controller._actuators)).candidates  # type: ignore[attr-defined]
    schedules = [c.schedule(3, CONFIGURED * MICRO_BATCHES) for c in candidates]
    best_s = min(pipe.step_s(parts, schedule) for parts in pipe.every_partition() for schedule in schedules)
    chosen = pipe.current.schedule(3, CONFIGURED * MICRO_BATCHES)
    assert pipe.step_s(pipe.parts, chosen) <= 1.01 * best_s


def test_another_process_finds_the_same_partition_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the schedule that it is for is found there."""
    monkeypatch.setattr(schedule_actuator, "ASIDE_FROM", 1)
    found: list[tuple[list[Any], list[Any], list[Any]]] = []
    for process in (None, PlanningProcess()):
        pipe = Pipe((4.0, 2.0, 1.0), latency_s=0.4)
        controller = pipe.controller(ADAPTIVE, PartitionChoice("uniform", EVERY), process=process)
        pipe.train(controller, 8)
        pipe.speeds = (1.0, 2.0, 4.0)
        pipe.train(controller, 12)
        kept = ("what", "from", "to", "predicted_best_s", "switched")
        decided = [{key: decision[key] for key in kept} for decision in controller.decisions]
        found.append((pipe.noted("move"), decided, [decision["step"] for decision in controller.decisions]))
        if process is not None:
            process.close()
    (moves, decided, steps), (moves_aside, decided_aside, steps_aside) = found
    assert len(moves) == 2
    assert decided_aside == decided
    assert [parts for _, parts in moves_aside] == [parts for _, parts in moves]
    assert moves_aside[0][0] == moves[0][0], "the first one is made at once"
    assert moves_aside[1][0] == moves[1][0] + 1
    assert steps_aside == [step + (step > steps[0]) for step in steps]


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_layers_move_when_what_is_sent_ahead_has_come_together_with_the_schedule_for_them(steps_ahead: int) -> None:
    found = []
    for sends_ahead in (False, True):
        pipe = Pipe((4.0, 2.0, 1.0), latency_s=0.4)
        pipe.sends_ahead, pipe.steps_ahead, pipe.records_switches = sends_ahead, steps_ahead, True
        controller = follow(pipe, ADAPTIVE)
        pipe.train(controller, 14)
        assert [step for step, _ in pipe.noted("prepare")] == [6]
        found.append((pipe.noted("move"), pipe.noted("schedule")[-1], controller.decisions))
        assert pipe.noted("record")[0] == (pipe.noted("move")[0][0], 6), "of the step that was looked at"
        # Steps beside which something moves tell little of links.
        assert pipe.skipped_after == list(range(7, 8 + (steps_ahead if sends_ahead else 0)))
    (moved, schedule, decided), (moved_later, schedule_later, decided_later) = found
    assert [(step + steps_ahead, parts) for step, parts in moved] == moved_later
    assert (schedule[0] + steps_ahead, schedule[1]) == schedule_later
    whole = ("what", "from", "to", "switched", "migration")
    assert [{k: d.get(k) for k in whole} for d in decided] == [{k: d.get(k) for k in whole} for d in decided_later]


def test_a_run_that_is_resumed_forgets_what_it_was_about_to_do() -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    pipe.sends_ahead = True
    controller = follow(pipe)
    while not pipe.noted("prepare"):
        pipe.train(controller, 1)
    controller.go_on(pipe.global_steps)
    pipe.sends_ahead = False
    pipe.train(controller, 1)
    assert len(pipe.noted("forget")) == 1
    assert [step for step, _ in pipe.noted("move")] == [step for step, _ in pipe.noted("prepare")][1:]


@pytest.mark.parametrize("beside", [False, True])
def test_a_move_by_hand_after_a_decision_stands_until_the_next_look(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided, or begun to be, for layers as they lay before."""
    monkeypatch.setattr(schedule_actuator, "ASIDE_FROM", 1 if beside else 1000)
    process = PlanningProcess()
    pipe = Pipe((4.0, 2.0, 1.0))
    controller = pipe.controller(ScheduleChoice("1f1b"), PartitionChoice("uniform", EVERY), process=process)
    pipe.sends_ahead = not beside
    pipe.train(controller, 5 if beside else 4)
    if beside:
        pipe.speeds = (1.0, 2.0, 4.0)
    while pipe.log[-1][1] != ("gather" if beside else "prepare"):
        pipe.train(controller, 1)
    by_hand = (0, 1, 2, pipe.num_layers)
    pipe.parts, pipe.log[:] = by_hand, []
    pipe.train(controller, 1)
    process.close()
    assert (pipe.parts, pipe.noted("move")) == (by_hand, [])
    assert [decision["switched"] for decision in controller.decisions][-1:] == [False]


class TwoReplicas(Pipe):
    """The steps of the other one take ``slower`` times as long."""

    replica_micro_batches = (MICRO_BATCHES, MICRO_BATCHES)
    slower = 1

    def share_micro_batches(self, shares: tuple[int, ...]) -> None:
        self._note("shares", shares)
        self.replica_micro_batches, self.micro_batches = shares, shares[0]
        self.slower = 1  # both end at once

    def gather(self, after: dict[str, int], **arguments: Any) -> list[Report]:
        found = super().gather(after, **arguments)
        return [*found, *(replace(report, replica=1, steps=list(map(self._slower, report.steps))) for report in found)]

    def _slower(self, step: StepTimes) -> StepTimes:
        spans = [replace(span, start=self.slower * span.start, end=self.slower * span.end) for span in step.spans]
        return StepTimes(step.begun_s, self.slower * step.ended_s, spans, step.key)


@pytest.mark.parametrize("beside", [False, True])
def test_where_shares_change_schedule_and_partition_wait_for_the_next_look(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are chosen for numbers of micro-batches, and might not exist, or not fit, with others."""
    monkeypatch.setattr(schedule_actuator, "ASIDE_FROM", 1 if beside else 1000)
    process = PlanningProcess()
    pipe = TwoReplicas((4.0, 2.0, 1.0), latency_s=0.4)
    controller = pipe.controller(ADAPTIVE, PartitionChoice("uniform", EVERY), reshare_every=EVERY, process=process)
    pipe.train(controller, 8)
    pipe.slower, pipe.speeds = 3, (1.0, 2.0, 4.0)
    pipe.train(controller, 10)
    process.close()
    assert pipe.noted("shares") == [(11 + beside, (13, 3))]
    assert [step for step, _ in pipe.noted("move")] == [6, 16 + beside]
    decided = [decision["what"] for decision in controller.decisions]
    assert decided == ["shares", "schedule", "partition", "shares", "shares", "schedule", "partition"]


class SharedSteps(TwoReplicas):
    """A step of a replica takes as long as its micro-batches then."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[tuple[int, ...]] = []
        """One entry a step that was not forgotten."""
        self.slowness = [1, 1]

    def share_micro_batches(self, shares: tuple[int, ...]) -> None:
        self._note("shares", shares)
        self.replica_micro_batches = shares

    def train(self, controller: Controller, steps: int) -> None:
        for _ in range(steps):
            super().train(controller, 1)
            self.shares = [*self.shares, self.replica_micro_batches][-len(self.steps) :]

    def gather(self, after: dict[str, int], **arguments: Any) -> list[Report]:
        shares, found = self.shares[len(self.shares) - len(self.steps) :], []
        for replica, slower in enumerate(self.slowness):
            for report in Pipe.gather(self, after, **arguments):
                steps = []
                for of_step, step in zip(shares, report.steps, strict=True):
                    self.slower = slower * (of_step[replica] + 2) / (MICRO_BATCHES + 2)
                    steps.append(self._slower(step))
                found.append(replace(report, replica=replica, steps=steps))
        return found


@pytest.mark.parametrize("every", [1, 3])
def test_shares_chosen_beside_a_step_are_not_judged_by_it(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran with those before: shares went to and fro."""
    monkeypatch.setattr(schedule_actuator, "ASIDE_FROM", 1)
    process, pipe = PlanningProcess(), SharedSteps()
    adaptive = ScheduleChoice("adaptive", retune_every=every, micro_batch_sizes=(CONFIGURED,))
    controller = pipe.controller(adaptive, PartitionChoice("uniform", 0), reshare_every=every, process=process)
    pipe.train(controller, 10)
    pipe.slowness[1] = 3
    pipe.train(controller, 16)
    process.close()
    assert [shares for _, shares in pipe.noted("shares")] == [(13, 3)]


def test_another_schedule_alone_is_no_matter_of_a_look_for_partitions() -> None:
    pipe = Pipe(num_layers=3)
    seldom = ScheduleChoice("adaptive", retune_every=1000, micro_batch_sizes=(CONFIGURED,))
    controller = follow(pipe, seldom)
    pipe.train(controller, 8)
    assert pipe.current == SPLIT
    pipe.latency_s = 1.0  # it is far from the best now, and the layers cannot lie otherwise
    pipe.train(controller, 20)
    assert pipe.noted("move") == []
    assert [candidate for _, candidate in pipe.noted("schedule")] == [SPLIT]
    assert [d["what"] for d in controller.decisions] == ["schedule", "partition", *["partition"] * 4]
    assert not any(decision["switched"] for decision in controller.decisions)


def shared(error: Exception) -> Exception:
    setattr(error, SHARED, True)
    return error


def test_a_timed_step_that_failed_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    controller = follow(pipe)
    timed, first = pipe.stop_timing_layers, []

    def stop_timing_layers(layers: Any, size: int) -> dict[int, LayerReport]:
        found = timed(layers, size)
        first.append(found if first else {})
        return first[-1]

    monkeypatch.setattr(pipe, "stop_timing_layers", stop_timing_layers)
    pipe.train(controller, 20)
    assert [step for step, _ in pipe.noted("time")] == [1, 5]
    assert pipe.step_s(pipe.parts) == pytest.approx(pipe.best_s())


def test_after_a_guess_the_layers_are_timed_where_they_have_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    controller = follow(pipe)
    timed = pipe.stop_timing_layers

    def stop_timing_layers(layers: Any, size: int) -> dict[int, LayerReport]:
        """Each layer began as one of its stage's own kind."""
        return {n: report._replace(kinds=(f"{n // 4}", f"{n // 4}")) for n, report in timed(layers, size).items()}

    monkeypatch.setattr(pipe, "stop_timing_layers", stop_timing_layers)
    pipe.train(controller, 60)
    moves = pipe.noted("move")
    times = [step for step, _ in pipe.noted("time")]
    assert times[0] == 1
    assert times[1:] == [step + 1 for step, _ in moves][: len(times) - 1]
    assert len(moves) <= 3
    assert pipe.step_s(pipe.parts) <= 1.05 * pipe.best_s()


def test_after_a_refused_move_the_next_best_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[tuple[int, ...]] = []

    def refuse(parts: tuple[int, ...]) -> Exception | None:
        refused[:] = refused or [parts]
        return shared(ValueError("no room for layer 4")) if parts in refused else None

    pipe = Pipe((4.0, 2.0, 1.0), refuse=refuse)
    controller = follow(pipe)
    pipe.train(controller, 30)
    (first, best), (second, other) = pipe.noted("move")
    assert (first, [best], pipe.parts) == (4, refused, other)
    assert second > first
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "step 4: layers stay where they are: no room for layer 4"
    ]
    told, *others = controller.decisions
    assert (told["switched"], told["to"], told["migration"]) == (False, list(best), None)
    assert [d["to"] for d in others if d["switched"]] == [list(other)]


def test_what_was_refused_is_tried_again_after_some_time() -> None:
    pipe = Pipe((4.0, 2.0, 1.0), refuse=lambda parts: shared(ValueError("no room")))
    controller = follow(pipe)
    pipe.train(controller, 12)
    tried = [parts for _, parts in pipe.noted("move")]
    assert len(set(tried)) == len(tried) > 1
    assert pipe.parts == UNIFORM
    pipe.refuse = lambda parts: None
    pipe.train(controller, 12 * subject.REFUSED_PERIODS)
    assert pipe.step_s(pipe.parts) == pytest.approx(pipe.best_s())


def test_with_a_refused_move_the_schedule_meant_for_it_is_not_run() -> None:
    pipe = Pipe((4.0, 2.0, 1.0), latency_s=1.0, refuse=lambda parts: shared(ValueError("no")))
    controller = follow(pipe, ADAPTIVE)
    pipe.train(controller, 8)
    assert pipe.parts == UNIFORM
    assert [candidate.name for _, candidate in pipe.noted("schedule")] == [SPLIT.name, controller.decisions[0]["to"]]


@pytest.mark.parametrize("error", [RuntimeError("connection reset by peer"), ValueError("on this rank only")])
def test_an_error_that_ranks_do_not_share_ends_the_job(error: Exception) -> None:
    pipe = Pipe((4.0, 2.0, 1.0), refuse=lambda parts: error)
    controller = follow(pipe)
    with pytest.raises(type(error), match=str(error)):
        pipe.train(controller, 6)


def test_memory_that_a_partition_may_count_on() -> None:
    free = Pipe((4.0, 2.0, 1.0))
    free.train(follow(free), 6)
    assert free.parts[1] == 8
    pipe = Pipe((4.0, 2.0, 1.0))
    limit = 6 * (16 * NUM_PARAMETERS) + 3 * 600  # six layers on the first stage with three micro-batches
    pipe.train(follow(pipe, memory_bytes=limit), 6)
    assert pipe.parts[1] == 6


def test_too_little_memory_is_said_once_and_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    pipe.train(follow(pipe, memory_bytes=1000), 20)
    assert pipe.parts == UNIFORM
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "step 4: with the partition [0, 4, 8, 12], device 0 takes 0.06218 MiB and paceline.pipeline.partition.memory_"
        "gib allows 0.0009537 MiB: layers move only to where all devices keep to it; allow more, or lower the "
        "micro-batch size"
    ]


def test_layers_that_somebody_else_moved() -> None:
    pipe = Pipe()
    controller = follow(pipe)
    pipe.train(controller, 6)
    pipe.parts = (0, 1, 2, 12)  # between looks
    pipe.steps.clear()
    pipe.train(controller, 4)
    assert pipe.noted("move") == [(9, UNIFORM)]
    assert controller.decisions[-1]["from"] == [0, 1, 2, 12]


def test_other_ranks_do_what_the_first_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    pipe.rank = 1
    controller = follow(pipe, ADAPTIVE)
    change = subject.PartitionChange((0, 7, 10, 12), Candidate(CONFIGURED, slack=1.0))
    told: list[Any] = [True]  # the trial fits
    told += [(False, False), [None, change], (False, False), [Candidate(CONFIGURED), None]]
    monkeypatch.setattr(pipe, "from_first", lambda value: told.pop(0))
    pipe.train(controller, 12)
    assert pipe.noted("move") == [(6, (0, 7, 10, 12))]
    assert [step for step, _ in pipe.noted("schedule")] == [4, 6, 11]
    assert (controller.decisions, controller.measurements.costs.items) == ([], ())
    assert controller.measurements.costs.parts == pipe.parts


# -- the loop --------------------------------------------------------------------------------------------------------


class Book:
    """Measurements, an actuator or the agreement of two ranks that write down how they are called."""

    def __init__(self, told: list[Any], name: str = "", decides: bool = True, ready_at: int = 0) -> None:
        self.told, self.name, self.decides, self.ready_at = told, name, decides, ready_at

    def end_step(self, done: int) -> None:
        self.told.append(("ended", done))

    def is_complete(self, done: int) -> bool:
        return done >= self.ready_at

    def gather(self) -> None:
        self.told.append("gather")

    def before_switch(self, *, switches: bool) -> None:
        self.told.append(("switches", switches))

    def begin_step(self, done: int, until_planning: int | None) -> None:
        self.told.append(("begins", done, until_planning))

    def propose(self, steps: int) -> Proposal[str, str] | None:
        self.told.append((self.name, "proposes after", steps))
        decision = Decision(True, "why", 2.0, 1.0, 0.5, 1.0, 0.0)
        change = None if self.name == "stays" else f"{self.name} changed"

        def record(outcome: str | None) -> DecisionRecord:
            return DecisionRecord(self.name, 7, outcome is not None, decision, 1.0, {"outcome": outcome})

        return Proposal(change, record) if self.decides else None

    def apply(self, change: str) -> str:
        self.told.append(change)
        return f"{change} well"

    def from_first(self, value: Any) -> Any:
        return value if self.decides else ["one of the first rank"]

    def records(self, own: Any) -> Any:
        return own


def test_the_loop_gathers_proposes_agrees_applies_and_records() -> None:
    told: list[Any] = []
    moves, stays = Book(told, "moves"), Book(told, "stays")
    intervals = {moves: TuningInterval(2), stays: TuningInterval(3, first=1)}

    def settle(switches: bool) -> None:
        told.append(("settles", switches))

    controller = Controller(Book(told, ready_at=1), intervals, Book(told), DecisionLog(), settle)
    controller.before_step()
    assert told == [("begins", 0, 0), ("ended", 0), ("begins", 0, 0)]
    told.clear()
    controller.before_step()
    assert told == [
        *(("ended", 1), "gather", ("moves", "proposes after", 1), ("stays", "proposes after", 1)),
        *(("switches", True), ("settles", True), "moves changed", ("begins", 1, 2)),
    ]
    told.clear()
    for _ in range(3):
        controller.before_step()
    assert [entry for entry in told if "proposes after" in entry] == [
        ("moves", "proposes after", 2),
        ("stays", "proposes after", 3),
    ]
    assert [(d["what"], d["switched"], d["outcome"]) for d in controller.decisions] == [
        *(("moves", True, "moves changed well"), ("stays", False, None)),
        *(("moves", True, "moves changed well"), ("stays", False, None)),
    ]
    assert controller.log.num_moves == 2


def test_a_rank_that_does_not_decide_applies_what_the_first_one_says_and_records_nothing() -> None:
    told: list[Any] = []
    moves = Book(told, "moves", decides=False)
    controller = Controller(Book(told), {moves: TuningInterval(5, first=1)}, Book(told, decides=False), DecisionLog())
    controller.after_step()
    assert "one of the first rank" in told
    assert controller.decisions == []


class Noticed:
    """Changes that are noticed before some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.took, self.plannings = steps, 0, 0

    def step_took(self, seconds: float, size: float) -> None:
        self.took += 1

    def planned(self, *, switched: bool) -> None:
        self.plannings += 1

    def planning_by(self, done: int, next_planning: int) -> int | None:
        return done + 2 if done in self.steps else None


def test_after_a_change_everything_is_planned_soon() -> None:
    """Also what would have had its turn much later, or a step before."""
    told: list[Any] = []
    often, seldom, changes = Book(told, "often"), Book(told, "seldom"), Noticed(5, 16)
    intervals = {often: TuningInterval(10, first=1), seldom: TuningInterval(100, first=1)}
    controller = Controller(Book(told), intervals, Book(told), DecisionLog(), changes=changes)
    proposed: list[tuple[int, str]] = []
    for step in range(1, 31):
        told.clear()
        controller.after_step()
        controller.step_took(1.0, 1.0)
        proposed += [(step, entry[0]) for entry in told if "proposes after" in entry]
    both = ("often", "seldom")
    assert proposed == [*((step, name) for step in (1, 7, 18) for name in both), (28, "often")]
    assert (changes.took, changes.plannings) == (30, 4)


def test_a_run_that_goes_on_counts_from_its_step() -> None:
    told: list[Any] = []
    moves = Book(told, "moves")
    controller = Controller(Book(told), {moves: TuningInterval(50, first=10)}, Book(told), DecisionLog())
    controller.go_on(200)
    for _ in range(60):
        controller.after_step()
    assert [entry[1] for entry in told if entry[0] == "ended"][-1] == 260
    assert [entry for entry in told if "proposes after" in entry] == [
        ("moves", "proposes after", 10),
        ("moves", "proposes after", 50),
    ]


def test_a_planning_waits_for_a_step_that_counts() -> None:
    """Experts move beside the step before it: without another one, it would take the old costs for the new ones."""
    pipe = Pipe()
    controller = follow(pipe)
    pipe.train(controller, 10)
    pipe.speeds = (1.0, 0.5, 1.0)
    pipe.steps.clear()
    pipe.train(controller, 3)
    controller.measurements.disturb_next()
    pipe.train(controller, 4)
    assert pipe.skipped_after[0] == 14
    assert [decision["step"] for decision in controller.decisions] == [4, 9, 15]
    assert [step for step, _ in pipe.noted("move")] == [15]


def test_with_a_planning_after_every_step_the_one_beside_a_move_is_none_too_few() -> None:
    pipe = Pipe((4.0, 2.0, 1.0))
    controller = pipe.controller(ScheduleChoice("1f1b"), PartitionChoice("uniform", 1))
    pipe.train(controller, 12)
    assert pipe.noted("move")
    assert pipe.step_s(pipe.parts) == pytest.approx(pipe.best_s())
