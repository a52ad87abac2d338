"""Losses of steps, summed over ranks while the next steps run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..measure.device_of_thread import on_this_device
from .staging import Staging

STOP_S = 10.0
"""How long the end of an engine waits for a sum: a rank that it is of may be gone."""


class SummedLosses:
    """Sums a loss a step over all ranks, in the order of the steps; the step does not wait for it.

    On a CPU the loss is there when the step ends, and its sum begins then. On a GPU it is yet to be computed: it is
    copied when it is there, and a thread waits for that, so that neither the host nor the stream does.

    Args:
        group: of gloo's, of all ranks; with ``staging``, used by nobody else.
        staging: that brings losses to the host; None where they are there.
    """

    def __init__(self, group: Any, staging: Staging | None = None) -> None:
        self._group, self._staging = group, staging
        self._works: list[Any] = []
        self._queue: SimpleQueue[_Sum | None] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, loss: Tensor | None) -> Callable[[], Tensor]:
        """Begin to sum this rank's share of a step's loss, None where it has none. Collective.

        Returns:
            what waits for the sum, fp64 without dimensions on the CPU; it raises what went wrong.
        """
        if self._staging is not None:
            entry = _Sum(*(self._staging.to_host(loss.double()) if loss is not None else (_nothing(), lambda: None)))
            self._queue.put(entry)
            if self._thread is None:
                self._thread = Thread(target=on_this_device(self._carry_out), name="paceline-losses", daemon=True)
                self._thread.start()
            return entry.wait
        total = _nothing() if loss is None else _nothing() + loss.cpu()
        work = dist.all_reduce(total, group=self._group, async_op=True)
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        return partial(_after, work, total)

    def stop(self) -> None:
        """Finish what was begun, as far as the other ranks do."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(STOP_S)

    def _carry_out(self) -> None:
        error: BaseException | None = None
        while (entry := self._queue.get()) is not None:
            try:
                if error is not None:  # the others have come to another step, or to none
                    raise error
                entry.is_copied()
                dist.all_reduce(entry.total, group=self._group)
            except BaseException as caught:
                error = entry.error = caught
            entry.is_done.set()


class _Sum:
    def __init__(self, total: Tensor, is_copied: Callable[[], None]) -> None:
        self.total, self.is_copied = total, is_copied
        self.error: BaseException | None = None
        self.is_done = Event()

    def wait(self) -> Tensor:
        self.is_done.wait()
        if self.error is not None:
            raise self.error
        return self.total


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _after(work: Any, total: Tensor) -> Tensor:
    work.wait()
    return total
