"""Tasks that run one after another beside the computation, on the host and on the device, and their times."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from ..comm.side_stream import SideStream
from ..measure.clock import Clock, Transfer
from ..measure.device_of_thread import on_this_device

STOP_S = 10.0
"""How long :meth:`TaskQueue.stop` waits for a task that is running: it may wait for a rank that is gone."""


class Times(Protocol):
    """Books time, as :class:`~paceline.measure.clock.Clock`."""

    def compute(self) -> AbstractContextManager[None]: ...

    def transfer(self, kind: str, num_bytes: int) -> AbstractContextManager[None]: ...


class _ThreadTimes:
    """Collectives of a thread, kept for the clock of the thread that waits for them."""

    def __init__(self) -> None:
        self._transfers: deque[Transfer] = deque()

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def transfer(self, kind: str, num_bytes: int) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self._transfers.append(Transfer(kind, num_bytes, begun_s, time.perf_counter()))

    def book_wait(self, clock: Clock, start: Any, end: Any) -> None:
        count = len(self._transfers)  # the thread may add to them meanwhile
        transfers = [self._transfers.popleft() for _ in range(count)]
        if clock.device.type == "cuda":
            clock.add_idle(start, end)
        else:
            clock.add_wait(start, end, transfers)


@dataclass(eq=False)
class Task:
    """A call in the queue.

    Args:
        after: what the computation had issued to the device when the task was given: the task comes after it.
        end: what the task has issued to the device itself.
    """

    run: Callable[[], None]
    after: Any = None
    end: Any = None
    is_done: threading.Event = field(default_factory=threading.Event)


class TaskQueue:
    """Runs tasks one after another: in a thread, or when one of them is waited for.

    After one has failed, none is run any more: other ranks would be given what they do not expect.

    Args:
        clock: of the thread that waits.
    """

    def __init__(self, device: torch.device, clock: Callable[[], Clock], *, has_thread: bool) -> None:
        self._clock, self._thread_times = clock, _ThreadTimes()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._has_thread, self._is_stopped = has_thread, False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._last: Any = None
        # Without a thread, kernels are issued in the stream that the model computes in, in order.
        self._side = SideStream(device if has_thread else torch.device("cpu"))

    def times(self) -> Times:
        """Times of the tasks; without a thread they are those of the thread that waits."""
        return self._thread_times if self._has_thread else self._clock()

    def put(self, run: Callable[[], None]) -> Task:
        task = Task(run, after=self._side.mark())
        self._queue.put(task)
        if self._has_thread and self._thread is None and not self._is_stopped:
            work = partial(_work, weakref.ref(self), self._queue, self._side)
            self._thread = threading.Thread(target=on_this_device(work), name="paceline-updates", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None).atexit = False  # the thread ends with it
        return task

    def wait(self, task: Task) -> None:
        """Wait until ``task`` has been run, and what was put in before it. The device is not waited for."""
        while not self._has_thread and not task.is_done.is_set():
            first = self._queue.get_nowait()
            assert first is not None
            self._run(first)
            first.is_done.set()
        clock = self._clock()
        start = clock.now()
        task.is_done.wait()
        self.check()
        self._side.wait(task.end)
        if self._has_thread:
            self._thread_times.book_wait(clock, start, clock.now())

    def check(self) -> None:
        """Raise what a task has raised."""
        if self._error is not None:
            raise self._error
        assert not self._is_stopped, "the optimizer has been stopped"

    def stop(self) -> None:
        """End the thread; tasks that are waiting are not run any more."""
        self._is_stopped = True
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            self._side.wait(self._last)  # memory that it has used may be freed

    def _run(self, task: Task) -> None:
        try:
            if self._error is None and not self._is_stopped:
                self._side.wait(task.after)
                with torch.no_grad():  # of each thread for itself
                    task.run()
                self._last = task.end = self._side.mark()
        except BaseException as error:
            self._error = error


def _work(owner: weakref.ref[TaskQueue], tasks: queue.SimpleQueue[Task | None], side: SideStream) -> None:
    """Run tasks until there is None. While it waits, it holds nothing that a task or the queue's owner would keep."""
    with side.entered():
        while (task := tasks.get()) is not None:
            running, is_done = owner(), task.is_done
            if running is not None:
                running._run(task)
            del task, running
            is_done.set()
