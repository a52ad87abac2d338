"""How long a rank lives: signals that ask it to stop, and a launcher that is no longer there.

A signal handler cannot save: ranks get the signal at different times (DeepSpeed's launcher signals one after another,
each once the one before has ended), and a collective save needs all of them at the same step. So a signal sets a flag,
ranks agree on it where a step begins, save together, and leave.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil

logger = logging.getLogger("paceline")

PREEMPTED = 128 + signal.SIGTERM
"""Exit code of a rank that stopped because it was asked to: 143, what a shell shows for a process that SIGTERM ended.

Slurm, Kubernetes and shell scripts read it as "was told to go", not as a fault of the program, and requeue.
"""

INTERRUPTED = 128 + signal.SIGINT

_STOPS = (signal.SIGTERM, signal.SIGUSR1)  # the second is what Slurm's --signal is given to ask for a checkpoint
_INSISTING_AFTER_S = 5.0
_SETUP_GRACE_S = 1.0
_POLL_S = 1.0


class Preempted(SystemExit):
    """The job stopped because it was asked to, and has saved. Not caught, it ends Python quietly with 143.

    Args:
        step: optimizer steps that are done.
        checkpoint: where they were saved; None if there was nothing to save.
        reason: what asked, as :attr:`Preemption.reason` has it.
    """

    def __init__(self, step: int, checkpoint: str | os.PathLike[str] | None = None, reason: str = "SIGTERM") -> None:
        super().__init__(PREEMPTED)
        self.step, self.checkpoint, self.reason = step, checkpoint, reason

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"stopped by {self.reason} after step {self.step}; nothing was saved"
        return (
            f"stopped by {self.reason} after step {self.step}; the checkpoint is {os.fspath(self.checkpoint)}; "
            "run the same command with --resume_from_checkpoint true to go on"
        )


def end_process(code: int) -> None:
    """End this process now, from any thread, also while the main thread waits in C++ for a peer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:  # a data loader's worker: Python would end it, and one that hangs does not see our end
                child.kill()
    os._exit(code)


def wake_siblings() -> None:
    """Have stopped ranks of this host go on, so that they hear why the job ends: a launcher waits 30 s for each."""
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process().parent()
        if launcher is not None and _is_launcher(launcher):
            for rank in launcher.children():
                if rank.status() == psutil.STATUS_STOPPED:
                    rank.resume()


