"""Small messages between ranks beside the tensors' transport: agreement on errors, shapes, counts.

They go over gloo on the CPU whatever the tensors use, so they never make a GPU wait for its own queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..checkpoint import CheckpointError
from .groups import gloo_group

Value = TypeVar("Value")


class Gather(Protocol):
    """Brings the value of each of several ranks to all of them. Collective."""

    def __call__(self, value: Value, /) -> list[Value]: ...


class PeerError(RuntimeError):
    """Another rank failed; the message names the rank, what it was doing, and its error."""


SHARED = "paceline_is_shared"
"""Mark on an exception that all ranks raise together."""


def is_shared(error: BaseException) -> bool:
    return getattr(error, SHARED, False)


@dataclass(frozen=True)
class _Place:
    """Where a tensor comes to."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ControlPlane:
    """The gloo groups of one job. Made once, by all ranks together (:meth:`create`)."""

    world: dist.ProcessGroup
    pipe: dist.ProcessGroup
    rank: int

    @staticmethod
    def create(
        num_stages: int = 1, timeout: timedelta | None = None, *, pipes: Sequence[Sequence[int]] | None = None
    ) -> ControlPlane:
        """Groups for a world of pipelines.

        Args:
            pipes: ranks of each pipeline, first stage first. By default stages are outermost:
                rank = stage · data-parallel size + replica.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        world = gloo_group(timeout=timeout)
        if num_stages == 1:
            return ControlPlane(world, world, rank)  # nothing is summed over one stage
        replicas = size // num_stages
        if pipes is None:
            pipes = [list(range(replica, size, replicas)) for replica in range(replicas)]
        groups = [gloo_group(ranks, timeout) for ranks in pipes]
        return ControlPlane(world, next(g for g, ranks in zip(groups, pipes, strict=True) if rank in ranks), rank)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place. CPU tensor of any shape."""
        dist.all_reduce(values, group=self.world)
        return values

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Sum over the stages of this pipeline, in place. CPU tensor of any shape."""
        dist.all_reduce(values, group=self.pipe)
        return values

    def gather(self, value: Value) -> list[Value]:
        """``value`` of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.world)
        return values

    def gather_over_stages(self, value: Value) -> list[Value]:
        """``value`` of every stage of this pipeline, on each of them."""
        values: list[Any] = [None] * dist.get_world_size(self.pipe)
        dist.all_gather_object(values, value, group=self.pipe)
        return values

    def gather_at_first(self, value: Value) -> list[Value]:
        """``value`` of every rank, in rank order, on rank 0; an empty list elsewhere."""
        rank = dist.get_rank()
        values: list[Any] = [None] * dist.get_world_size() if rank == 0 else []
        dist.gather_object(value, values if rank == 0 else None, dst=0, group=self.world)
        return values

    def from_first(self, value: Value) -> Value:
        """Rank 0's ``value``, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.world)
        return values[0]

    def over_stages(self, value: Value, source: int) -> Value:
        """``value`` of the rank ``source``, on every stage of its pipeline: tensors, on the CPU, and more."""
        own = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().contiguous(), value)
        told = [tree_map_only(Tensor, lambda tensor: _Place(tensor.shape, tensor.dtype), own)]
        dist.broadcast_object_list(told, src=source, group=self.pipe)
        if self.rank != source:
            own = tree_map_only(_Place, lambda place: torch.empty(place.shape, dtype=place.dtype), told[0])
        for leaf in tree_leaves(own):
            if torch.is_tensor(leaf):
                # As bytes: gloo's collectives do not know all dtypes.
                dist.broadcast(leaf.view(-1).view(torch.uint8), src=source, group=self.pipe)
        return own

    def settle(self, error: BaseException | None, doing: str, *, notices: bool = False) -> bool:
        """Raise on every rank if any rank failed; call it on all ranks, with the local error or None.

        A :class:`ValueError` (wrong input) that every failing rank shares is raised as it is everywhere.

        Returns:
            Whether any rank gave notice.
        """
        failed, noticed = self.sum(torch.tensor([error is not None, notices], dtype=torch.int64)).tolist()
        if failed:
            self.raise_shared(error, doing)
        return bool(noticed)

    def raise_shared(self, error: BaseException | None, doing: str) -> None:
        """The raising half of :meth:`settle`, for callers that have already counted failures."""
        reports = self.gather(None if error is None else (type(error).__name__, str(error), _is_input_error(error)))
        told = [(rank, *report) for rank, report in enumerate(reports) if report]
        # Running out of data elsewhere is no explanation when some rank has a real error.
        rank, kind, message, is_input = next((r for r in told if r[1] != "StopIteration"), told[0])
        if kind == "StopIteration":
            raise StopIteration(message)
        if error is None or isinstance(error, StopIteration):
            if kind == CheckpointError.__name__:
                error = CheckpointError(message)
            elif is_input:
                error = ValueError(message)
            else:
                error = PeerError(f"rank {rank} failed while {doing}: {kind}: {message}")
        setattr(error, SHARED, True)
        raise error

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block without collectives on all ranks; if it fails on any, it fails on all."""
        caught: BaseException | None = None
        try:
            yield
        except Exception as error:
            caught = error
        self.settle(caught, doing)


def _is_input_error(error: BaseException) -> bool:
    return isinstance(error, (ValueError, FileNotFoundError))
