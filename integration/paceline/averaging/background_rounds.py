"""Rounds with other islands beside training: on a thread of the island's first rank."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.control import SHARED
from ..supervise.lifetime import current
from ..supervise.watch import WATCH
from .rounds import Left, Outcome, Tensors
from .rules import Report

logger = logging.getLogger("paceline")

_POLL_S = 2.0
_DIFFERS = "The model is this island's own, and differs from that of the others."


class Messages(Protocol):
    """Small messages between the ranks of an island, as :class:`~paceline.comm.control.ControlPlane`."""

    @property
    def rank(self) -> int: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def from_first(self, value: Any) -> Any: ...


class Connection(Protocol):
    """This island among others, as :class:`~paceline.averaging.rounds.Islands`."""

    def round(self, report: Report, tensors: Tensors) -> Outcome: ...

    def is_called(self, finished: int) -> bool: ...

    def close(self) -> None: ...


@dataclass
class _Attempt:
    thread: threading.Thread | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    is_given_up: bool = False


class BackgroundRounds:
    """One round after another, each begun on the first rank and waited for by all ranks of the island.

    Args:
        messages: between the ranks of the island.
        connect: joins the other islands, on the thread; again after each failure.
        stops: whether this rank has been asked to stop, so that there is no time to wait.
    """

    def __init__(
        self,
        messages: Messages,
        connect: Callable[[], Connection],
        stops: Callable[[], bool] = lambda: current().requested,
    ) -> None:
        self._messages, self._connect, self._stops = messages, connect, stops
        self._connection: Connection | None = None
        self._attempt: _Attempt | None = None
        self.was_stopped = False
        """The last round was not waited for, as some rank had been asked to stop. The same on all ranks."""

    def begin(self, report: Report, tensors: Tensors) -> None:
        """Begin a round. On the first rank only."""
        assert self._messages.rank == 0, self._messages.rank
        assert self._attempt is None, "one round at a time"
        attempt = self._attempt = _Attempt()
        attempt.thread = threading.Thread(
            target=self._run, args=(attempt, report, tensors), name="paceline-average", daemon=True
        )
        attempt.thread.start()

    def wait(self, *, must_succeed: bool, is_last: bool = False) -> Outcome | None:
        """Wait for the round that was begun, on all ranks together.

        Args:
            must_succeed: raise also if the other islands cannot be reached; otherwise that is said, and None returned.
            is_last: no training follows.

        Returns:
            its outcome on the first rank; None elsewhere, and where it came to nothing.

        Raises:
            ValueError: on every rank: the round could not be, for this island's settings, or unreachable others.
            RuntimeError: on every rank: anything else.
        """
        attempt, self._attempt = self._attempt, None
        self.was_stopped = False
        with WATCH.pause("waiting for other islands"):
            while True:
                self.was_stopped = bool(self._messages.sum(torch.tensor([int(self._stops())])).item())
                if self.was_stopped:
                    if attempt is not None:
                        attempt.is_given_up = True
                        if is_last:
                            logger.warning(
                                "This island was asked to stop, and does not wait for the others. %s Go on from its "
                                "last checkpoint to have their average.",
                                _DIFFERS,
                            )
                    self._leave()
                    return None
                state = self._messages.from_first(None if attempt is None else _state_of(attempt))
                if state == "done":
                    return None if attempt is None else attempt.outcome
                if state != "waiting":
                    self._raise_failure(attempt, *state, must_succeed=must_succeed, is_last=is_last)
                    return None

    def is_called(self, finished: int) -> bool:
        """Whether the others have come to the next round and wait for this island. All ranks together."""
        called = self._messages.rank == 0 and self._connection is not None and self._connection.is_called(finished)
        return bool(self._messages.sum(torch.tensor([int(called)])).item())

    def close(self) -> None:
        """Leave the others, who may be gone. Not collective."""
        with suppress(RuntimeError):
            self._leave()

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, attempt: _Attempt, report: Report, tensors: Tensors) -> None:
        try:
            try:
                attempt.outcome = self._round(attempt, report, tensors)
            except Left:
                self._connection = None
                attempt.outcome = self._round(attempt, report, tensors)
        except BaseException as error:
            self._connection = None
            attempt.error = error

    def _round(self, attempt: _Attempt, report: Report, tensors: Tensors) -> Outcome:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connect()
        if attempt.is_given_up:
            connection.close()
        return connection.round(report, tensors)

    def _raise_failure(
        self, attempt: _Attempt | None, kind: str, message: str, *, must_succeed: bool, is_last: bool
    ) -> None:
        if kind in (TimeoutError.__name__, ConnectionError.__name__) and not must_succeed:
            if attempt is not None:
                follows = _DIFFERS if is_last else "Training goes on without the others until the next round."
                logger.warning("%s %s", message, follows)
            return
        error: Exception = ValueError(message) if kind in ("ValueError", "ConnectionError") else RuntimeError(message)
        setattr(error, SHARED, True)
        raise error from (None if attempt is None else attempt.error)


def _state_of(attempt: _Attempt) -> str | tuple[str, str]:
    """``"waiting"``, ``"done"``, or the kind and message of what went wrong. Waits a little for the thread."""
    assert attempt.thread is not None
    attempt.thread.join(_POLL_S)
    if attempt.thread.is_alive():
        return "waiting"
    return "done" if attempt.error is None else (type(attempt.error).__name__, str(attempt.error))
