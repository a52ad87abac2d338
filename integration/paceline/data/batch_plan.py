"""The order of samples: the rows of each step, rank and micro-batch, and resuming in the middle.

Which rows make a step depends on the seed and the global batch only, not on how ranks and micro-batches share it.

Legend: B micro-batch size, M micro-batches per step, D data-parallel size, G = M·D·B global batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..planning.unequal_replicas import dealt
from .rows import Rows
from .streaming import RowStream


@dataclass(frozen=True)
class BatchPlan:
    """The assignment of samples to steps, micro-batches and ranks.

    Step t of an epoch takes samples ``[t·G, (t+1)·G)`` of the epoch's permutation; of these, sample
    ``m·(D·B) + r·B + i`` is row i of micro-batch m on data-parallel rank r. So the samples of a step are the same for
    every D, B, M with the same G, also where ranks take unequal ``shares`` of its micro-batches
    (:func:`~paceline.planning.unequal_replicas.dealt`). The incomplete last global batch of an epoch is dropped.

    >>> BatchPlan(num_samples=10, micro_batch_size=2, micro_batches_per_step=2).steps_per_epoch
    2

    A stream has no number of samples: its step t takes the next G.

    Of several islands each has every ``num_islands``-th sample of the permutation, or row of the stream, from the
    ``island``-th on, and for each of them all of this is said.

    Raises:
        ValueError: fewer samples than one global batch.
    """

    num_samples: int | None
    micro_batch_size: int
    micro_batches_per_step: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    seed: int = 42
    island: int = 0
    num_islands: int = 1
    shares: tuple[int, ...] = ()
    """Micro-batches of a step for each data-parallel rank, D·M in all; empty: M each."""

    def __post_init__(self) -> None:
        assert min(self.micro_batch_size, self.micro_batches_per_step) > 0, self
        assert not self.shares or len(self.shares) == self.data_parallel_size, self
        assert not self.shares or sum(self.shares) == self.micro_batches_per_step * self.data_parallel_size, self
        assert 0 <= self.data_parallel_rank < self.data_parallel_size, self
        assert 0 <= self.island < self.num_islands, self
        if self.num_samples is not None and self.num_samples // self.num_islands < self.global_batch_size:
            of_island = "" if self.num_islands == 1 else f" for each of {self.num_islands} islands"
            raise ValueError(
                f"{self.num_samples // self.num_islands} training samples{of_island}: less than one global batch, "
                f"{self.micro_batches_per_step} micro-batches of {self.micro_batch_size} on {self.data_parallel_size} "
                f"data-parallel ranks = {self.global_batch_size}. Remedy: smaller --gradient_accumulation_steps, "
                "--per_device_train_batch_size or --block_size, or more data."
            )

    @property
    def global_batch_size(self) -> int:
        return self.micro_batches_per_step * self.data_parallel_size * self.micro_batch_size

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.num_samples is None else self.num_samples // self.num_islands // self.global_batch_size

    @property
    def own(self) -> list[int]:
        """Numbers of this rank's micro-batches among the D·M of a step."""
        shares = self.shares or (self.micro_batches_per_step,) * self.data_parallel_size
        return [number for number, rank in enumerate(dealt(shares)) if rank == self.data_parallel_rank]

    def order(self, epoch: int) -> Tensor:
        """This rank's sample indices in ``epoch``, int64 ``[steps_per_epoch, M, B]``, M being its share."""
        assert self.num_samples is not None
        assert self.steps_per_epoch is not None
        generator = torch.Generator().manual_seed(self.seed + epoch)
        used = self.steps_per_epoch * self.global_batch_size
        permutation = torch.randperm(self.num_samples, generator=generator)[self.island :: self.num_islands][:used]
        return permutation.view(self.steps_per_epoch, -1, self.micro_batch_size)[:, self.own]


