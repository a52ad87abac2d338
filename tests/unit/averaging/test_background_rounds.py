"""Rounds on a thread, with a connection to other islands that does what the tests say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.averaging.background_rounds import BackgroundRounds
from paceline.averaging.rounds import Left, Outcome
from paceline.averaging.rules import Report
from paceline.comm.control import is_shared
from support.ranks import PATIENCE_S

REPORT = Report(0, 1, 0.0, 2.0, 100, True, 0, 100)


class Ranks:
    """Messages between the ranks of an island; ``rank`` of them is this one, and the first one says ``said``."""

    def __init__(self, rank: int = 0, said: Any = None, called: int = 0) -> None:
        self.rank, self.said, self.called = rank, said, called

    def from_first(self, value: Any) -> Any:
        return value if self.rank == 0 else self.said

    def sum(self, values: Tensor) -> Tensor:
        return values + self.called


class Connection:
    def __init__(self, act: Callable[[], Outcome], closing: Exception | None = None) -> None:
        self._act, self._closing = act, closing
        self.is_closed = threading.Event()

    def round(self, report: Report, tensors: Any) -> Outcome:
        return self._act()

    def is_called(self, finished: int) -> bool:
        return finished == 3

    def close(self) -> None:
        self.is_closed.set()
        if self._closing is not None:
            raise self._closing


def outcome() -> Outcome:
    return Outcome([torch.ones(1)], [REPORT], [1.0], 1, 0.0, 0.0, 0, 1)


def raising(error: Exception) -> Callable[[], Outcome]:
    def act() -> Outcome:
        raise error

    return act


def rounds_of(*connections: Connection, stops: Callable[[], bool] = lambda: False) -> BackgroundRounds:
    each = iter(connections)
    return BackgroundRounds(Ranks(), lambda: next(each), stops)


def test_one_connection_does_all_rounds() -> None:
    rounds = rounds_of(Connection(outcome))
    for _ in range(2):
        rounds.begin(REPORT, [torch.ones(1)])
        found = rounds.wait(must_succeed=False)
        assert found is not None
        assert found.round == 1


def test_an_island_that_was_left_joins_again() -> None:
    rounds = rounds_of(Connection(raising(Left("too late"))), Connection(outcome))
    rounds.begin(REPORT, [])
    assert rounds.wait(must_succeed=True) is not None


@pytest.mark.parametrize(
    ("error", "kind", "may_fail"),
    [
        (TimeoutError("nobody"), RuntimeError, True),
        (ConnectionError("nobody"), ValueError, True),
        (ValueError("nobody"), ValueError, False),
        (KeyError("nobody"), RuntimeError, False),
    ],
)
def test_failures_are_raised_unless_others_may_be_gone(error: Exception, kind: Any, may_fail: bool) -> None:
    """After one, the next round has a connection of its own."""
    rounds = rounds_of(Connection(raising(error)), Connection(raising(error)), Connection(outcome))
    rounds.begin(REPORT, [])
    with pytest.raises(kind, match="nobody") as raised:
        rounds.wait(must_succeed=True)
    assert is_shared(raised.value)
    assert raised.value.__cause__ is error
    rounds.begin(REPORT, [])
    if may_fail:
        assert rounds.wait(must_succeed=False) is None
    else:
        with pytest.raises(kind, match="nobody"):
            rounds.wait(must_succeed=False)
    rounds.begin(REPORT, [])
    assert rounds.wait(must_succeed=False) is not None


def test_other_ranks_learn_how_it_went() -> None:
    for said, error in (("done", None), (("ValueError", "refused"), ValueError), (("KeyError", "x"), RuntimeError)):
        rounds = BackgroundRounds(Ranks(1, said), raising_connect, lambda: False)
        if error is None:
            assert rounds.wait(must_succeed=True) is None
        else:
            with pytest.raises(error):
                rounds.wait(must_succeed=False)


def raising_connect() -> Any:
    raise AssertionError("only the first rank has a connection")


@pytest.mark.parametrize("is_last", [False, True])
def test_a_job_that_is_to_stop_waits_for_nobody(is_last: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At the end it says that its model is its own: no other round comes."""
    begun = threading.Event()
    holding = threading.Event()

    def act() -> Outcome:
        begun.set()
        assert holding.wait(PATIENCE_S)
        return outcome()

    connection = Connection(act)
    rounds = rounds_of(connection, stops=begun.is_set)
    rounds.begin(REPORT, [])
    assert begun.wait(PATIENCE_S)
    assert rounds.wait(must_succeed=False, is_last=is_last) is None
    assert connection.is_closed.is_set()
    assert ("The model is this island's own, and differs" in caplog.text) == is_last
    holding.set()


def test_an_island_is_called_on_all_of_its_ranks() -> None:
    rounds = rounds_of(Connection(outcome))
    assert not rounds.is_called(3), "there is no connection yet"
    rounds.begin(REPORT, [])
    rounds.wait(must_succeed=True)
    assert rounds.is_called(3)
    assert not rounds.is_called(4)
    assert BackgroundRounds(Ranks(1, called=1), raising_connect).is_called(3)


def test_leaving_others_that_are_gone_is_no_error() -> None:
    connection = Connection(outcome, RuntimeError("connection reset"))
    rounds = rounds_of(connection)
    rounds.close()
    rounds.begin(REPORT, [])
    rounds.wait(must_succeed=True)
    rounds.close()
    assert connection.is_closed.is_set()
