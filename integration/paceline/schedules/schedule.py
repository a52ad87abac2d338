"""A pipeline schedule as a value: for every rank, the order of its compute actions. Nothing about communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""Kinds of actions. A backward is whole, or split: first what the stage before waits for, the gradient of the inputs,
and at any later time, on the same rank, the gradients of the weights. (Papers on zero bubbles call these B and W.)
"""

RECOMPUTE = "R"
"""The part of a backward that runs before its gradient is there: activations are computed again. No action of an order:
it comes right before its backward.
"""


class Action(NamedTuple):
    """One forward (``"F"``) or backward of one micro-batch through one model chunk of a rank.

    A backward is whole (``"B"``) or split into that of the inputs (``"I"``) and that of the weights (``"W"``).
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@lru_cache(maxsize=1 << 16)
def forward(micro_batch: int, chunk: int = 0) -> Action:
    """The forward of a micro-batch; one object for all ranks, so that a schedule of millions of actions stays small."""
    return Action(FORWARD, micro_batch, chunk)


@lru_cache(maxsize=1 << 16)
def backward(micro_batch: int, chunk: int = 0) -> Action:
    """The backward of a micro-batch; see :func:`forward`."""
    return Action(BACKWARD, micro_batch, chunk)


@lru_cache(maxsize=1 << 16)
def backward_input(micro_batch: int, chunk: int = 0) -> Action:
    """The backward of the inputs only, which sends gradients on; see :func:`forward`."""
    return Action(BACKWARD_INPUT, micro_batch, chunk)


@lru_cache(maxsize=1 << 16)
def backward_weight(micro_batch: int, chunk: int = 0) -> Action:
    """The backward of the weights, which a :func:`backward_input` left for later; see :func:`forward`."""
    return Action(BACKWARD_WEIGHT, micro_batch, chunk)


MOST_ACTIONS = 2**25
"""Of a schedule: more take gigabytes and minutes, and are a mistake."""


def check_size(num_stages: int, num_micro_batches: int, most: int = MOST_ACTIONS) -> None:
    """Raise ValueError if a step has more than ``most`` forwards and backwards."""
    if 2 * num_stages * num_micro_batches > most:
        raise ValueError(
            f"{num_micro_batches} micro-batches on {num_stages} stages are more than {most} forwards and backwards a "
            "step, too many to be planned: give fewer micro-batches, or fewer stages."
        )


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline computes in one step, in order.

    Stages are numbered along the model. A *direction* is one way of the stages over the ranks: its route says which
    rank holds which stage, and every direction has all stages. Micro-batch ``m`` takes direction ``m % num_directions``
    through the whole step. A *cell* is one stage of one direction, numbered ``direction · num_stages + stage``; the
    chunks of a rank are its cells in rising order.

    Without routes there is one direction, in which chunk ``c`` of rank ``r`` is stage ``c · num_ranks + r``: a schedule
    with one chunk has one stage a rank, and one with more is interleaved.

    Args:
        orders: one tuple of actions a rank.
        num_micro_batches: of a step.
        num_chunks: model chunks that each rank holds.
        name: for people: ``"kfkb k=2"``.
        routes: the rank of each stage, one route a direction. All have one length, and together they name every rank
            ``num_chunks`` times; :func:`~paceline.schedules.dependencies.check_actions` checks that.

    >>> there_and_back = Schedule(((), ()), 2, 2, routes=((0, 1), (1, 0)))
    >>> there_and_back.cells
    ((0, 3), (1, 2))
    >>> there_and_back.stage(1, forward(1, chunk=1)), there_and_back.direction(1, chunk=1)
    (0, 1)
    """

    orders: tuple[tuple[Action, ...], ...]
    num_micro_batches: int
    num_chunks: int = 1
    name: str = ""
    routes: tuple[tuple[int, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_directions(self) -> int:
        return len(self.routes) or 1

    @property
    def num_stages(self) -> int:
        """Stages of one direction."""
        return len(self.routes[0]) if self.routes else self.num_ranks * self.num_chunks

    @cached_property
    def cells(self) -> tuple[tuple[int, ...], ...]:
        """By rank and chunk: the cell."""
        if not self.routes:
            return tuple(tuple(range(rank, self.num_stages, self.num_ranks)) for rank in range(self.num_ranks))
        held: list[list[int]] = [[] for _ in self.orders]
        for cell, rank in enumerate(chain.from_iterable(self.routes)):
            held[rank].append(cell)
        return tuple(map(tuple, held))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """By rank and chunk: the stage of the cell."""
        num_stages = self.num_stages
        return tuple(tuple(cell % num_stages for cell in held) for held in self.cells)

    @cached_property
    def most_alive(self) -> tuple[tuple[int, ...], ...]:
        """By rank and chunk: micro-batches that are alive at once, from their forward to their (inputs') backward."""
        return tuple(map(self._most_alive, self.orders))

    def _most_alive(self, order: Sequence[Action]) -> tuple[int, ...]:
        alive, most = [0] * self.num_chunks, [0] * self.num_chunks
        for kind, _, chunk in order:
            if kind == FORWARD:
                alive[chunk] += 1
                most[chunk] = max(most[chunk], alive[chunk])
            elif kind != BACKWARD_WEIGHT:
                alive[chunk] -= 1
        return tuple(most)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By cell: the rank that holds it, and as which of its chunks."""
        found = ((cell, (rank, chunk)) for rank, held in enumerate(self.cells) for chunk, cell in enumerate(held))
        return tuple(place for _, place in sorted(found))

    @cached_property
    def is_split(self) -> bool:
        """Whether some backward is split into that of the inputs and that of the weights."""
        return any(action.kind == BACKWARD_WEIGHT for order in self.orders for action in order)

    def stage(self, rank: int, action: Action) -> int:
        """The stage that ``action`` of ``rank`` runs."""
        return self.stages[rank][action.chunk]

    def direction(self, rank: int, chunk: int) -> int:
        """The direction of a chunk of ``rank``, of which it runs the micro-batches."""
        return self.cells[rank][chunk] // self.num_stages

    def rank(self, stage: int, direction: int = 0) -> int:
        """The rank that holds ``stage`` of a direction."""
        return self.places[direction * self.num_stages + stage][0]
