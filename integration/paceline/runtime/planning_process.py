"""A process that plans while this one trains: planning computes in Python, whose interpreter a step needs as well.

Calls and their results are pickled. The process imports what they name, which must not need torch, and ends with its
rank.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

logger = logging.getLogger("paceline")

KEPT = 8
"""Results that nobody has taken."""

_PACKAGES = Path(__file__).resolve().parents[2]

Result = TypeVar("Result")
Earlier = TypeVar("Earlier")


@dataclass(frozen=True, eq=False)
class Call(Generic[Result]):
    """A call that was begun.

    Args:
        here: computes its result in this process.
    """

    number: int
    here: Callable[[], Result]


class _Asked(NamedTuple):
    """A call, as the process gets it.

    Args:
        function: without arguments, or of the result of the call ``after``.
    """

    number: int
    function: object
    after: int | None


class PlanningProcess:
    """Runs one call after another, beside this process; in it, if there can be no other. Started by the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] | None = None
        self._num_calls = 0
        self._is_lost = False

    def begin(self, function: Callable[[], Result]) -> Call[Result]:
        """Begin ``function()``.

        Args:
            function: of a module, with its arguments as a ``partial``: it can be pickled, as can its result.
        """
        call = Call(self._num_calls, function)
        self._begin(_Asked(call.number, function, None))
        return call

    def begin_after(self, earlier: Call[Earlier], function: Callable[[Earlier], Result]) -> Call[Result]:
        """Begin ``function`` of what an earlier call returns, as :meth:`begin`."""
        call = Call(self._num_calls, lambda: function(self.result(earlier)))
        self._begin(_Asked(call.number, function, earlier.number))
        return call

    def result(self, call: Call[Result]) -> Result:
        """Wait for what a call returns, or raise what it raises. Once, and of the last :data:`KEPT` calls."""
        if not self._is_lost:
            try:
                self._send(call.number)
                assert self._process is not None
                assert self._process.stdout is not None
                answer: tuple[Result] | Exception = pickle.load(self._process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._lose(error)
            else:
                if isinstance(answer, Exception):
                    raise answer
                return answer[0]
        return call.here()

    def close(self) -> None:
        """End the process, if it was started; another call starts another one."""
        if self._close is not None:
            self._close()
        self._process = self._close = None

    def _begin(self, asked: _Asked) -> None:
        self._num_calls += 1
        if not self._is_lost:
            try:
                if self._process is None:
                    self._process = _start()
                    self._close = weakref.finalize(self, _end, self._process, os.getpid())
                self._send(asked)
            except OSError as error:
                self._lose(error)

    def _send(self, what: _Asked | int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()

    def _lose(self, error: Exception) -> None:
        text = "the process that plans is gone (%s: %s): plannings are made between steps from now on"
        logger.warning(text, type(error).__name__, error)
        self._is_lost = True


def _start() -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for the ranks, and it ends with its rank."""
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Not by a process that the rank was copied to."""
    if os.getpid() == owner:
        process.kill()
        process.communicate()


def serve() -> None:
    """In the process: compute what is asked for, and send the result once its number comes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that is printed gets into an answer
    asked: queue.SimpleQueue[_Asked | int] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    results: dict[int, tuple[object] | Exception] = {}
    while True:
        what = asked.get()
        if isinstance(what, int):
            pickle.dump(results.pop(what), answers)
            answers.flush()
        else:
            earlier = () if what.after is None else results[what.after]
            results[what.number] = earlier if isinstance(earlier, Exception) else _answer(what.function, earlier)
            results.pop(what.number - KEPT, None)


def _answer(function: object, arguments: tuple[object, ...]) -> tuple[object] | Exception:
    assert callable(function)
    try:
        return (function(*arguments),)
    except Exception as error:
        return error


def _read(asked: queue.SimpleQueue[_Asked | int]) -> None:
    """Beside the computation, for which the rank does not wait; the end of the rank ends it."""
    while True:
        try:
            asked.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            os._exit(0)
