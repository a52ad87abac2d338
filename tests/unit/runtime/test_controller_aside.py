"""A planning beside a step: begun with what was measured then, decided and applied one step later."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.comm.control import PeerError
from paceline.planning.switching import Decision
from paceline.planning.tuning import DecisionLog, DecisionRecord, Proposal, TuningInterval
from paceline.runtime.controller import Actuator, Controller
from paceline.runtime.pipeline_measurements import JobAgreement


class Job:
    """One rank's measurements, and what was done, each with the number of steps that were done then."""

    decides = True

    def __init__(self) -> None:
        self.done = 0
        self.noted: list[tuple[int, str]] = []

    def note(self, what: str) -> None:
        self.noted.append((self.done, what))

    def end_step(self, done: int) -> None: ...

    def is_complete(self, done: int) -> bool:
        return True

    def gather(self) -> None:
        self.note("gather")

    def before_switch(self, *, switches: bool) -> None: ...

    def begin_step(self, done: int, until_planning: int | None) -> None: ...

    def from_first(self, value: Any) -> Any:
        return value

    def records(self, own: Any) -> Any:
        return own


class AtOnce:
    """An actuator that always changes something."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name

    def propose(self, steps: int) -> Proposal[str, None]:
        self._job.note(f"{self._name} proposes after {steps}")
        decision = Decision(True, "", 2.0, 1.0, 0.0, 1.0, 0.0)
        return Proposal(self._name, lambda _: DecisionRecord(self._name, self._job.done, True, decision, 1.0, {}))

    def apply(self, change: str) -> None:
        self._job.note(f"{change} is applied")


class Aside(AtOnce):
    """One that may find it beside a step."""

    takes_long = True

    def begin(self, steps: int) -> bool:
        if self.takes_long:
            self._job.note(f"{self._name} begins after {steps}")
        return self.takes_long


def train(job: Job, controller: Controller, steps: int) -> None:
    for _ in range(steps):
        job.done += 1
        controller.after_step()


def controller_of(job: Job, **every: int) -> Controller:
    kinds = {"schedule": Aside, "partition": AtOnce}
    actuators: dict[Actuator, TuningInterval] = {
        kinds[name](job, name): TuningInterval(steps, first=steps) for name, steps in every.items()
    }
    return Controller(job, actuators, job, DecisionLog())


def test_what_was_begun_is_decided_and_applied_one_step_later() -> None:
    job = Job()
    controller = controller_of(job, schedule=3)
    train(job, controller, 7)
    assert job.noted == [
        (3, "gather"),
        (3, "schedule begins after 3"),
        (4, "schedule proposes after 3"),
        (4, "schedule is applied"),
        (6, "gather"),
        (6, "schedule begins after 3"),
        (7, "schedule proposes after 3"),
        (7, "schedule is applied"),
    ]
    assert [decision["step"] for decision in controller.decisions] == [4, 7]


def test_at_every_step_the_last_plan_is_applied_before_the_next_is_begun() -> None:
    job = Job()
    train(job, controller_of(job, schedule=1), 2)
    assert [what for done, what in job.noted if done == 2] == [
        "schedule proposes after 1",
        "schedule is applied",
        "gather",
        "schedule begins after 1",
    ]


def test_what_plans_at_once_waits_for_what_is_planned_beside_a_step() -> None:
    """Both are of the same measurements, and proposed in the same order as ever."""
    job = Job()
    train(job, controller_of(job, schedule=2, partition=4), 5)
    assert [what for done, what in job.noted if done >= 4] == [
        "gather",
        "schedule begins after 2",
        "schedule proposes after 2",
        "partition proposes after 4",
        "schedule is applied",
        "partition is applied",
    ]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_resumed_run_has_begun_nothing(resumes: bool) -> None:
    job = Job()
    controller = controller_of(job, schedule=3)
    train(job, controller, 3)
    if resumes:
        controller.go_on(10)
    train(job, controller, 1)
    assert ((4, "schedule is applied") in job.noted) == (not resumes)


def test_what_takes_no_time_is_applied_at_once() -> None:
    job = Job()
    controller = controller_of(job, schedule=3)
    next(iter(controller._actuators)).takes_long = False  # type: ignore[attr-defined]
    train(job, controller, 3)
    assert job.noted[-1] == (3, "schedule is applied")


class Wire:
    """The control plane of two ranks, of which the first runs first."""

    def __init__(self) -> None:
        self.rank, self.sent = 0, []

    def from_first(self, value: Any) -> Any:
        if self.rank == 0:
            self.sent.append(value)
            return value
        return self.sent.pop(0)


class Fails(AtOnce):
    """One whose proposal fails on the rank that decides."""

    def propose(self, steps: int) -> Any:
        if self._job.decides:
            raise ValueError("a micro-batch size of 4 does not divide the 6 samples")


def test_a_proposal_that_fails_on_the_rank_that_decides_fails_on_all() -> None:
    """Or the others would wait for what it proposes."""
    wire: Any = Wire()
    job, other = Job(), Job()
    other.decides = False
    for rank, (one, error) in enumerate(((job, ValueError), (other, PeerError))):
        wire.rank = rank
        controller = Controller(
            one, {Fails(one, "schedule"): TuningInterval(1, first=1)}, JobAgreement(wire), DecisionLog()
        )
        with pytest.raises(error, match="4 does not divide the 6 samples"):
            train(one, controller, 1)
    assert not wire.sent


def test_a_step_of_another_size_drops_what_was_begun() -> None:
    class Tuned(Aside):
        def run_again(self) -> None:
            self._job.note("runs again")

    job = Job()
    tuned = Tuned(job, "schedule")
    controller = Controller(job, {tuned: TuningInterval(3, first=1)}, job, DecisionLog())
    train(job, controller, 1)
    controller.step_has_changed()
    train(job, controller, 2)
    assert job.noted == [(1, "gather"), (1, "schedule begins after 1"), (1, "runs again")]


@pytest.mark.parametrize("resumes", [False, True])
def test_what_was_prepared_for_a_decision_that_is_dropped_is_forgotten(resumes: bool) -> None:
    """Layers and experts that were sent ahead would keep their memory until the next move."""

    class Sends(AtOnce):
        def prepare(self, change: str | None) -> bool:
            return change is not None

        def is_prepared(self) -> bool:
            return False

        def forget_prepared(self) -> None:
            self._job.note("forgets")

    job = Job()
    controller = Controller(job, {Sends(job, "partition"): TuningInterval(3, first=1)}, job, DecisionLog())
    for noted in ([], ["forgets"], ["forgets"]):  # a second time there is nothing
        if noted:
            controller.go_on(1) if resumes else controller.step_has_changed()
        else:
            train(job, controller, 2)
        assert [what for _, what in job.noted[2:]] == noted
