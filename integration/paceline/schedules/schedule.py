"""A pipeline schedule as a value: for every rank, the order of its compute actions. Nothing about communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One forward (``"F"``) or backward (``"B"``) of one micro-batch through one model chunk of a rank."""

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


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline computes in one step, in order.

    Stages are numbered along the model: chunk ``c`` of rank ``r`` is stage ``c · num_ranks + r``, so a schedule with
    one chunk has one stage a rank, and one with more is interleaved.

    Args:
        orders: one tuple of actions a rank.
        num_micro_batches: of a step.
        num_chunks: model chunks that each rank holds.
        name: for people: ``"kfkb k=2"``.
    """

    orders: tuple[tuple[Action, ...], ...]
    num_micro_batches: int
    num_chunks: int = 1
    name: str = ""

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, action: Action) -> int:
        """The stage that ``action`` of ``rank`` runs."""
        return action.chunk * self.num_ranks + rank

    def rank(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return stage % self.num_ranks
