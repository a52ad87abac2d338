"""Count what this process keeps of the micro-batches that it computes: by what is really alive, not by the schedule.

One unit is what one emulated layer keeps of one micro-batch.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Peaks(NamedTuple):
    """The most at a time since :meth:`Keeping.forget`."""

    live: int
    """Whether the factors of the weight's gradient are there, and the graph that they are part of."""
    deferred: int
    """It is there, and the graph is gone."""
    held: int
    """Either of them."""


@dataclass
class _Unit:
    has_graph: bool = True
    has_inputs: bool = True


class _Token:
    """Lives as long as the graph that it is put into.

    Args:
        ended: called at its end.
    """

    def __init__(self, ended: Any) -> None:
        self._ended = ended

    def __del__(self) -> None:
        self._ended()


class Keeping:
    """Counts what is alive."""

    def __init__(self) -> None:
        self._watched: dict[int, Any] = {}
        self._since = 0
        self.forget()

    @property
    def peaks(self) -> Peaks:
        return self._peaks

    def forget(self) -> None:
        """Begin anew; what is alive now does not count any more."""
        self._live = self._deferred = 0
        self._peaks = Peaks(0, 0, 0)
        self._since += 1

    def begin(self, inputs: Tensor) -> object:
        """A forward of a layer begins, the gradient of whose weight needs ``inputs``: what its graph is to keep."""
        unit = _Unit()
        storage = inputs.untyped_storage()  # what any view of them keeps alive
        number, since = id(unit), self._since

        def inputs_freed(_: Any) -> None:
            del self._watched[number]
            unit.has_inputs = False
            self._add(since, -unit.has_graph, unit.has_graph - 1)

        def graph_freed() -> None:
            unit.has_graph = False
            if unit.has_inputs:
                self._add(since, -1, 1)

        self._watched[number] = unit, weakref.ref(storage, inputs_freed)
        self._add(since, 1, 0)
        return _Token(graph_freed)

    def _add(self, since: int, live: int, deferred: int) -> None:
        if since != self._since:
            return
        self._live += live
        self._deferred += deferred
        now = Peaks(self._live, self._deferred, self._live + self._deferred)
        self._peaks = Peaks(*map(max, self._peaks, now))


KEEPING = Keeping()
"""The one of this process."""
