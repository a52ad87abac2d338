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
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("paceline")

KEPT = 8
"""Results that nobody has taken."""

_PACKAGES = Path(__file__).resolve().parents[2]


class Call(NamedTuple):
    """A call that was begun. As an argument of a later one it stands for its result."""

    number: int


_Work = tuple[Callable[..., Any], tuple[Any, ...]]


class PlanningProcess:
    """Runs one call after another, beside this process; in it, if there can be no other. Started by the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] | None = None
        self._calls: dict[Call, _Work] = {}
        """The last :data:`KEPT`."""
        self._num_calls = 0
        self._is_lost = False

    def begin(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Begin ``function(*arguments)``.

        Args:
            function: of a module. It can be pickled, as can its arguments and its result.
        """
        call = Call(self._num_calls)
        self._num_calls += 1
        self._calls[call] = function, arguments
        self._calls.pop(Call(call.number - KEPT), None)
        if not self._is_lost:
            try:
                if self._process is None:
                    self._process = _start()
                    self._close = weakref.finalize(self, _end, self._process, os.getpid())
                self._send((call, function, arguments))
            except OSError as error:
                self._lose(error)
        return call

    def result(self, call: Call) -> Any:
        """Wait for what a call returns, or raise what it raises. Once, and of the last :data:`KEPT` calls."""
        if not self._is_lost:
            try:
                self._send(call)
                assert self._process is not None
                assert self._process.stdout is not None
                returned, value = pickle.load(self._process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._lose(error)
            else:
                if not returned:
                    raise value
                return value
        function, arguments = self._calls[call]
        return function(*(self.result(each) if isinstance(each, Call) else each for each in arguments))

    def close(self) -> None:
        """End the process, if it was started; another call starts another one."""
        if self._close is not None:
            self._close()
        self._process = self._close = None
        self._calls.clear()

    def _send(self, what: Any) -> None:
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
    """In the process: compute what is asked for, and send the result once that is asked for."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that is printed gets into an answer
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    results: dict[Call, tuple[bool, Any]] = {}
    while True:
        what = asked.get()
        if isinstance(what, Call):
            pickle.dump(results.pop(what), answers)
            answers.flush()
            continue
        call, function, arguments = what
        try:
            results[call] = True, function(*(_value(each, results) for each in arguments))
        except Exception as error:
            results[call] = False, error
        results.pop(Call(call.number - KEPT), None)


def _read(asked: queue.SimpleQueue[Any]) -> None:
    """Beside the computation, for which the rank does not wait; the end of the rank ends it."""
    while True:
        try:
            asked.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _value(argument: Any, results: dict[Call, tuple[bool, Any]]) -> Any:
    if not isinstance(argument, Call):
        return argument
    returned, value = results[argument]
    if not returned:
        raise value
    return value
