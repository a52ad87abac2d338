"""Buckets with their memory, and the ranks over which each is reduced.

Most parameters are the same on all data-parallel ranks of a stage. Experts that lie on different ranks are the same on
fewer: these ranks are a domain of their own, with buckets of their own, in between the others in the order in which
backward finishes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .direct_exchange import DirectReduction, Reduction, ReductionThread, finish, publish_direct, sends_direct
from .layout import ALIGNMENT, Bucket, Rows, make_buckets

# torch 2.13 renames these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def has_reduce_scatter(group: Any) -> bool:
    """Whether a reduce-scatter sends less than an all-reduce: gloo's is one, of a copy."""
    return dist.get_backend(group) != "gloo"


@dataclass(frozen=True)
class Domain:
    """The ranks that hold the same parameters.

    Args:
        group: of these ranks; None for one.
        size: how many they are.
        rank: this one among them.
        owners: those of them, ascending, that may own rows; None for all.
        section: parameters of different sections share no bucket.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    owners: tuple[int, ...] | None = None
    section: int = 0

    @classmethod
    def of(cls, group: Any) -> Domain:
        return cls() if group is None else cls(group, dist.get_world_size(group), dist.get_rank(group))


@dataclass(frozen=True)
class DomainBucket:
    """A bucket and the ranks that reduce it.

    Args:
        shard: whether each of these ranks steps its part only (ZeRO 1), or each the whole (ZeRO 0, one rank).
        waits: its gradients are complete only after the backward.
    """

    bucket: Bucket
    domain: Domain
    shard: bool
    waits: bool

    @property
    def own(self) -> tuple[Rows, ...]:
        """What this rank answers for."""
        return self.bucket.parts[self.domain.rank]

    @property
    def is_scattered(self) -> bool:
        """Whether one collective over all ranks serves all owners, where the backend has one."""
        return self.shard and self.bucket.is_even and has_reduce_scatter(self.domain.group)

    def is_direct(self, device: torch.device) -> bool:
        """Whether the ranks send one another messages."""
        return self.shard and not self.is_scattered and sends_direct(self.domain.group, device)

    def start_reduction(self, gradients: Tensor, communication_dtype: torch.dtype | None) -> list[Reduction]:
        """The sum of ``gradients``, memory of this bucket, to the owners or to all. Collective over the domain."""
        group = self.domain.group
        if self.domain.size == 1:
            return []
        sent = gradients if communication_dtype is None else gradients.to(communication_dtype)
        if not self.shard:
            return [CollectiveReduction(dist.all_reduce(sent, group=group, async_op=True), sent, gradients)]
        if self.is_scattered:
            own = slice(*self._own_bounds)
            work = _reduce_scatter(sent[own], sent, group=group, async_op=True)
            return [CollectiveReduction(work, sent[own], gradients[own])]
        if self.is_direct(gradients.device):
            return [DirectReduction.begin(sent, gradients, self.bucket.bounds, self.domain.rank, group)]
        return [
            CollectiveReduction(dist.reduce(part, group=group, group_dst=owner, async_op=True), part, place)
            for (owner, part), (_, place) in zip(self._parts(sent), self._parts(gradients), strict=True)
        ]

    def start_publishing(self, values: Tensor) -> Iterator[Any]:
        """What the owners have in ``values``, to all; what is to be waited for. Collective over the domain."""
        if self.is_scattered:
            yield _all_gather(values, values[slice(*self._own_bounds)], group=self.domain.group, async_op=True)
            return
        if self.is_direct(values.device):
            yield from publish_direct(values, self.bucket.bounds, self.domain.rank, self.domain.group)
            return
        for owner, part in self._parts(values):
            yield dist.broadcast(part, group=self.domain.group, group_src=owner, async_op=True)

    @property
    def _own_bounds(self) -> tuple[int, int]:
        return self.bucket.bounds[self.domain.rank], self.bucket.bounds[self.domain.rank + 1]

    def _parts(self, memory: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of each owner, what it has, if anything."""
        for owner in range(self.domain.size):
            low, high = self.bucket.bounds[owner], self.bucket.bounds[owner + 1]
            if high > low:
                yield owner, memory[low:high]


