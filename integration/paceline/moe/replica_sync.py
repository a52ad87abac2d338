"""Copies of experts: values from their owners, gradients to them.

A copy is no parameter: it has neither master nor moments, is counted in no norm, and stands in no checkpoint. So what
copies exist can change at the price of their values, and all copies of an expert are equal to the last bit.

Legend: P weights of an expert laid out one after another, in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..planning.experts import Placement


class Replicas:
    """The slots for copies of one layer on this rank.

    Args:
        weights: the stacked weights of this rank's own slots, ``[slots, …]`` each.
        num_replicas: slots for copies.
        is_last_backward: whether the gradients of a step are complete with the backward that runs now; until then those
            of the copies are kept here.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        group: Any,
        num_replicas: int,
        is_last_backward: Callable[[], bool],
    ) -> None:
        self.weights, self.group, self.num_replicas = list(weights), group, num_replicas
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_last_backward = is_last_backward
        self.copies = [torch.zeros(num_replicas, *w.shape[1:], dtype=w.dtype, device=w.device) for w in weights]
        self._kept: list[Tensor] | None = None
        self._arriving: tuple[Any, Tensor, Tensor] | None = None

    def take_on(self, placement: Placement) -> None:
        """Hold the copies that ``placement`` puts here, from the next :meth:`fetch` on."""
        self.settle()
        owners = placement.owners
        slot_of = {expert: slot for slot, expert in enumerate(placement.own_experts(self.rank))}
        # Copies here by owner, and own slots that others have copies of by who has them; both in the others' order.
        self._here: list[list[int]] = [[] for _ in range(self.size)]
        self._there: list[list[int]] = [[] for _ in range(self.size)]
        for rank, (held, owned) in enumerate(zip(placement.devices, placement.owned, strict=True)):
            for copy, expert in enumerate(held[owned:]):
                if rank == self.rank:
                    self._here[owners[expert]].append(copy)
                if owners[expert] == self.rank:
                    self._there[rank].append(slot_of[expert])
        # On the device: for a list of numbers the host would wait in each layer's backward.
        device = self.copies[0].device
        self._copies_here, self._slots_there = (
            torch.tensor([place for places in each for place in places], dtype=torch.int64, device=device)
            for each in (self._here, self._there)
        )

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin to fetch the owners' values, which have changed. Collective over the group."""
        self.settle()
        self._arriving = self._carry(
            [w.detach() for w in self.weights], self._slots_there, self._there, self._here, wait=False
        )

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what :meth:`fetch` has begun."""
        if self._arriving is None:
            return
        work, arrived, _ = self._arriving
        self._arriving = None
        work.wait()
        for copies, rows in zip(self.copies, self._taken_apart(arrived), strict=True):
            # Graphs that are under way have saved them, and go on with these: autograd is not told.
            copies.data.index_copy_(0, self._copies_here, rows)

    def slot_weights(self, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The rows that have arrived, own weights and copies, to compute with.

        Backward gives the owners what their copies have learned, before the rows' gradients travel: so that all ranks
        talk to each other in the same order, whatever rows they have.
        """
        self.settle()
        if not any(weight.requires_grad for weight in self.weights):
            return rows, tuple(self.weights), tuple(self.copies)
        rows, *weights = _Joined.apply(self, rows, *self.weights)
        half = len(self.weights)
        return rows, tuple(weights[:half]), tuple(weights[half:])

    def gradients(self, own: Sequence[Tensor | None], copies: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those of the own weights, with what the copies add to them when a step's last backward runs."""
        if self._kept is not None:
            copies = [kept if new is None else kept.add_(new) for kept, new in zip(self._kept, copies, strict=True)]
        whole = [
            torch.zeros_like(memory) if gradient is None else gradient
            for gradient, memory in zip(copies, self.copies, strict=True)
        ]
        if not self.is_last_backward():
            if self._kept is None:  # they may be many: added up in fp32, as the owners' are
                whole = [g.to(torch.promote_types(g.dtype, torch.float32), copy=True) for g in whole]
            self._kept = whole
            return list(own)
        self._kept = None
        whole = [g.to(memory.dtype) for g, memory in zip(whole, self.copies, strict=True)]
        found: list[Tensor | None] = []
        _, arrived, _ = self._carry(whole, self._copies_here, self._here, self._there)
        places = [slot for slots in self._there for slot in slots]
        for gradient, weight, learned in zip(own, self.weights, self._taken_apart(arrived), strict=True):
            total = torch.zeros_like(weight) if gradient is None else gradient.clone()
            for slot, rows in zip(places, learned, strict=True):  # one after another: an expert may have several copies
                total[slot] += rows
            found.append(total)
        return found

    def forget(self) -> None:
        """Drop gradients that are kept for a step which will not be."""
        self._kept = None

    def _carry(
        self,
        tensors: Sequence[Tensor],
        picked: Tensor,
        leaving: list[list[int]],
        arriving: list[list[int]],
        *,
        wait: bool = True,
    ) -> tuple[Any, Tensor, Tensor]:
        """Rows ``picked`` of all ``tensors`` to other ranks: each expert's one after another, ``[experts, P]``.

        Args:
            leaving: the same rows, by the rank that they go to.
        """
        sent, received = [len(slots) for slots in leaving], [len(slots) for slots in arriving]
        packed = torch.cat(
            [tensor.index_select(0, picked).reshape(len(picked), tensor[0].numel()) for tensor in tensors], dim=1
        )
        arrived = packed.new_empty(sum(received), packed.shape[1])
        work = dist.all_to_all_single(arrived, packed, received, sent, group=self.group, async_op=not wait)
        return work, arrived, packed  # which has to live as long as it is sent

    def _taken_apart(self, packed: Tensor) -> list[Tensor]:
        """``[experts, P]`` as rows of each weight."""
        parts = packed.split([weight[0].numel() for weight in self.weights], dim=1)
        return [part.view(-1, *weight.shape[1:]) for part, weight in zip(parts, self.weights, strict=True)]


class _Joined(torch.autograd.Function):
    """Rows, own weights → rows, own weights and copies: backward sees the gradients of all of them at once."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in (rows, *weights, *replicas.copies))

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        half = len(gradients) // 2
        return (None, rows, *ctx.replicas.gradients(gradients[:half], gradients[half:]))
