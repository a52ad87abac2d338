"""A schedule without a flush: what every rank computes in any step of a run, again and again.

A step of a rank begins with its first forward. Some backwards of a step run on a rank when its next step has begun
already, and so does the update that is made of them: they *lag*. A run starts without what would lag behind nothing,
and is drained by running what still lags. Between two drains the weights that an action uses are a matter of where it
stands, and :meth:`Stream.versions` tells them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .schedule import BACKWARD, FORWARD, Action, Schedule

UPDATE = "U"


class StreamAction(NamedTuple):
    """One forward, backward or update (``"F"``, ``"B"``, ``"U"``) of a rank, of the step ``lag`` steps ago.

    An update puts into all chunks of the rank what was made of that step's gradients. Its ``micro_batch`` and ``chunk``
    are −1.
    """

    kind: str
    micro_batch: int
    chunk: int
    lag: int

    def __str__(self) -> str:
        what = "U" if self.kind == UPDATE else str(Action(self.kind, self.micro_batch, self.chunk))
        return what + "'" * self.lag


class Versioned(NamedTuple):
    """An action of a run and the weights that it uses: those after ``version`` updates."""

    kind: str
    step: int
    micro_batch: int
    chunk: int
    version: int


@dataclass(frozen=True)
class Stream:
    """What each rank computes in a step of the steady state, in order.

    Args:
        windows: of each rank; every forward, backward and update of one step, none of them twice.
        num_micro_batches: M of a step, a multiple of the number of directions.
        num_chunks: stages that each rank holds.
        name: for people.
        routes: rank of each stage, one route a direction; see :class:`Schedule`.
    """

    windows: tuple[tuple[StreamAction, ...], ...]
    num_micro_batches: int
    num_chunks: int = 1
    name: str = ""
    routes: tuple[tuple[int, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.windows)

    @cached_property
    def most_lag(self) -> int:
        """Steps that must have begun after one for it to be done with everywhere."""
        return max(action.lag for window in self.windows for action in window)

    def window(self, rank: int, begun: int, is_drained: int = 0) -> Iterator[StreamAction]:
        """What ``rank`` runs in the step that has ``begun`` steps of the run before it.

        Args:
            begun: those before it since the start, or since the last drain.
            is_drained: for the windows of a drain: how many steps too many this one is; 1 for the first.
        """
        for action in self.windows[rank]:
            if is_drained <= action.lag <= begun:
                yield action

    def drain(self, rank: int, begun: int) -> Iterator[tuple[int, StreamAction]]:
        """What is left to run after ``begun`` steps, with the number of the step that each action is of."""
        for late in range(1, self.most_lag + 1):
            for action in self.window(rank, begun + late - 1, late):
                yield begun - 1 + late - action.lag, action

    def actions(self, rank: int, num_steps: int, flushes: Collection[int] = ()) -> Iterator[tuple[int, StreamAction]]:
        """All that ``rank`` runs in ``num_steps`` steps, with the number of the step that each action is of.

        Args:
            flushes: the run is drained after these steps, as well as after the last one.
        """
        first = 0
        for step in range(num_steps):
            for action in self.window(rank, step - first):
                yield step - action.lag, action
            if step in flushes or step == num_steps - 1:
                for number, action in self.drain(rank, step - first + 1):
                    yield first + number, action
                first = step + 1

    def unrolled(self, num_steps: int) -> Schedule:
        """The forwards and backwards of a whole run, which can be verified, simulated, drawn.

        Micro-batch m of step n is number ``n · M + m``.
        """
        orders = tuple(
            tuple(
                Action(action.kind, step * self.num_micro_batches + action.micro_batch, action.chunk)
                for step, action in self.actions(rank, num_steps)
                if action.kind != UPDATE
            )
            for rank in range(self.num_ranks)
        )
        return Schedule(orders, num_steps * self.num_micro_batches, self.num_chunks, self.name, self.routes)

    @property
    def one_step(self) -> Schedule:
        """One step with a flush at its end."""
        return self.unrolled(1)

    def versions(self, num_steps: int, flushes: Collection[int] = ()) -> tuple[tuple[Versioned, ...], ...]:
        """For each rank its forwards and backwards in order, with the version of the weights that each uses.

        Args:
            flushes: as of :meth:`actions`.
        """
        found = []
        for rank in range(self.num_ranks):
            version, row = 0, []
            for step, action in self.actions(rank, num_steps, flushes):
                if action.kind == UPDATE:
                    version += 1
                else:
                    row.append(Versioned(action.kind, step, action.micro_batch, action.chunk, version))
            found.append(tuple(row))
        return tuple(found)

    def mismatches(self, num_steps: int) -> tuple[dict[tuple[int, int, int], int], ...]:
        """For each rank, by (step, micro-batch, chunk): updates between the forward and its backward."""
        found = []
        for row in self.versions(num_steps):
            of_forward = {v[1:4]: v.version for v in row if v.kind == FORWARD}
            found.append({v[1:4]: v.version - of_forward[v[1:4]] for v in row if v.kind == BACKWARD})
        return tuple(found)


def flushed(schedule: Schedule) -> Stream:
    """The stream of a schedule whose steps end with their update, so that nothing lags."""
    windows = tuple(
        (*(StreamAction(*action, 0) for action in order), StreamAction(UPDATE, -1, -1, 0)) for order in schedule.orders
    )
    routes = schedule.routes or (tuple(range(schedule.num_ranks)),)
    return Stream(windows, schedule.num_micro_batches, schedule.num_chunks, schedule.name, routes)
