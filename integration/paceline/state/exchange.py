"""Rows of named tensors change ranks: who has what, who wants what, and the transfers that follow.

Every rank tells all others what it holds and what it wants; from the two lists all of them work out the same transfers.
Whatever moves is sent once, from the nearest rank that has it: the rank itself, its peer of the same replica, any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.staging import staging_for
from .named import VALUE


class Held(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of a tensor, as a rank has them.

    Args:
        name: of the parameter or buffer.
        kind: :data:`VALUE`, ``"master"``, or a state of the optimizer.
        is_whole: it belongs to the parameter as it is, and cannot be cut by rows (a step count).
        is_number: it is a number of Python's, and a tensor only on its way.
    """

    name: str
    kind: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_whole: bool = False
    is_number: bool = False


class Wanted(NamedTuple):
    """Rows of ``name`` that a rank is to have: of its value, or of all else that belongs to it."""

    name: str
    start: int
    stop: int
    is_value: bool


class Move(NamedTuple):
    """One tensor from rank to rank. ``held`` and ``wanted`` are places in the lists of ``source`` and ``target``."""

    source: int
    target: int
    held: int
    wanted: int
    start: int
    stop: int
    num_bytes: int


def plan_moves(
    held: Sequence[Sequence[Held]], wanted: Sequence[Sequence[Wanted]], replicas: Sequence[int]
) -> list[Move]:
    """Who sends what to whom; the same on every rank. What a rank has itself comes as a move to itself.

    Args:
        held: of each rank.
        wanted: of each rank.
        replicas: of each rank, the pipeline that it belongs to.

    Raises:
        ValueError: nobody has what is wanted.
    """
    holders: dict[str, dict[str, list[tuple[int, int, Held]]]] = {}
    for rank, entries in enumerate(held):
        for position, entry in enumerate(entries):
            holders.setdefault(entry.name, {}).setdefault(entry.kind, []).append((rank, position, entry))
    moves: list[Move] = []
    for target, wishes in enumerate(wanted):
        for place, wish in enumerate(wishes):
            kinds = holders.get(wish.name, {})
            if wish.is_value and VALUE not in kinds:
                raise ValueError(f"rank {target} is to have {wish.name}, which no rank has.")
            for kind, places in kinds.items():
                if (kind == VALUE) != wish.is_value:
                    continue
                nearest = sorted(places, key=lambda p: (p[0] != target, replicas[p[0]] != replicas[target], p[0]))
                moves += _cover(target, place, wish, nearest)
    return moves


def _cover(target: int, place: int, wish: Wanted, nearest: Sequence[tuple[int, int, Held]]) -> Iterable[Move]:
    """The rows of one kind from the nearest ranks that have them."""
    rank, position, entry = nearest[0]
    if entry.is_whole:
        yield Move(rank, target, position, place, entry.start, entry.stop, _num_bytes(entry))
        return
    missing = [(wish.start, wish.stop)]
    for rank, position, entry in nearest:
        left = []
        for start, stop in missing:
            low, high = max(start, entry.start), min(stop, entry.stop)
            if low >= high:
                left.append((start, stop))
                continue
            row = _num_bytes(entry) // (entry.stop - entry.start)
            yield Move(rank, target, position, place, low, high, row * (high - low))
            left += [(a, b) for a, b in ((start, low), (high, stop)) if a < b]
        missing = left
    if missing:
        raise ValueError(f"rank {target} is to have rows {missing} of {wish.name}, which no rank has.")


def _num_bytes(entry: Held) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def sent_bytes(moves: Iterable[Move], num_ranks: int) -> list[int]:
    """What each rank sends to others."""
    sent = [0] * num_ranks
    for move in moves:
        if move.source != move.target:
            sent[move.source] += move.num_bytes
    return sent


def part(tensor: Tensor, held: Held, move: Move) -> Tensor:
    """What of a held tensor moves."""
    if held.is_whole or not tensor.dim():
        return tensor
    return tensor[move.start - held.start : move.stop - held.start]


def carry_out(
    moves: Sequence[Move],
    held: Sequence[Held],
    own: Sequence[Tensor],
    places: Mapping[int, Tensor],
    device: torch.device,
    *,
    group: Any = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Send and receive what concerns this rank, and wait until it is done.

    Args:
        held: of this rank.
        own: its tensors.
        places: by position in ``moves``, the memory that takes what arrives; contiguous.
        group: that carries it, with all ranks of ``moves``, which are those of the world; None for the world's own.
        progress: called after each transfer.

    Raises:
        RuntimeError: a connection was lost, or a transfer took longer than the process group allows.
    """
    rank = dist.get_rank()
    # What the backend sends lies on the device, or in host memory; a step count is on the host all the same.
    sendable = device if staging_for(device, group) is None else torch.device("cpu")
    operations, landed = [], []
    for number, move in enumerate(moves):
        if move.source == move.target == rank:
            tensor = part(own[move.held], held[move.held], move)
            if places[number].data_ptr() != tensor.data_ptr():
                places[number].copy_(tensor)
        elif move.target == rank:
            place = places[number]
            if place.device.type != sendable.type:
                landed.append((place, torch.empty(place.shape, dtype=place.dtype, device=sendable)))
                place = landed[-1][1]
            operations.append(dist.P2POp(dist.irecv, place, move.source, group))
        elif move.source == rank:
            tensor = part(own[move.held], held[move.held], move).to(sendable).contiguous()
            operations.append(dist.P2POp(dist.isend, tensor, move.target, group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
        progress()
    for place, arrived in landed:
        place.copy_(arrived)
