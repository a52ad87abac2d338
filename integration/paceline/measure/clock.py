"""Where a rank's time goes: compute, communication, idle. No synchronisation with the device while training.

On a GPU the kernels run behind the host, so everything is timed with CUDA events on the stream and read later; on a
CPU with the host's clock. Sends and receives run beside the computation; what a stage waits for them is idle time. A
collective that took longer than the fastest one of its kind and size waited for its peers, and the excess counts as
idle: nothing else tells waiting from transferring. Of collectives beside the computation, what a rank waits for counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

Moment = TypeVar("Moment")
"""Seconds of the host's monotonic clock; where a GPU works, an event until somebody reads it."""

IDLE = ("idle", 0)
PENDING = 1024
"""Pairs of CUDA events kept before those that are done are summed up."""


def host_seconds(now: Callable[[], Any]) -> Callable[[Any], float]:
    """A function from moments on a device, up to this one, to seconds of the host's clock. Waits for the device.

    The host runs ahead of a GPU: when it records an event, earlier work may still be under way, so its own clock does
    not tell when that event happens. One event that host and device see together, this one, tells it of all others.

    Args:
        now: this moment on the device (:meth:`Clock.now`).
    """
    last = now()
    if not isinstance(last, float):
        last.synchronize()
    last_s = time.perf_counter()

    def seconds(moment: Any) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return last_s - float(moment.elapsed_time(last)) / 1e3

    return seconds


class Transfer(NamedTuple):
    """A collective, between two moments of the host's clock in seconds."""

    kind: str
    num_bytes: int
    begun_s: float
    ended_s: float


class WorkTimes:
    """When communication that a GPU carries out begins and ends, in events that nobody waits for.

    A stream of its own waits for the works, so that an end is seen when it comes and not when the computation next asks
    for what has arrived. The works of one communicator end in the order in which they were issued.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def now(self) -> Any:
        """What has been computed up to here is there: what is issued next can begin."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, works: Iterable[Any]) -> Any:
        """When all of ``works`` are done. They must be kept until the current stream has waited for them too."""
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            for work in works:
                work.wait()  # this stream does, not the host
            event.record()
        return event


def work_times(device: torch.device) -> WorkTimes | None:
    """For communication that ``device`` carries out behind the host; None where the host's clock tells."""
    return WorkTimes(device) if device.type == "cuda" else None


@dataclass
class Clock:
    """Sums of seconds by kind since the last :meth:`read`.

    Args:
        host_s: the host's clock in seconds.
    """

    device: torch.device
    host_s: Callable[[], float] = time.perf_counter
    _compute_s: float = 0.0
    _communication_s: float = 0.0
    _idle_s: float = 0.0
    _pending: deque[tuple[Any, Any, tuple[str, int] | None]] = field(default_factory=deque)
    _fastest: dict[tuple[str, int], float] = field(default_factory=dict)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.host_s()

    def now(self) -> Any:
        """This moment on the device: seconds on a CPU, else an event that nobody waits for."""
        if self.device.type != "cuda":
            return self.host_s()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Time of the device's own work."""
        start = self.now()
        yield
        self.add_compute(start, self.now())

    def add_compute(self, start: Any, end: Any) -> None:
        """Book what lies between two moments as the device's own work."""
        if self.device.type != "cuda":
            self._compute_s += end - start
        else:
            self._keep_events(start, end, None)

    def add_idle(self, start: Any, end: Any) -> None:
        """Book what lies between two moments as time with nothing to do: what comes next had yet to arrive."""
        if self.device.type != "cuda":
            self._idle_s += end - start
        else:
            self._keep_events(start, end, IDLE)

    def add_wait(self, start: float, end: float, transfers: Iterable[Transfer]) -> None:
        """Book what lies between two moments of the host: the collectives of another thread in it, and idle time.

        Args:
            transfers: that have ended. Of each the share counts that the fastest of its kind and size takes of it.
        """
        communication_s = 0.0
        for kind, num_bytes, begun, ended in transfers:
            seconds, key = ended - begun, (kind, num_bytes)
            fastest = self._fastest[key] = min(seconds, self._fastest.get(key, seconds))
            within = min(end, ended) - max(start, begun)
            if within > 0 and seconds > 0:
                communication_s += within * fastest / seconds
        self._communication_s += communication_s
        self._idle_s += end - start - communication_s

    @contextmanager
    def transfer(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Time of a blocking collective of ``num_bytes``."""
        start = self.now()
        yield
        end = self.now()
        if self.device.type != "cuda":
            self._add(end - start, (kind, num_bytes))
        else:
            self._keep_events(start, end, (kind, num_bytes))

    def read(self) -> dict[str, float]:
        """``compute_s``, ``communication_s``, ``idle_s``, ``other_s`` and ``wall_s`` since the last call.

        ``other_s`` is the host's: loading data, Python, logging.
        """
        for start, stop, transfer in self._pending:
            stop.synchronize()
            self._add_elapsed(start, stop, transfer)
        now = self.host_s()
        spent = {"compute_s": self._compute_s, "communication_s": self._communication_s, "idle_s": self._idle_s}
        wall = now - self._since
        self._compute_s = self._communication_s = self._idle_s = 0.0
        self._pending.clear()
        self._since = now
        return {**spent, "other_s": max(0.0, wall - sum(spent.values())), "wall_s": wall}

    def _keep_events(self, start: Any, end: Any, transfer: tuple[str, int] | None) -> None:
        self._pending.append((start, end, transfer))
        while len(self._pending) > PENDING and self._pending[0][1].query():  # nobody reads the clock
            self._add_elapsed(*self._pending.popleft())

    def _add_elapsed(self, start: Any, stop: Any, transfer: tuple[str, int] | None) -> None:
        self._add(start.elapsed_time(stop) / 1e3, transfer)

    def _add(self, seconds: float, transfer: tuple[str, int] | None) -> None:
        if transfer is None:
            self._compute_s += seconds
            return
        if transfer == IDLE:
            self._idle_s += seconds
            return
        fastest = self._fastest[transfer] = min(seconds, self._fastest.get(transfer, seconds))
        self._communication_s += fastest
        self._idle_s += seconds - fastest
