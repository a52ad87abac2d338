"""Advice of a run about numbers of stages that it does not have."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline.planning.stage_choice import Option
from paceline.planning.stage_pool import Advice
from paceline.runtime.other_plans import OtherPlans
from paceline.schedules.costs import Costs, Link


class Costing:
    """Costs of one link and one second of computing."""

    def __init__(self) -> None:
        self.rate, self.seconds = 1e6, 1.0

    def sizes(self) -> list[int]:
        return [2]

    def costs(self, size: int) -> Costs:
        link = (Link(self.rate, 0.0),)
        return Costs((self.seconds / 4,) * 2, (self.seconds / 4,) * 2, (8.0,), link, link)


class Deciding:
    def __init__(self, decides: bool) -> None:
        self.decides = decides

    def from_first(self, value: Any) -> Any:
        return value

    def records(self, own: Any) -> Any:
        return own


class Pool:
    """Advises ``stages`` where links are ten times as fast."""

    def __init__(self) -> None:
        self.stages = 1
        self.asked: list[tuple[float, float, float]] = []

    def advice(self, rate: float, slowness: float, restart_s: float) -> Advice | None:
        self.asked.append((rate, slowness, restart_s))
        options = (Option(4, 1, 2, 8, 2.0), Option(self.stages, 4, 2, 8, 1.0))
        return Advice(*options, steps=30) if rate >= 10 else None


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    pool, costs = Pool(), Costing()
    plans = OtherPlans(pool, costs, Deciding(True), size=2, restart_s=30.0)  # type: ignore[arg-type]
    assert plans.propose(100) is None  # the first planning stands for the start
    assert pool.asked == []
    costs.rate, costs.seconds = 1e7, 3.0
    for _ in range(3):
        assert plans.propose(100) is None
    assert pool.asked == [(10.0, 3.0, 30.0)]  # the others differ by nothing
    (line,) = lines(caplog)
    assert line.startswith("plan: links are 10 times as fast as at first, a micro-batch takes 3 times as long.")
    assert "fastest is 1 stage x 4 replicas: 1 s a step" in line
    assert line.endswith("pays after 30 steps")
    costs.rate = 1.1e7
    plans.propose(100)
    assert len(pool.asked) == 1
    costs.rate = 2e7
    plans.propose(100)
    assert len(pool.asked) == 2
    assert len(lines(caplog)) == 1  # it is said already
    pool.stages, costs.rate = 2, 4e7
    plans.propose(100)
    assert len(lines(caplog)) == 2
    for costs.rate in (1e6, 4e7):
        plans.propose(100)
    assert len(lines(caplog)) == 3  # it was not so in between


class Local:
    """In place of another process: computes when the result is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, function: Any) -> int:
        self.calls.append(function)
        return len(self.calls) - 1

    def result(self, call: int) -> Any:
        return self.calls[call]()


def test_with_another_process_it_is_said_at_the_next_planning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    pool, costs, process = Pool(), Costing(), Local()
    plans = OtherPlans(
        pool,  # type: ignore[arg-type]
        costs,
        Deciding(True),
        size=2,
        restart_s=30.0,
        process=process,  # type: ignore[arg-type]
    )
    said = []
    for costs.rate in (1e6, 1e7, 1e7, 2e7):
        plans.propose(100)
        said.append(len(lines(caplog)))
    assert said == [0, 0, 1, 1]
    assert [call.args for call in process.calls] == [(10.0, 1.0, 30.0), (20.0, 1.0, 30.0)]
    assert pool.asked == [(10.0, 1.0, 30.0)]
    assert "links are 10 times" in lines(caplog)[0]


def test_only_the_first_rank_speaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    pool, costs = Pool(), Costing()
    plans = OtherPlans(pool, costs, Deciding(False), size=2, restart_s=30.0)  # type: ignore[arg-type]
    for costs.rate in (1e6, 1e7):
        assert plans.propose(100) is None
    assert pool.asked == [] == lines(caplog)


def test_training_goes_on_where_plans_cannot_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Pool):
        def advice(self, rate: float, slowness: float, restart_s: float) -> Advice | None:
            raise ZeroDivisionError("no rate")

    costs = Costing()
    plans = OtherPlans(Broken(), costs, Deciding(True), size=2, restart_s=30.0)  # type: ignore[arg-type]
    for costs.rate in (1e6, 1e7):
        assert plans.propose(100) is None
    assert lines(caplog) == ["plan: other numbers of stages are not compared: ZeroDivisionError: no rate"]
