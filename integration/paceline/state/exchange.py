"""Ranges of named tensors change ranks: plan who sends which elements to whom, and carry it out.

Layers that change stage, experts that change slot and averaged masters move this way. Every rank tells all others which
elements it holds and which it wants; from the two lists all work out the same moves. Each element is sent once, from
the nearest rank that has it: the rank itself, its peer of the same replica, any.

Moves are carried out in rounds that are the same on all ranks. In a round a rank packs all small pieces for one peer
into one message, so messages are few and buffers small; others are sent from where they lie. Every rank posts the sends
and receives of a round together and those of all rounds in the same order: no cycle of ranks can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.staging import staging_for
from .named import VALUE

ROUND_BYTES = 8 << 20
"""A rank buffers at most so much of what it sends, and of what it receives, in a round. Longer messages are not
faster."""

PACKED_BYTES = 128 << 10
"""Smaller pieces travel together. A copy of a larger one costs more than a message of its own."""

Span = tuple[int, int]
"""First element, end."""


class Held(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of a flattened tensor, as a rank has them.

    Args:
        name: of the parameter or buffer.
        kind: :data:`VALUE`, ``"master"``, or a state of the optimizer.
        whole: shape of what belongs to the parameter as it is, such as a step count, and serves any of its elements;
            None for what has an element for each of the parameter's.
        is_number: it is a number of Python's or None, and a tensor only on its way.
    """

    name: str
    kind: str
    start: int
    stop: int
    dtype: torch.dtype
    whole: tuple[int, ...] | None = None
    is_number: bool = False


class Wanted(NamedTuple):
    """Elements of ``name`` that a rank is to have.

    Args:
        kind: None for every kind that there is but the value.
    """

    name: str
    start: int
    stop: int
    kind: str | None


class Move(NamedTuple):
    """Elements from rank to rank. ``held`` and ``wanted`` are positions in the lists of ``source`` and ``target``."""

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
    """Plan who sends what to whom; the same on every rank. What a rank has itself comes as a move to itself.

    Args:
        held: of each rank.
        wanted: of each rank.
        replicas: of each rank, the pipeline or the expert-parallel group that it belongs to.

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
            if wish.kind is not None and wish.kind not in kinds:
                raise ValueError(f"rank {target} is to have {wish.name}, which no rank has.")
            for kind, having in kinds.items():
                if kind == wish.kind or (wish.kind is None and kind != VALUE):
                    nearest = sorted(having, key=lambda h: (h[0] != target, replicas[h[0]] != replicas[target], h[0]))
                    moves += _moves_to(target, place, wish, nearest)
    return moves


def _moves_to(target: int, place: int, wish: Wanted, nearest: Sequence[tuple[int, int, Held]]) -> Iterator[Move]:
    """Moves of one kind from the nearest ranks that have it."""
    rank, position, entry = nearest[0]
    size = entry.dtype.itemsize
    if entry.whole is not None:
        yield Move(rank, target, position, place, 0, prod(entry.whole), prod(entry.whole) * size)
        return
    spans = (((rank, position), (entry.start, entry.stop)) for rank, position, entry in nearest)
    found, missing = cover([(wish.start, wish.stop)], spans)
    if missing:
        raise ValueError(f"rank {target} is to have elements {missing} of {wish.name}, which no rank has.")
    for (rank, position), start, stop in found:
        yield Move(rank, target, position, place, start, stop, (stop - start) * size)


T = TypeVar("T")


def cover(wanted: Sequence[Span], sources: Iterable[tuple[T, Span]]) -> tuple[list[tuple[T, int, int]], list[Span]]:
    """Take each wanted element from the first source that has it: ``(source, start, stop)``, and what none has."""
    found: list[tuple[T, int, int]] = []
    missing = [span for span in wanted if span[0] < span[1]]
    for source, (low, high) in sources:
        if not missing:
            break
        found += [(source, max(a, low), min(b, high)) for a, b in missing if max(a, low) < min(b, high)]
        missing = without(missing, [(low, high)])
    return found, missing


def without(spans: Sequence[Span], taken: Iterable[Span]) -> list[Span]:
    """Elements of ``spans`` that are in none of ``taken``."""
    left = list(spans)
    for low, high in taken:
        left = [(a, b) for start, stop in left for a, b in ((start, min(stop, low)), (max(start, high), stop)) if a < b]
    return left


def sent_bytes(moves: Iterable[Move], num_ranks: int) -> list[int]:
    """Bytes that each rank sends to others."""
    sent = [0] * num_ranks
    for move in moves:
        if move.source != move.target:
            sent[move.source] += move.num_bytes
    return sent


def in_rounds(moves: Iterable[Move], round_bytes: int = ROUND_BYTES) -> list[list[Move]]:
    """Spread moves over rounds; the same on all ranks that give the same moves.

    In a round no rank sends more than ``round_bytes`` to others or receives more, but for a single move that is larger.
    The moves from one rank, and those to one rank, keep their order.
    """
    rounds: list[list[Move]] = []
    last: dict[tuple[str, int], tuple[int, int]] = {}  # round and bytes in it, of each rank's sends and receives
    for move in moves:
        ends = (("send", move.source), ("receive", move.target)) if move.source != move.target else ()
        number = max((last.get(end, (0, 0))[0] for end in ends), default=0)
        used = max((last[end][1] for end in ends if last.get(end, (-1, 0))[0] == number), default=0)
        if used and used + move.num_bytes > round_bytes:
            number += 1
        for end in ends:
            before, num_bytes = last.get(end, (0, 0))
            last[end] = (number, move.num_bytes + (num_bytes if before == number else 0))
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(move)
    return rounds


class Transfer(NamedTuple):
    """One move as one of its ends sees it.

    Args:
        source: number of the sender in the group.
        target: number of the receiver in the group.
        leaving: what is sent; None on other ranks.
        place: memory that takes it; None on other ranks.
    """

    source: int
    target: int
    leaving: Tensor | None
    place: Tensor | None

    @property
    def num_bytes(self) -> int:
        tensor = self.place if self.leaving is None else self.leaving
        return 0 if tensor is None else tensor.nbytes


def stretch(tensor: Tensor, first: int, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop - 1`` of a flattened tensor, of which ``tensor`` has those from ``first`` on.

    A view. One that is not contiguous is cut between rows only.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[start - first : stop - first]
    row = prod(tensor.shape[1:])
    return tensor[(start - first) // row : (stop - first) // row]


@torch.no_grad()
def carry_out(
    rounds: Iterable[Sequence[Transfer]],
    device: torch.device,
    *,
    group: Any = None,
    in_place: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Send and receive what concerns this rank, and wait until it is done.

    A round is taken from ``rounds`` while the one before it is on its way.

    Args:
        rounds: transfers from and to this rank, of each pair of ranks in the same rounds and the same order on both.
        device: of the tensors that the backend sends.
        group: that carries them; None for the world's own.
        in_place: places may lie in memory that other transfers of the same round read: everything that a round brings
            has arrived before any of it is written.
        progress: called after each message.

    Raises:
        RuntimeError: a connection was lost, or a transfer took longer than the process group allows.
    """
    # What the backend sends lies on the device, or in host memory; a step count is on the host all the same.
    sendable = device if staging_for(device, group) is None else torch.device("cpu")
    before: _Round | None = None
    for transfers in rounds:
        begun = _Round(transfers, sendable, group, in_place)
        if before is not None:
            before.finish(progress)
        before = begun
    if before is not None:
        before.finish(progress)


