"""A process that plans while this one trains: planning computes in Python, whose interpreter a step needs as well.

Calls and their results are pickled. The process imports what they name, which must not need torch, and ends with its
rank.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger("paceline")

_PACKAGES = Path(__file__).resolve().parents[2]


class PlanningProcess:
    """Runs one call at a time, beside this process; in it, if there can be no other. Started by the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        """Begun, and its result not yet taken."""
        self._is_lost = False
        self._close: Callable[[], object] | None = None

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin ``function(*arguments)``; the result of a call before it, if nobody took it, is dropped.

        Args:
            function: of a module. It can be pickled, as can its arguments and its result.
        """
        if self._call is not None:
            self._answer()
        self._call = function, arguments
        if self._is_lost:
            return
        try:
            if self._process is None:
                self._process = _start()
                self._close = weakref.finalize(self, _end, self._process, os.getpid())
            assert self._process.stdin is not None
            pickle.dump(self._call, self._process.stdin)
            self._process.stdin.flush()
        except OSError as error:
            self._lose(error)

    def result(self) -> Any:
        """Wait for what the last call returns, or raise what it raises."""
        assert self._call is not None, "nothing was begun"
        function, arguments = self._call
        answer = self._answer()
        if answer is None:
            return function(*arguments)
        returned, value = answer
        if not returned:
            raise value
        return value

    def close(self) -> None:
        """End the process, if it was started; another call starts another one."""
        if self._close is not None:
            self._close()
        self._process = self._call = self._close = None

    def _answer(self) -> tuple[bool, Any] | None:
        """Whether the call returned, and what, or what it raised. None: the process is gone."""
        self._call = None
        if self._is_lost:
            return None
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            answer: tuple[bool, Any] = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self._lose(error)
            return None
        return answer

    def _lose(self, error: Exception) -> None:
        text = "the process that plans is gone (%s: %s): plannings are made between steps from now on"
        logger.warning(text, type(error).__name__, error)
        self._is_lost = True


def _start() -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for the ranks, and it ends with its rank."""
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
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


def _serve() -> None:
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that is printed gets into an answer
    while True:
        try:
            function, arguments = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = True, function(*arguments)
        except Exception as error:
            answer = False, error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
