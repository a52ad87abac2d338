"""What the ranks agree on before a step, one step ahead: an asynchronous pipeline has no moment at which all wait.

Every rank that reads data puts down its table of the step; one sum over the world, which nobody waits for, brings all
tables to all. It has long arrived when the step begins. An iterator is read ahead once it has been given twice: a loop
that gives another one for each step is read step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .micro_batches import MicroBatch

FLAGS = 4
"""Of how many ranks: reading failed, the data had ended, the iterator is new, the rank was asked to stop."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step.

    Args:
        tables: ``[replicas, readers, numbers]``.
        failed: some rank could not read it.
        ended: that is only because there is no more data.
        is_new: some iterator was not the one of the step before.
        stops: some rank was asked to stop.
    """

    tables: Tensor
    failed: bool
    ended: bool
    is_new: bool
    stops: bool


@dataclass
class Ahead:
    """A step that has been read and is being agreed on.

    Args:
        iterator: that it was read from.
        loaded: its micro-batches, where they are read.
        error: why this rank could not read it.
        header: the tables, flattened, and the flags.
        work: the sum over the world that is under way.
        state: what the iterator would have gone on from before, if it tells.
    """

    iterator: object
    loaded: list[MicroBatch]
    error: BaseException | None
    header: Tensor
    work: dist.Work
    state: object

    @classmethod
    def begin(
        cls,
        iterator: object,
        read: Callable[[], tuple[list[MicroBatch], list[int], BaseException | None]],
        *,
        place: tuple[int, int] | None,
        shape: tuple[int, int, int],
        is_new: bool,
        stops: bool,
        group: dist.ProcessGroup,
    ) -> Ahead:
        """Read a step and begin to agree on it. Collective, without waiting for anybody.

        Args:
            read: gives micro-batches, the numbers of the table, and an error.
            place: replica and number of this reader; None: it reads nothing.
            shape: replicas, readers of each, numbers of a table at most.
            is_new: whether the iterator is another than that of the step before.
            stops: whether this rank was asked to stop.
        """
        state = iterator.state_dict() if place is not None and hasattr(iterator, "state_dict") else None
        loaded, own, error = read()
        header = torch.zeros(shape[0] * shape[1] * shape[2] + FLAGS, dtype=torch.int64)
        if place is not None:
            start = (place[0] * shape[1] + place[1]) * shape[2]
            header[start : start + len(own)] = torch.tensor(own, dtype=torch.int64)
        ended = isinstance(error, StopIteration)
        header[-FLAGS:] = torch.tensor([error is not None, ended, is_new and place is not None, stops])
        work = dist.all_reduce(header, group=group, async_op=True)
        return cls(iterator, loaded, error, header, work, state)

    def agreed(self, shape: tuple[int, int, int]) -> Agreed:
        """Wait for it."""
        self.work.wait()
        failed, ended, is_new, stops = self.header[-FLAGS:].tolist()
        tables = self.header[:-FLAGS].view(shape)
        return Agreed(tables, failed > 0, failed == ended, is_new > 0, stops > 0)
