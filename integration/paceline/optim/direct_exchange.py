"""Gradients to their owners and new values back by messages from rank to rank, where collectives send more: gloo's.

Gloo reduces to one rank by a reduce-scatter over all and a gather, so that of two ranks each sends one and a half times
what its peer needs, one owner after the other; it has no reduce-scatter that sends less. By messages a rank sends every
owner its gradients of the owner's part, all at a time, and an owner adds up what it gets in the order of the ranks:
(n − 1) / n of the bucket each way, the least there can be. Two ranks have the same sums either way, bit by bit.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 0x5ADD
"""Of these messages. Other messages in the same group have other tags."""

AT_ONCE = 2
"""Buckets that are under way at a time: one is sent while another is added up. Each needs memory to receive into."""


class Reduction(Protocol):
    """Gradients on their way to their owners, or to all ranks."""

    def is_there(self) -> bool:
        """Whether :meth:`finish` returns at once, as far as is known."""

    def finish(self) -> None:
        """Wait for the sum, and put it into place."""


def finish(reductions: Iterable[Reduction]) -> None:
    """Finish all of them."""
    for reduction in reductions:
        reduction.finish()


def sends_direct(group: Any, device: torch.device) -> bool:
    """Whether messages take less time than collectives, and can be sent: gloo's send takes no CUDA tensor."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo"


@dataclass(frozen=True)
class DirectReduction:
    """Parts of a bucket on their way to their owners.

    Args:
        works: sends and receives, to be waited for.
        received: by rank, its gradients of this rank's part; nothing where this rank owns nothing.
        rank: this one.
        own: this rank's gradients of its part, as they are sent.
        place: memory that the sum is to be in; ``own``, unless that has another dtype.
    """

    works: Sequence[Any]
    received: Mapping[int, Tensor]
    rank: int
    own: Tensor
    place: Tensor

    @classmethod
    def begin(cls, sent: Tensor, gradients: Tensor, bounds: Sequence[int], rank: int, group: Any) -> DirectReduction:
        """Send all parts of ``sent``, and post what is to be received. Collective over ``group``.

        Args:
            sent: gradients of the bucket in the dtype in which they are sent; nobody may write to it until the end.
            gradients: the same in the bucket's memory, which the sums come to.
            bounds: of the ranks' parts.
        """
        own = slice(bounds[rank], bounds[rank + 1])
        received = {peer: torch.empty_like(sent[own]) for peer in _peers(rank, bounds) if own.stop > own.start}
        works = [dist.irecv(part, group=group, group_src=peer, tag=TAG) for peer, part in received.items()]
        works += _send({peer: sent[bounds[peer] : bounds[peer + 1]] for peer in _peers(rank, bounds)}, group)
        return cls(works, received, rank, sent[own], gradients[own])

    def is_there(self) -> bool:
        return False  # torch does not say it of messages

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        parts = sorted({**self.received, self.rank: self.own}.items())
        if self.received:
            total = parts[0][1]
            for _, part in parts[1:-1]:
                total.add_(part)
            torch.add(total, parts[-1][1], out=self.own)
        if self.own.dtype != self.place.dtype:
            self.place.copy_(self.own)


def publish_direct(values: Tensor, bounds: Sequence[int], rank: int, group: Any) -> Iterator[Any]:
    """Send this rank's part of ``values`` to all, and receive theirs; what is to be waited for."""
    own = values[bounds[rank] : bounds[rank + 1]]
    for peer in _peers(rank, bounds):
        if bounds[peer + 1] > bounds[peer]:
            part = values[bounds[peer] : bounds[peer + 1]]
            yield dist.irecv(part, group=group, group_src=peer, tag=TAG)
    yield from _send(dict.fromkeys(_peers(rank, bounds), own), group)


def _peers(rank: int, bounds: Sequence[int]) -> list[int]:
    """The other ranks, from the next one on: not all send to the same one first."""
    size = len(bounds) - 1
    return [(rank + distance) % size for distance in range(1, size)]


def _send(parts: Mapping[int, Tensor], group: Any) -> list[Any]:
    """Send what is not empty, by rank."""
    return [dist.isend(part, group=group, group_dst=peer, tag=TAG) for peer, part in parts.items() if len(part) > 0]


@dataclass(eq=False)
class _Waiting:
    """A reduction that the thread begins when it is its turn."""

    begin: Callable[[], Sequence[Reduction]]
    begun: Sequence[Reduction] = ()
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def is_there(self) -> bool:
        return self.done.is_set()

    def finish(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class ReductionThread:
    """Carries out reductions in the order in which they are given, a few at a time, beside the backward.

    After one has failed, none is begun any more: other ranks would be given what they do not expect.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, begin: Callable[[], Sequence[Reduction]]) -> Reduction:
        """Have the thread ``begin`` reductions and finish them; what is to be finished by who needs the sums."""
        if self._thread is None:
            self._thread = threading.Thread(target=_carry_out, args=(self._queue,), daemon=True)
            self._thread.name = "paceline-reductions"
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        waiting = _Waiting(begin)
        self._queue.put(waiting)
        return waiting

    def stop(self) -> None:
        """End the thread, once what it was given is done."""
        self._queue.put(None)


def _carry_out(given: queue.SimpleQueue[_Waiting | None]) -> None:
    under_way: deque[_Waiting] = deque()
    error: BaseException | None = None
    while True:
        waits = len(under_way) >= AT_ONCE or (bool(under_way) and given.empty())
        taken = under_way.popleft() if waits else given.get()
        if taken is None:
            return
        try:
            if error is None:
                with torch.no_grad():  # of each thread for itself
                    if not waits:
                        taken.begun = taken.begin()
                        under_way.append(taken)
                        continue
                    finish(taken.begun)
        except BaseException as found:
            error = found
        taken.error, taken.begun = error, ()
        taken.done.set()