def exchange_shards(domain: Domain, memory: Tensor) -> None:
    """Do with ``memory`` what ZeRO 1 does in a step with a bucket: reduce it to owners of equal parts, and publish.

    Collective over the domain. A few numbers at the end, of which there are no equal parts, stay as they are.
    """
    whole = ALIGNMENT * domain.size
    memory = memory[: len(memory) // whole * whole]
    (bucket,) = make_buckets([tuple(memory.shape)], domain.size, len(memory))
    assert bucket.numel == len(memory), bucket
    part = DomainBucket(bucket, domain, shard=True, waits=False)
    finish(part.start_reduction(memory, None))
    for work in list(part.start_publishing(memory)):
        work.wait()


@dataclass(frozen=True)
class CollectiveReduction:
    """Gradients on their way in a collective.

    Args:
        work: to be waited for.
        sent: the memory that the sum comes to; other memory than ``gradients`` where it has another dtype.
        gradients: memory that the sum is to be in.
    """

    work: Any
    sent: Tensor
    gradients: Tensor

    def is_there(self) -> bool:
        return bool(self.work.is_completed())

    def finish(self) -> None:
        self.work.wait()
        if self.sent.dtype != self.gradients.dtype:
            self.gradients.copy_(self.sent)


def lay_out(
    order: Sequence[int],
    shapes: Sequence[Sequence[int]],
    domains: Sequence[Domain],
    layers: Sequence[str],
    *,
    waiting: set[int],
    bucket_numel: int,
    least_numel: int,
    cut: bool,
    shard: bool,
) -> list[DomainBucket]:
    """Buckets over all parameters, in the order in which they are reduced: the same on all ranks of a stage.

    Args:
        order: numbers of the parameters as they come in the model, whose reverse is the order of the backward.
        shapes: of each parameter, by number, as are the next two.
        domains: over which it is reduced.
        layers: that it belongs to.
        waiting: numbers of the parameters that are reduced last.
        bucket_numel: see :func:`make_buckets`, as for the next two.
    """
    found: list[DomainBucket] = []
    for domain in dict.fromkeys(domains[number] for number in order):
        members = [number for number in order if domains[number] == domain]
        buckets = make_buckets(
            [shapes[number] for number in members],
            domain.size,
            bucket_numel,
            owners=domain.owners,
            layers=[layers[number] for number in members],
            least_numel=least_numel,
            apart=[place for place, number in enumerate(members) if number in waiting],
            cut=cut,
        )
        for bucket in (_renumbered(bucket, members) for bucket in buckets):
            waits = not waiting.isdisjoint(bucket.parameters)
            found.append(DomainBucket(bucket, domain, shard and domain.size > 1, waits))
    place = {number: index for index, number in enumerate(order)}
    return sorted(found, key=lambda one: (one.waits, -min(place[number] for number in one.bucket.parameters)))


def _renumbered(bucket: Bucket, members: Sequence[int]) -> Bucket:
    parts = tuple(
        tuple(Rows(members[r.index], r.start, r.stop, r.offset, r.numel) for r in part) for part in bucket.parts
    )
    return Bucket(tuple(members[i] for i in bucket.parameters), bucket.offsets, bucket.numel, bucket.bounds, parts)


class Buffers:
    """The memory of one bucket.

    Args:
        parameters: of the stage, by number. Where values lie here, those of the bucket move in.
        dtype: of the gradients.
        holds_values: whether the parameters' values lie here too, which they must if the bucket is sharded.
    """

    def __init__(
        self, part: DomainBucket, parameters: Sequence[nn.Parameter], dtype: torch.dtype, *, holds_values: bool
    ) -> None:
        assert holds_values or not part.shard, part
        self.part = part
        self.waits = part.waits
        """Its gradients are complete only after the backward."""
        self._parameters = {index: parameters[index] for index in part.bucket.parameters}
        first = parameters[part.bucket.parameters[0]]
        self.gradients = torch.zeros(part.bucket.numel, dtype=dtype, device=first.device)
        self.views = self._views_of(self.gradients)
        """Gradients by number of the parameter."""
        self.values: Tensor | None = None
        if holds_values:
            self.values = torch.zeros(part.bucket.numel, dtype=first.dtype, device=first.device)
            for index, place in self._views_of(self.values).items():
                place.copy_(parameters[index].detach())
                parameters[index].data = place
        self.unfinished = len(part.bucket.parameters)
        self.is_reduced = False
        self.works: list[Reduction] = []
        self.is_lent = False
        """Whether the gradients are complete and belong to an update: the next ones need other memory."""
        self.num_lent = 0
        """Sets of gradients that belong to updates which are not applied."""
        self._spares: list[Tensor] = []
        self._num_sets = 1

    def _views_of(self, memory: Tensor) -> dict[int, Tensor]:
        offsets = zip(self._parameters.items(), self.part.bucket.offsets, strict=True)
        return {index: view_at(memory, offset, parameter) for (index, parameter), offset in offsets}

    @property
    def takes_turns(self) -> bool:
        """Whether its reduction needs memory of its own as long as it is under way."""
        return self.part.is_direct(self.gradients.device)

    @property
    def is_finished(self) -> bool:
        return self.unfinished <= 0 and not self.waits

    def start_reduction(self, communication_dtype: torch.dtype | None, thread: ReductionThread | None) -> None:
        """To the owners, or to all; where there is a ``thread``, when it is its turn. Collective over the domain."""
        self.is_reduced = True
        start = partial(self.part.start_reduction, self.gradients, communication_dtype)
        self.works += start() if thread is None else [thread.put(start)]

    def finish_reduction(self) -> None:
        finish(self.works)
        self.works.clear()

    def reset(self) -> None:
        self.unfinished = len(self.part.bucket.parameters)
        self.is_reduced = False

    def lend(self) -> Tensor:
        """The memory of the gradients, for an update, which gives it back."""
        self.is_lent = True
        self.num_lent += 1
        return self.gradients

    def renew(self) -> None:
        """Take other memory for the coming gradients."""
        if self._spares:
            self.gradients = self._spares.pop()
        else:
            self.gradients = torch.empty_like(self.gradients)
            self._num_sets += 1
        self.views, self.is_lent = self._views_of(self.gradients), False

    def give_back(self, memory: Tensor) -> None:
        """The update has been applied."""
        self.num_lent -= 1
        self._spares.append(memory)

    def gradient_bytes(self) -> int:
        """Bytes of all sets of gradients."""
        return self._num_sets * self.gradients.nbytes

    def move_values_out(self) -> None:
        """Give the parameters memory of their own again."""
        for parameter in self._parameters.values() if self.values is not None else ():
            parameter.data = parameter.detach().clone()


def view_at(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """What a bucket's ``memory`` has at ``offset``, in the shape of ``like``."""
    return memory[offset : offset + like.numel()].view(like.shape)
