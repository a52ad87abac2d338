"""What this rank does, and its end when the job cannot go on: no progress, a rank that failed, a rank that is gone.

A transport's own time limits are long (30 minutes), name nobody, and do not exist outside of collectives; and each rank
that loses a peer prints its own error. Here ranks tell rank 0 twice a second what they do (:mod:`.watch_hub`), rank 0
finds the first cause (:mod:`.first_cause`), one rank says it, and all end.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import TracebackType

import torch.distributed as dist

from ..comm.control import PeerError, is_shared
from ..messages import brief
from .first_cause import DEVICE, EVERYONE, Cause, Doing, Limits, gone, may_follow, raised
from .lifetime import end_process, wake_siblings
from .watch_hub import PERIOD_S, Hub, Lines

__all__ = ["DEVICE", "EVERYONE", "WATCH", "Watch"]

logger = logging.getLogger("paceline")

_CONNECT_S = 30.0
_GRACE_S = 2.0  # for what a rank still has to do when it hears the cause: its own error, its last lines
_FAILING_GRACE_S = 15.0
_ANSWER_S = 5.0
_SHARED_S = 2.0  # that the others leave to rank 0 to say what all know
_PHASE = "paceline_phase"  # on an exception: the phase that it was raised in
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_IN_ORDER = "it ended in order, and others wait for it"


class Watch:
    """One a process (:data:`WATCH`). Updates cost an assignment each, started or not::

        WATCH.step = 17
        WATCH.doing("receiving from stage 1", peer=3)    # waits for rank 3; peer=EVERYONE: a collective
        WATCH.doing("computing", peer=DEVICE)            # waits for nobody, unless kernels communicate
        WATCH.doing("loading data")                      # waits for nobody
        WATCH.idle()                                     # outside of the engine: no limit, but others may name us
        with WATCH.pause("saving the checkpoint"):       # may take long, and others may wait for it

    An operation counts as making no progress from its ``doing`` to the next ``doing`` or ``idle``.
    """

    def __init__(self) -> None:
        self.step = -1
        """Optimizer steps done; -1 before training."""
        self.cause: Cause | None = None
        """Why the job ends, once it does."""
        self.rank = 0
        self.kernels_communicate = False
        """Whether what a device computes may wait for other ranks, as behind the kernels of NCCL's. With gloo it is the
        host that waits."""
        self._now: tuple[str, int | None, int] = ("", None, -1)
        self._pauses: list[str] = []
        self._limits = Limits()
        self._hub: Hub | None = None
        self._lines: Lines | None = None
        self._thread: threading.Thread | None = None
        self._concluding = threading.Lock()
        self._concluded = threading.Event()
        self._closed = self._failing = False
        self._num_starts = 0
        self._end_at_s = float("inf")
        self._gone: set[int] = set()
        self._main = threading.main_thread().ident

    # -- what a rank does ----------------------------------------------------------------------------------------

    def doing(self, operation: str, peer: int | None = None) -> None:
        """``operation`` (such as ``"loading data"``) begins; it waits for ``peer``: a rank, EVERYONE or DEVICE."""
        self._now = (operation, peer, self.step)  # a new object each time: progress is that it is another one

    @property
    def operation(self) -> str:
        """What this rank does; empty outside of the engine."""
        return self._now[0]

    def idle(self) -> None:
        """This rank is not in the engine; how long it stays away is its own business."""
        self._now = ("", None, self.step)

    @contextlib.contextmanager
    def waiting(self, operation: str, peer: int) -> Iterator[None]:
        """Outside of the engine or in the middle of an operation, this rank waits for another."""
        former, peer_before, _ = self._now
        self.doing(operation, peer)
        try:
            yield
        finally:
            self.doing(former, peer_before)

    @contextlib.contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """A phase that may take longer than the limit; nobody who waits meanwhile counts as hanging either."""
        self._pauses.append(phase)
        try:
            yield
        except BaseException as error:
            if not hasattr(error, _PHASE):
                setattr(error, _PHASE, phase)
            raise
        finally:
            self._pauses.pop()
            operation, peer, _ = self._now
            self._now = (operation, peer, self.step)

    # -- begin and end -------------------------------------------------------------------------------------------

    def start(self, limit_s: float) -> None:
        """Begin to watch. Collective: call it on all ranks, after ``init_distributed``.

        Args:
            limit_s: seconds without progress after which the job ends.
        """
        if self._thread is not None and not self._closed:
            return
        self._closed = self._failing = False
        self.cause, self._end_at_s = None, float("inf")
        self._concluded.clear()
        self._gone.clear()
        self._num_starts += 1
        self._limits = Limits.of(limit_s)
        self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.kernels_communicate = dist.get_backend() != dist.Backend.GLOO
        self._lines = self._connect()
        if self._lines is None:
            logger.error("rank %d cannot reach rank 0 beside the tensors' transport: nobody watches it", self.rank)
            return
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._former_hook, sys.excepthook = sys.excepthook, self._except

    def close(self) -> None:
        """This rank leaves in order: its end is not a failure. Without a watch, nothing."""
        if self._closed or self._thread is None or self._lines is None:
            return
        self._closed = True
        self._lines.write({"doing": asdict(self._doing(0.0)), "left": True})
        if self._hub is not None:
            self._hub.close()
        self._thread.join(2 * PERIOD_S)
        self._lines.close()
        self._hub = None
        atexit.unregister(self.close)
        if sys.excepthook == self._except:
            sys.excepthook = self._former_hook

    def fail(self, error: BaseException) -> Cause:
        """This rank cannot go on. Finds out why the job ends, and has it said once; returns when it has been said.

        The process is to end then, with the cause's ``code``; it is ended after some seconds.
        """
        if is_shared(error):
            return self._fail_together(error)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._failing = True
        if phase := getattr(error, _PHASE, ""):
            self._pauses.append(phase)
        doing = self._doing(0.0)
        message = {"doing": asdict(doing), "error": text, "may_follow": may_follow(error)}
        lines = None if self._closed else self._lines
        told = lines is not None and lines.write(message)
        # What rank 0 can no longer be told may follow from its end, which the thread is about to notice.
        waits = told or (lines is not None and may_follow(error))
        if not (waits and self._concluded.wait(_ANSWER_S)):
            self._conclude(raised(self.rank, doing, text))
        assert self.cause is not None
        return self.cause

    def _fail_together(self, error: BaseException) -> Cause:
        """All ranks know of ``error``. Rank 0 says it; another does if rank 0 has not, having gone on for example."""
        self._failing = True
        cause = Cause(describe(error), self.rank, speaker=self.rank)
        if self._lines is not None and not self._closed:
            if self.rank == 0 or not self._concluded.wait(_SHARED_S):
                self._tell(cause)
            self._concluded.wait(_ANSWER_S)
        self._conclude(cause)
        assert self.cause is not None
        return self.cause

    def _tell(self, cause: Cause) -> bool:
        """Whether all ranks are about to hear of ``cause``, or of an earlier one."""
        if self._hub is not None:
            self._hub.tell(cause)
            return True
        return self._lines is not None and self._lines.write({"cause": asdict(cause)})

    def stop_all(self, code: int, text: str) -> None:
        """Have all ranks end with ``code``, for a reason that is nobody's failure; ``text`` is said by this one."""
        if self._lines is None:  # nobody can be told; the first rank of each host says it
            text = text if os.environ.get("LOCAL_RANK", "0") == "0" else ""
        cause = Cause(text, self.rank, speaker=self.rank, code=code)
        if not self._closed and self.cause is None and self._tell(cause):
            self._concluded.wait(_ANSWER_S)  # others may have told before us, with the same signal
        self._conclude(cause)

    def _except(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """A loop of the user's own ends with an error that nobody catches."""
        if not isinstance(error, KeyboardInterrupt):
            self.fail(error)
            if is_shared(error) and (isinstance(error, PeerError) or (is_input(error) and self.rank != 0)):
                return  # where it was raised, another rank shows
        self._former_hook(kind, error, trace)

    def _forget_in_child(self) -> None:
        # A worker's copy of the connection would keep it open when this rank is killed.
        if self._lines is not None:
            self._lines.close()
        if self._hub is not None:
            self._hub.forget()
        self._lines = self._hub = self._thread = None

    # -- in the thread -------------------------------------------------------------------------------------------

    def _connect(self) -> Lines | None:
        """To rank 0, which first says through the group's store where it listens."""
        store = dist.distributed_c10d._get_default_store()
        key = f"paceline/watch/{self._num_starts}"
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if self.rank == 0:
            server, token = _server(host), secrets.token_hex(16)
            self._hub = Hub(server, token, self._world_size, self._limits)
            store.set(key, f"{server.getsockname()[1]} {token}")
        if self.rank == 0 or host in _THIS_MACHINE:  # rank 0 listens at the first of them then
            host = _THIS_MACHINE[0]
        port, token = store.get(key).decode().split()
        try:
            lines = Lines(socket.create_connection((host, int(port)), timeout=_CONNECT_S))
        except OSError as error:
            logger.debug("watch: %s port %s: %s", host, port, error)
            return None
        lines.write({"rank": self.rank, "token": token})
        return lines

    def _run(self) -> None:
        assert self._lines is not None
        lines: Lines | None = self._lines
        selector = selectors.DefaultSelector()
        selector.register(self._lines, selectors.EVENT_READ)
        last, age_s = self._now, 0.0
        last_s = beat_s = heard_s = time.monotonic()
        how_rank_0_ended = "its process ended without a word"
        while not self._closed:
            if lines is None:
                time.sleep(PERIOD_S / 2)
            elif selector.select(PERIOD_S / 2):
                messages = lines.read()
                heard_s = time.monotonic()
                if messages is None:
                    lines = None
                for message in messages or ():
                    if "cause" in message:
                        self._conclude(Cause(**message["cause"]))
                    self._gone.update(message.get("gone", ()))
                    if "over" in message:
                        how_rank_0_ended = _IN_ORDER
            now_s = time.monotonic()
            ran_s = min(now_s - last_s, 2 * PERIOD_S)  # while this process was stopped, nothing of it could get on
            heard_s += now_s - last_s - ran_s
            last_s = now_s
            age_s = age_s + ran_s if self._now is last else 0.0
            last = self._now
            if now_s >= self._end_at_s:
                end_process(self.cause.code if self.cause else 1)
            if now_s - beat_s >= PERIOD_S and lines is not None:
                beat_s = now_s
                lines.write({"doing": asdict(self._doing(age_s))})
            if self.cause is None:
                self._look_at_rank_0(how_rank_0_ended if lines is None else "", now_s - heard_s, age_s)

    def _look_at_rank_0(self, ended: str, silent_s: float, age_s: float) -> None:
        """Nobody else can tell when it is rank 0, who tells, that is gone."""
        doing = self._doing(age_s)
        waits_s = age_s if doing.waits else 0.0
        # A long phase excuses no rank 0 that has not been heard of for the limit.
        silent_limit_s = self._limits.progress_s if doing.paused and not self._failing else self._limits.silent_s
        patience_s = self._limits.progress_s if ended == _IN_ORDER else self._limits.lost_s
        if ended and (self._failing or (waits_s >= patience_s and not doing.paused)):
            how = ended
            speaker = min(set(range(1, self._world_size)) - self._gone, default=self.rank)
        elif not ended and silent_s >= silent_limit_s and (self._failing or waits_s >= self._limits.progress_s):
            how = f"nothing heard for {silent_s:.0f} s: stopped, or its machine or network down"
            speaker = self._first_of_host()
        else:
            return
        cause = replace(gone(0, None, how, seen_by=(self.rank, doing)), speaker=speaker)
        if self._lines is not None:
            self._lines.write({"cause": asdict(cause)})  # for a rank 0 that wakes up
        self._conclude(cause)

    def _first_of_host(self) -> int:
        """Without rank 0 hosts know nothing of each other: a rank of each speaks."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        first = 1 if self.rank == local else 0  # rank 0 is on this host
        return self.rank if local == first else -1

    def _doing(self, age_s: float) -> Doing:
        operation, peer, step = self._now
        may_wait = peer == DEVICE and self.kernels_communicate
        peer = None if peer == DEVICE else peer
        paused = self._pauses[-1:]
        where = _where(self._main) if age_s > self._limits.progress_s / 2 and peer is None else ""
        paused_in = paused[0] if paused else ""
        return Doing(max(step, self.step), operation, peer, round(age_s, 1), paused_in, where, may_wait)

    def _conclude(self, cause: Cause) -> None:
        """Take the first cause that is known, say it if it is this rank that says it, and give the process an end."""
        with self._concluding:
            if self.cause is not None:
                return
            self.cause = cause
            if cause.speaker == self.rank and cause.text:
                kind = "error: " if cause.code == 1 else ""
                print(f"paceline: {kind}{cause.text}", file=sys.stderr, flush=True)
            self._end_at_s = time.monotonic() + (_FAILING_GRACE_S if self._failing else _GRACE_S)
            if cause.code == 1:
                wake_siblings()
            self._concluded.set()  # the process may end as soon as it is


def is_input(error: BaseException) -> bool:
    """Whether it is the user's to correct: its message says it all, and the exit code is 2."""
    from ..checkpoint import CheckpointError  # a ValueError, as of a disk that is full

    return isinstance(error, (ValueError, FileNotFoundError)) and not isinstance(error, CheckpointError)


def describe(error: BaseException) -> str:
    """``error`` in one line; with its type where the message was not written for users."""
    message = brief(" ".join(str(error).split())) or type(error).__name__
    is_for_users = isinstance(error, (ValueError, FileNotFoundError, PeerError))
    return message if is_for_users else f"{type(error).__name__}: {message}"


def _server(host: str) -> socket.socket:
    if host in _THIS_MACHINE:
        return socket.create_server((_THIS_MACHINE[0], 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _where(thread: int | None) -> str:
    """The innermost line of Python that is not of an installed package, as ``name (file:line)``."""
    frame = sys._current_frames().get(thread or 0)
    outer = frame
    while outer is not None:
        name = outer.f_code.co_filename
        if not any(part in name for part in ("/torch/", "/lib/python", "<")) or "/site-packages/paceline/" in name:
            frame = outer
            break
        outer = outer.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


WATCH = Watch()
"""This process's."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WATCH._forget_in_child)