class TrainingBatches(Iterator[dict[str, Tensor]]):
    """This rank's micro-batches without end, M a step. All ranks are at the same place, and need no talk to be.

    Between steps, :meth:`state_dict` says how far training has come, and :meth:`load_state_dict` goes on from there
    without losing or repeating a row, also with other M, D, B of the same G. The state is the same on all ranks that
    take their batches; a rank that takes none (a middle stage) loads it all the same and has none of its own to save.

    Args:
        recipe: what made the rows (:func:`paceline.data.samples.recipe`); a state of another one is refused.

    Attributes:
        shares: asked at the beginning of each step for the plan's ``shares``, where they change during a run.
    """

    def __init__(self, rows: Rows | RowStream, plan: BatchPlan, recipe: Mapping[str, str | int] | None = None) -> None:
        assert plan.num_samples == (len(rows) if isinstance(rows, Rows) else None), plan
        self._rows, self.plan, self._recipe = rows, plan, dict(recipe or {})
        self.shares: Callable[[], tuple[int, ...]] | None = None
        self._step = 0
        self._ready: deque[dict[str, Tensor]] = deque()
        self._epoch_order: tuple[int, Tensor] | None = None

    def __next__(self) -> dict[str, Tensor]:
        if not self._ready:
            if self.shares is not None and self.shares() != self.plan.shares:
                self.plan, self._epoch_order = replace(self.plan, shares=self.shares()), None
            self._ready.extend(list(self._from_stream() if isinstance(self._rows, RowStream) else self._from_rows()))
            self._step += 1
        return self._ready.popleft()

    def _from_rows(self) -> Iterator[dict[str, Tensor]]:
        assert isinstance(self._rows, Rows)
        assert self.plan.steps_per_epoch is not None
        epoch, step = divmod(self._step, self.plan.steps_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = epoch, self.plan.order(epoch)
        for indices in self._epoch_order[1][step]:
            yield self._rows.batch(indices.tolist())

    def _from_stream(self) -> Iterator[dict[str, Tensor]]:
        assert isinstance(self._rows, RowStream)
        plan, size = self.plan, self.plan.micro_batch_size
        rows = [next(self._rows) for _ in range(plan.global_batch_size * plan.num_islands)]
        rows = rows[plan.island :: plan.num_islands]
        for number in plan.own:
            yield self._rows.collate(rows[number * size : (number + 1) * size])

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and lists (JSON) that say which rows the steps so far have taken.

        Raises:
            RuntimeError: in the middle of a step.
        """
        if self._ready:
            raise RuntimeError(
                f"step {self._step - 1} has {len(self._ready)} micro-batches left: the position in the data is known "
                "between steps only."
            )
        state: dict[str, Any] = {"step": self._step, "data": self._identity()}
        if isinstance(self._rows, RowStream):
            state["stream"] = self._rows.state_dict()
        return state

    def check_state(self, state: dict[str, Any]) -> None:
        """Whether :meth:`load_state_dict` will take ``state``; changes nothing.

        Raises:
            ValueError: it is of other data, another tokenizer, seed or global batch.
        """
        was, now = state["data"], self._identity()
        for name in {**was, **now}:
            if was.get(name) != now.get(name):
                raise ValueError(
                    f"the data cannot go on where the checkpoint left it: {name.replace('_', ' ')} was "
                    f"{was.get(name)} and is {now.get(name)}. Remedy: the data and flags of the interrupted run (ranks "
                    "and micro-batches may change, their product with the micro-batch size may not"
                    f"{self._as_before(was)}), or a new run."
                )

    def _as_before(self, was: Mapping[str, Any]) -> str:
        """The number of micro-batches that gives this plan the global batch of the state ``was``, if there is one."""
        number, rest = divmod(was["global_batch_size"], self.plan.data_parallel_size * self.plan.micro_batch_size)
        if rest or number == self.plan.micro_batches_per_step:
            return ""
        return f": here, --gradient_accumulation_steps {number}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps of ``state``.

        Raises:
            ValueError: as :meth:`check_state`.
        """
        self.check_state(state)
        self._ready.clear()
        self._step = state["step"]
        if isinstance(self._rows, RowStream):
            self._rows.load_state_dict(state["stream"])

    def _identity(self) -> dict[str, str | int]:
        shared = {"island": f"{self.plan.island} of {self.plan.num_islands}"} if self.plan.num_islands > 1 else {}
        return {
            "global_batch_size": self.plan.global_batch_size,
            "seed": self.plan.seed,
            **shared,
            **self._recipe,
            **self._rows.identity(),
        }


def evaluation_batches(
    rows: Rows, micro_batch_size: int, data_parallel_rank: int = 0, data_parallel_size: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Every row once over all ranks: rank r has rows r, r + D, ...; the last micro-batch may be smaller.

    Ranks may have different numbers of micro-batches, also none.
    """
    mine = range(data_parallel_rank, len(rows), data_parallel_size)
    for start in range(0, len(mine), micro_batch_size):
        yield rows.batch(list(mine[start : start + micro_batch_size]))