class Preemption:
    """Turns SIGTERM, SIGUSR1 and the end of the launcher into a flag that is read at step boundaries.

    Use it as a context manager in the main thread; leaving it puts the former handlers back. An engine of paceline
    reads the flag as a step begins, and shares it; with a loop of your own::

        with Preemption() as preemption:
            while engine.global_steps < steps:
                engine.train_batch(batches)
                if engine.is_stopping:                       # some rank was asked, and all ranks know
                    preemption.reached()
                    engine.save_checkpoint("checkpoints")
                    raise Preempted(engine.global_steps, "checkpoints", preemption.reason)
            preemption.finishing()
            paceline.export(engine.module, "tuned", engine.control)

    A second SIGTERM, at least 5 s after the first, ends the process at once with 143; those in between are what
    launchers and clusters send to a whole process group beside each other. Forked children (data loaders' workers) get
    the former handlers.

    Args:
        in_training: whether step boundaries are to be expected already. If not, until :meth:`expect_boundaries`, a
            signal ends the process after a second.
        interrupt: end the process at once with 130 on SIGINT (Ctrl-C), from every rank and without tracebacks. Leave it
            off in interactive use.
        limit_s: seconds from a signal to the step boundary, after which the process ends with 143.
        tell: called as ``tell(code, text)`` before the process is ended without a step boundary.
    """

    def __init__(
        self,
        *,
        in_training: bool = True,
        interrupt: bool = False,
        limit_s: float = 300.0,
        tell: Callable[[int, str], Any] | None = None,
    ) -> None:
        self.requested = False
        """Whether this rank has been asked to stop."""
        self.reason = "SIGTERM"
        """What asked first: the signal's name, or that the launcher is gone."""
        self._in_training, self._interrupt, self._limit_s, self._tell = in_training, interrupt, limit_s, tell
        self._since: float | None = None
        self._reached = self._finishing = False
        self._former: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._former_fd = -1
        self._thread: threading.Thread | None = None
        self._pid = 0

    def __enter__(self) -> Preemption:
        assert self._pipe is None, "already installed"
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals can only be handled by the main thread: use Preemption there.")
        self._pid = os.getpid()
        self._lineage = _Lineage()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # Handlers of Python run between two bytecodes of the main thread, which may wait in C++ for hours. The byte is
        # written at once by C, and read by a thread.
        self._former_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in (*_STOPS, *([signal.SIGINT] if self._interrupt else [])):
            self._former[number] = signal.signal(number, self._note)
        self._thread = threading.Thread(target=self._listen, name="paceline-lifetime", daemon=True)
        self._thread.start()
        _installed.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None or self._thread is None:
            return
        self._restore()
        os.close(self._pipe[1])  # the thread reads the end of the file
        if os.getpid() == self._pid:
            self._thread.join()
        os.close(self._pipe[0])
        self._pipe = None

    def expect_boundaries(self) -> None:
        """From here on a signal only sets the flag: training begins."""
        self._in_training = True

    def reached(self) -> None:
        """The ranks have agreed to stop; the save that follows has no time limit. Call it on all of them."""
        self._reached = True
        self.requested = True

    def finishing(self) -> None:
        """Training is over: no step boundary comes any more, so from here on a signal only sets the flag.

        What is left to write is soon written, and would be worth nothing half done. A second SIGTERM still ends it.
        """
        self._finishing = True

    def _restore(self) -> None:
        if self in _installed:
            _installed.remove(self)
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()
        signal.set_wakeup_fd(self._former_fd)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in _STOPS:
            self._ask(signal.Signals(number).name)

    def _ask(self, reason: str) -> None:
        if not self.requested:
            self.reason = reason
            self.requested = True

    # -- in the thread -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._pipe is not None
        reader = self._pipe[0]
        selector = selectors.DefaultSelector()
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if selector.select(_POLL_S):
                numbers = os.read(reader, 64)
                if not numbers:
                    return
                if self._former_fd >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._former_fd, numbers)
                for number in numbers:
                    self._act(number)
            elif self._since is None and (gone := self._lineage.gone()):
                self._ask(gone)
            if self.requested and self._since is None:
                self._since = time.monotonic()
            self._check_limit()

    def _act(self, number: int) -> None:
        if number == signal.SIGINT and self._interrupt:
            self._end(INTERRUPTED, "interrupted")
        if number not in _STOPS:
            return
        name = signal.Signals(number).name
        self._ask(name)
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif number == signal.SIGTERM and now - self._since >= _INSISTING_AFTER_S:
            lost = "the results are not complete" if self._finishing else "nothing was saved"
            self._end(PREEMPTED, "" if self._reached else f"stopped by a second {name}; {lost}")

    def _check_limit(self) -> None:
        if self._since is None or self._reached or self._finishing:
            return
        waited_s = time.monotonic() - self._since
        if not self._in_training and waited_s >= _SETUP_GRACE_S:
            # Not at once: a launcher sends SIGTERM when another rank fails, too, and this one may be about to say why.
            self._end(PREEMPTED, f"stopped by {self.reason} before the first step; there is nothing to save")
        elif waited_s >= self._limit_s:
            self._end(
                PREEMPTED,
                f"stopped by {self.reason}; no step ended within {self._limit_s:g} s, so nothing was saved",
            )

    def _end(self, code: int, text: str) -> None:
        if self._tell is not None:
            with contextlib.suppress(Exception):
                self._tell(code, text)
        end_process(code)


_installed: list[Preemption] = []


def current() -> Preemption:
    """The innermost :class:`Preemption` that is installed; without one, one that is never requested."""
    return _installed[-1] if _installed else Preemption()


