"""Tokens go to the ranks that have their experts, and come back.

The number of rows and their order are worked out from the experts that the router chose and a table from experts to
slots. Nothing that is computed depends on the table: the rows of an expert arrive in the same order wherever it lies,
and the gradient of a token adds up in the order of its experts in the model.

Legend: E experts of the model, R ranks of the group, T tokens of this rank, K experts that a token goes to, N = T K,
P slots of a rank, C most copies of an expert, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..planning.experts import Placement
from ..planning.splitting import split


class SlotTable:
    """From experts to slots.

    Args:
        num_slots: own ones of a rank, of which the last may be empty; copies come after all of them.
        num_replicas: its slots for copies.
        loads: tokens by expert, for shares of the copies that even out the ranks; None for equal shares.
        speeds: of the ranks, by which shares even them out; None: equal.

    Attributes:
        width: P; without any copies, slots for them are none.
        slots: ``[E, C]`` of each copy: rank times P plus the slot on that rank; the last copy repeated.
        ends: ``[E, C - 1]`` where the share of each copy ends, as a part of the expert's tokens.
    """

    def __init__(
        self,
        placement: Placement,
        num_slots: int,
        num_replicas: int,
        device: torch.device,
        loads: Sequence[float] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.placement, self.speeds = placement, speeds
        self.num_experts = placement.num_experts
        most = max(len(ranks) for ranks in placement.copies)
        self.width = num_slots + (num_replicas if most > 1 else 0)
        at = [
            {
                expert: rank * self.width + (place if place < owned else num_slots + place - owned)
                for place, expert in enumerate(held)
            }
            for rank, (held, owned) in enumerate(zip(placement.devices, placement.owned, strict=True))
        ]
        self.copies = [[at[rank][expert] for rank in ranks] for expert, ranks in enumerate(placement.copies)]
        padded = [slots + slots[-1:] * (most - len(slots)) for slots in self.copies]
        self.slots = torch.tensor(padded, device=device)
        self.ends = self._ends(split(placement, loads, speeds=speeds) if loads is not None and most > 1 else None)

    def _ends(self, shares: Sequence[Sequence[float]] | None) -> Tensor:
        most = self.slots.shape[1]
        rows = []
        for expert, slots in enumerate(self.copies):
            parts = [1 / len(slots)] * len(slots) if shares is None else list(shares[expert])
            row, total = [], 0.0
            for part in parts[:-1]:
                total += part
                row.append(total)
            rows.append(row + [2.0] * (most - 1 - len(row)))  # no token comes so late
        return torch.tensor(rows, dtype=torch.float32, device=self.slots.device).reshape(self.num_experts, most - 1)

    @property
    def has_copies(self) -> bool:
        return self.slots.shape[1] > 1


@dataclass(frozen=True)
class Exchange:
    """Which rows go where.

    Attributes:
        order: ``[N]`` for each row that is sent its place among the choices ``[T, K]``, flattened; by slot.
        sent: rows to each rank.
        received: rows from each rank.
        counts: ``[R, P]`` int32, rows from each rank for each slot of this one.
        by_slot: ``counts`` over all ranks, on the host; empty where there is one rank.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    counts: Tensor
    by_slot: list[int]


def plan_exchange(chosen: Tensor, counts: Tensor, table: SlotTable, group: Any, *, fresh: bool = False) -> Exchange:
    """Collective over ``group``; the host waits for the device once.

    Args:
        chosen: ``[T, K]`` experts.
        counts: ``[E]`` how often each was chosen.
        fresh: share the tokens between copies by what all ranks chose just now.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if fresh and table.has_copies:
        return _plan_fresh(chosen, counts, table, group, rank, size)
    if table.has_copies:
        place, expert, order = _by_expert(chosen, counts)
        part = (place + 0.5) / counts[expert].clamp(min=1)
        copy = (part[:, None] > table.ends[expert]).sum(dim=1)
        slots = torch.empty_like(expert)
        slots[order] = table.slots[expert, copy]
        by_slot = torch.zeros(size * table.width, dtype=torch.int32, device=chosen.device)
        by_slot.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
    else:
        slots = table.slots[:, 0][chosen.reshape(-1)]
        by_slot = torch.zeros(size * table.width, dtype=torch.int32, device=chosen.device)
        by_slot[table.slots[:, 0]] = counts.to(torch.int32)
    order = torch.argsort(slots, stable=True)
    by_rank = by_slot.view(size, table.width)
    if size == 1:
        return Exchange(order, [chosen.numel()], [chosen.numel()], by_rank, [])
    arriving = torch.empty_like(by_rank)
    dist.all_to_all_single(arriving, by_rank, group=group)
    # All that the host has to know, at once: it waits for the device here and nowhere else in the layer.
    known = torch.cat([by_rank.sum(dim=1), arriving.sum(dim=1), arriving.sum(dim=0)]).tolist()
    return Exchange(order, known[:size], known[size : 2 * size], arriving, known[2 * size :])


def _by_expert(chosen: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all choices, by expert: the number among those of its expert, the expert, the place in ``chosen``."""
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    expert = flat[order]
    begins = torch.cumsum(counts, dim=0) - counts
    return torch.arange(len(flat), device=flat.device) - begins[expert], expert, order