class _Round:
    """The messages of one round, posted when it is made."""

    def __init__(self, transfers: Sequence[Transfer], sendable: torch.device, group: Any, in_place: bool) -> None:
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._landed: list[tuple[Tensor, Tensor]] = []
        leaving: dict[int, list[Tensor]] = {}
        arriving: dict[int, list[Tensor]] = {}
        for source, target, tensor, place in transfers:
            if source == target:
                assert tensor is not None
                assert place is not None
                if tensor.data_ptr() != place.data_ptr():
                    self._landed.append((place, tensor.clone() if in_place else tensor))
            elif source == rank and tensor is not None and tensor.numel():
                leaving.setdefault(target, []).append(tensor)
            elif target == rank and place is not None and place.numel():
                arriving.setdefault(source, []).append(place)
        operations = []
        for target, tensors in leaving.items():
            for together in _messages(tensors):
                flat = [_bytes(tensor).to(sendable) for tensor in together]
                message = torch.cat(flat) if len(flat) > 1 else flat[0]
                operations.append(dist.P2POp(dist.isend, message, ranks[target], group))
        for source, places in arriving.items():
            for together in _messages(places):
                first = together[0]
                if len(together) == 1 and not in_place and first.is_contiguous() and first.device.type == sendable.type:
                    message = _bytes(first)
                else:
                    sizes = [place.nbytes for place in together]
                    message = torch.empty(sum(sizes), dtype=torch.uint8, device=sendable)
                    self._landed += zip(together, message.split(sizes), strict=True)
                operations.append(dist.P2POp(dist.irecv, message, ranks[source], group))
        self._operations = operations  # they keep what is sent
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def finish(self, progress: Callable[[], None]) -> None:
        """Wait, and put what has arrived into place."""
        for work in self._works:
            work.wait()
            progress()
        for place, arrived in self._landed:
            if arrived.dtype == place.dtype:
                place.copy_(arrived.reshape(place.shape))
            elif place.is_contiguous():
                _bytes(place).copy_(arrived)
            else:
                values = torch.empty(place.shape, dtype=place.dtype, device=arrived.device)
                _bytes(values).copy_(arrived)
                place.copy_(values)


def _messages(pieces: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide what goes to one rank in a round into messages: first the small pieces, then each other one."""
    small = [piece for piece in pieces if piece.nbytes < PACKED_BYTES]
    return [*([small] if small else []), *([piece] for piece in pieces if piece.nbytes >= PACKED_BYTES)]


def _bytes(tensor: Tensor) -> Tensor:
    """Types do not matter on the way. A view where ``tensor`` is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