_masks = threading.local()


def _before_fork() -> None:
    # A signal that the child gets before it has its own handlers would be lost, or be taken for one to its parent.
    _masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.former)


def _forget_in_child() -> None:
    # A worker with our handlers would survive Pool.terminate(), and its signals would arrive in its parent's pipe.
    for preemption in reversed(_installed[:]):
        preemption._restore()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_in_child)


_COMMAND_ENDED = "the end of the deepspeed command"
_LAUNCHER_ENDED = "the end of DeepSpeed's launcher"
_TORCHRUN_ENDED = "the end of torchrun"


class _Lineage:
    """The processes from the launcher, and from the ``deepspeed`` command if there is one, down to this rank.

    The command has no signal handler on a single node: SIGTERM ends it and nothing else; as SIGKILL does with any
    launcher. A process whose parent has died has another parent, at once and for good; so that is what is looked at.
    """

    def __init__(self) -> None:
        self._links: list[tuple[psutil.Process, int, str]] = []
        """A process, the parent that it has to have, and what to call that one's end."""
        self._gone_before = ""
        for _ in range(2):  # a parent that ends while it is looked at hides those above it
            with contextlib.suppress(psutil.Error):
                self._find()
                break

    def _find(self) -> None:
        own = psutil.Process()
        links: list[tuple[psutil.Process, int, str]] = []
        is_launched = "CROSS_RANK" in os.environ  # a variable that only DeepSpeed's launcher sets
        child = own
        for parent in own.parents():
            links.append((child, parent.pid, _LAUNCHER_ENDED))
            if _is_launcher(parent):
                self._links = links
                self._find_command(parent)
                return
            if is_launched and _is_ending(parent):
                self._links = links
                return
            child = parent
        if is_launched and _is_adopted(own):
            self._gone_before = _LAUNCHER_ENDED
        elif "TORCHELASTIC_RUN_ID" in os.environ:  # ranks are its children
            self._links = [(own, own.ppid(), _TORCHRUN_ENDED)]

    def _find_command(self, launcher: psutil.Process) -> None:
        runner = launcher.parent()
        if runner is not None and (_is_runner(runner) or _is_ending(runner)):
            self._links.append((launcher, runner.pid, _COMMAND_ENDED))
        elif not any(arg.startswith("--node_rank") for arg in launcher.cmdline()) and _is_adopted(launcher):
            self._gone_before = _COMMAND_ENDED

    def gone(self) -> str:
        """What is no longer there, or nothing."""
        if self._gone_before:
            return self._gone_before
        for process, parent, ended in self._links:
            try:
                if process.ppid() == parent:
                    continue
            except psutil.NoSuchProcess:
                pass
            except psutil.Error:
                continue
            return ended
        return ""


def _is_launcher(process: psutil.Process) -> bool:
    return _runs(process, "deepspeed.launcher.launch", os.path.join("deepspeed", "launcher", "launch.py"))


def _is_runner(process: psutil.Process) -> bool:
    runner = os.path.join("deepspeed", "launcher", "runner.py")
    return _runs(process, "deepspeed.launcher.runner", runner, "/deepspeed", "/deepspeed.pt", "/ds")


def _runs(process: psutil.Process, *programs: str) -> bool:
    try:
        return any(f"/{arg}".endswith(programs) for arg in process.cmdline()[:4])
    except psutil.Error:
        return False


def _is_ending(process: psutil.Process) -> bool:
    """Whether it cannot be said what ``process`` runs: one that ends loses its command line before its children."""
    try:
        return not process.cmdline()
    except psutil.Error:
        return True


def _is_adopted(process: psutil.Process) -> bool:
    """Whether ``process`` has lost the parent that started it, and has been given another one."""
    parent = process.ppid()
    if parent <= 1:
        return parent == 1
    with contextlib.suppress(OSError):
        session = os.getsid(process.pid)  # inherited, unless the process leads its own
        return session not in (process.pid, os.getsid(parent))
    return False