def _plan_fresh(chosen: Tensor, counts: Tensor, table: SlotTable, group: Any, rank: int, size: int) -> Exchange:
    """All ranks' tokens of an expert in one row, cut where its copies' shares end; nobody needs to ask further."""
    own = counts.to(torch.int64)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    everyone = torch.stack(gathered).cpu()  # [R, E]
    totals = everyone.sum(dim=0)
    shares = split(table.placement, totals.tolist(), speeds=table.speeds)
    most = table.slots.shape[1]
    bounds = torch.tensor([_bounds(*each, most) for each in zip(totals.tolist(), shares, strict=True)])  # [E, C + 1]
    last = everyone.cumsum(dim=0)
    first = last - everyone
    rows = torch.minimum(last[:, :, None], bounds[:, 1:]) - torch.maximum(first[:, :, None], bounds[:, :-1])
    by_slot = torch.zeros(size, size * table.width, dtype=torch.int64)  # [R, R P]
    by_slot.index_add_(1, table.slots.reshape(-1).cpu(), rows.clamp(min=0).reshape(size, -1))
    arriving = by_slot[:, rank * table.width : (rank + 1) * table.width]

    place, expert, order = _by_expert(chosen, counts)
    device = chosen.device
    number = place + first[rank].to(device)[expert]
    copy = (number[:, None] >= bounds[:, 1:-1].to(device)[expert]).sum(dim=1)
    slots = torch.empty_like(expert)
    slots[order] = table.slots[expert, copy]
    sent = by_slot[rank].view(size, table.width).sum(dim=1).tolist()
    received = arriving.sum(dim=1).tolist()
    by_slot_here = arriving.sum(dim=0).tolist()
    return Exchange(torch.argsort(slots, stable=True), sent, received, arriving.to(device, torch.int32), by_slot_here)


def _bounds(total: int, shares: Sequence[float], most: int) -> list[int]:
    """Where the copies' shares of ``total`` tokens begin and end; copies that are not there get nothing."""
    bounds, part = [0], 0.0
    for share in shares[:-1]:
        part += share
        bounds.append(min(total, round(part * total)))
    return bounds + [total] * (most + 1 - len(bounds))


class TakeRows(torch.autograd.Function):
    """``x [T, H]`` → ``[N, H]``: each token once for each of its experts, in the order of ``exchange``.

    Backward adds what comes back for a token in ascending order of its experts: the same sum on any placement, and
    that of a plain gather of rows sorted by expert.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(order, chosen)
        return x.index_select(0, order // chosen.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, chosen = ctx.saved_tensors
        num_tokens, top_k = chosen.shape
        rows = torch.empty_like(gradient)
        rows[order] = gradient
        rows = rows.view(num_tokens, top_k, -1)
        if top_k == 1:
            return rows[:, 0], None, None
        ranked = torch.argsort(chosen, dim=1)
        tokens = torch.arange(num_tokens, device=chosen.device)
        total = rows[tokens, ranked[:, 0]]
        for k in range(1, top_k):
            total += rows[tokens, ranked[:, k]]
        return total, None, None


class AllToAll(torch.autograd.Function):
    """Rows ``[sum(sent), H]`` to the ranks of ``group``, ``sent`` to each; ``[sum(received), H]`` from them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _all_to_all(rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def take_rows(x: Tensor, chosen: Tensor, exchange: Exchange) -> Tensor:
    """``x [T, H]`` → ``[N, H]``, each token once for each of its experts, in the order in which rows are sent."""
    return TakeRows.apply(x, exchange.order, chosen)


def send_rows(rows: Tensor, exchange: Exchange, group: Any) -> Tensor:
    """This rank's ``[N, H]`` → the rows that arrive here, by source and slot."""
    return rows if group is None else AllToAll.apply(rows, group, exchange.sent, exchange.received)


def return_rows(rows: Tensor, exchange: Exchange, group: Any) -> Tensor:
    """The rows that arrived here, computed → ``[N, H]`` in the order in which this rank sent its own."""
    return rows if group is None else AllToAll.apply(rows, group, exchange.received, exchange.sent)
