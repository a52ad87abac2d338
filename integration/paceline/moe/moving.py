"""Experts change slots: their values and everything that belongs to them goes straight to where it is needed.

All ranks know both placements, so that they need only tell each other which elements of a weight each of them holds: a
few integers, since with ZeRO 1 and 2 replicas hold fragments that are cut anywhere. From these each rank works out what
it sends and receives (:mod:`.move_plan`). What goes to one rank goes as one message, as far as memory permits.

A value that follows from a master which the same rank holds is made from that, as the optimizer's step does, and not
sent.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ..comm.control import SHARED, PeerError
from ..planning.experts import Placement
from ..state.exchange import Held, Move, carry_out
from ..state.named import MASTER, VALUE
from .layer import ExpertLayer
from .move_plan import Holding, Part, Piece, Route, Told, Weight, check, parts, pieces, routes
from .wrapper_states import StatePart, States, states_of

__all__ = ["BytesToMove", "Moved", "StatePart", "States", "bytes_to_move", "move_experts", "states_of"]

ROUND_BYTES = 8 << 20
"""A rank has at most so much in buffers for what it sends, and for what it receives, at a time; more only where one
kind of one weight of the experts that it exchanges in a layer is more. Longer messages are not faster."""

_LOST_CONNECTION = re.compile(r"by peer|timed? ?out|broken pipe|NCCL|remote process", re.IGNORECASE)

Change = tuple[ExpertLayer, Placement]


@dataclass(frozen=True)
class Moved:
    """What a move of experts was.

    Args:
        num_bytes: the most that one rank sent, or received.
        transfer_s: in which the slowest rank packed, sent and received, and put into place.
        seconds: the whole.
    """

    num_bytes: int = 0
    transfer_s: float = 0.0
    seconds: float = 0.0


class BytesToMove(NamedTuple):
    """The most that one rank will send, or receive: for all changes together, and for each change by itself."""

    num_bytes: int
    by_change: list[int]


def move_experts(
    changes: Sequence[Change], states: States, group: Any = None, *, progress: Callable[[], None] = lambda: None
) -> Moved:
    """Bring every owned expert to the slot that its layer's new placement gives it, with all that belongs to it.

    Everything that a round brings has arrived before any of it is written. Copies of experts do not move, and layers do
    not :meth:`~paceline.moe.layer.ExpertLayer.take_on` the placement: that is left to the caller. Where nothing moves
    nobody is asked. Collective over ``group``; between steps only, when no gradient waits.

    Args:
        changes: layers with the placements they are to have, the same on all ranks.
        states: :func:`states_of` the engine.
        group: all ranks that have these layers, and no others: expert-parallel times expert-data-parallel ones. None
            for all there are.
        progress: called after each transfer.

    Raises:
        ValueError: on all ranks, and nothing has moved: a placement does not fit its layer, ranks ask for different
            ones, a state is not per element, or is there on some ranks only.
        PeerError: a rank or a connection was lost on the way: experts may be half written, and training goes on from
            the last checkpoint only.
    """
    begun = time.perf_counter()
    with _naming_lost_peers():
        plans, rank = _plans(changes, states, group)
        if not plans:
            return Moved()
        volume = [0, 0]
        rounds = list(_rounds(plans, rank))
        transfer_begun = time.perf_counter()
        for transfers in rounds:
            _carry(transfers, rank, group, progress)
            volume = [a + b for a, b in zip(volume, _volume(transfers, rank), strict=True)]
        get_accelerator().synchronize()
        now = time.perf_counter()
        # The end of the slowest is the end of all.
        told = _gather((max(volume), now - transfer_begun, now - begun), group)
    return Moved(*map(max, zip(*told, strict=True)))


def bytes_to_move(changes: Sequence[Change], states: States, group: Any = None) -> BytesToMove:
    """What :func:`move_experts` will report as its ``num_bytes``. Collective over ``group``; raises the same."""
    with _naming_lost_peers():
        plans, rank = _plans(changes, states, group)
        volumes = [(0, 0)] * len(changes)
        if not plans:
            return BytesToMove(0, [0] * len(changes))
        for plan in plans:
            volumes[plan.number] = _volume(plan.transfers(rank), rank)
        told = _gather(volumes, group)  # [M ranks][changes](sent, received)
    by_change = [max(map(max, of_change)) for of_change in zip(*told, strict=True)]
    whole = max(sum(way) for volume in told for way in zip(*volume, strict=True))
    return BytesToMove(whole, by_change)


class _Plan:
    """How the placement of one layer changes, as this rank sees it.

    Args:
        number: of the change among all.
    """

    told: list[Told]
    """By each rank of the group."""

    def __init__(
        self, number: int, layer: ExpertLayer, new: Placement, routes: Sequence[Route], states: States
    ) -> None:
        self.number, self.layer, self.new, self.routes = number, layer, new, routes
        parameters: dict[nn.Parameter, int] = {}
        slots = [layer.parts(slot) for slot in range(layer.num_slots)]
        self.weights = [
            Weight(
                of_slots[0].name,
                of_slots[0].numel,
                tuple((parameters.setdefault(part.parameter, len(parameters)), part.start) for part in of_slots),
            )
            for of_slots in zip(*slots, strict=True)
        ]
        self.held = [states(parameter) for parameter in parameters]

    def tell(self) -> Told:
        holdings = tuple(
            tuple(Holding(h.kind, h.tensor.dtype, h.start, h.start + h.tensor.numel()) for h in held)
            for held in self.held
        )
        layer = self.layer
        replica = dist.get_rank() if layer.group is None else dist.get_process_group_ranks(layer.group)[0]
        asked = zlib.crc32(repr((layer.name, layer.placement, self.new)).encode())
        return Told(layer.rank, replica, asked, holdings)

    def transfers(self, rank: int) -> Iterator[_Transfer]:
        """Of this rank, ``rank`` of the group."""
        for part in parts(self.weights, self.routes, self.told):
            weight = self.weights[part.weight]
            found = list(pieces(weight, part.kind, self.routes, self.told, rank))
            yield _Transfer(self, part, found)

    def elements(self, weight: int, kind: str, slot: int, start: int, stop: int) -> Tensor:
        """Of a weight in an own slot: writing to them changes what the wrapper has."""
        parameter, first = self.weights[weight].places[slot]
        for held in self.held[parameter]:
            low, high = first + start - held.start, first + stop - held.start
            if held.kind == kind and low >= 0 and high <= held.tensor.numel():
                return held.tensor[low:high]
        raise AssertionError(f"this rank has no {kind} of elements {start} to {stop} in slot {slot}")


class _Transfer(NamedTuple):
    """What this rank sends, receives, or moves within itself of one part."""

    plan: _Plan
    part: Part
    pieces: list[Piece]

    def source(self, piece: Piece) -> Tensor:
        return self.plan.elements(self.part.weight, self.part.kind, piece.from_slot, piece.start, piece.stop)

    def put(self, piece: Piece, arrived: Tensor) -> None:
        """Args: ``arrived``: bytes."""
        at = (piece.to_slot, piece.start, piece.stop)
        target = self.plan.elements(self.part.weight, self.part.kind, *at)
        _bytes(target).copy_(arrived)
        if self.part.kind == MASTER:
            self.plan.elements(self.part.weight, VALUE, *at).copy_(target)

    def num_bytes(self, piece: Piece) -> int:
        return (piece.stop - piece.start) * self.part.itemsize


def _plans(changes: Sequence[Change], states: States, group: Any) -> tuple[list[_Plan], int]:
    """Those in which an expert moves, and this rank's number in the group."""
    for layer, new in changes:
        layer.check(new)
    plans = [
        _Plan(number, layer, new, found, states)
        for number, (layer, new) in enumerate(changes)
        if (found := routes(layer.placement, new))
    ]
    if not plans:
        return [], 0
    everyone = _gather([plan.tell() for plan in plans], group)
    try:
        if len({len(told) for told in everyone}) > 1:
            raise ValueError("ranks ask for the move of different layers: give all ranks the same changes.")
        for plan, told in zip(plans, zip(*everyone, strict=True), strict=True):
            plan.told = list(told)
            check(plan.layer.name, plan.weights, plan.told)
    except ValueError as error:
        setattr(error, SHARED, True)
        raise
    return plans, dist.get_rank(group)


def _rounds(plans: Sequence[_Plan], rank: int) -> Iterator[list[_Transfer]]:
    """As many parts at a time as buffers have room for; the same on all ranks."""
    found: list[_Transfer] = []
    num_bytes = 0
    for plan in plans:
        for transfer in plan.transfers(rank):
            if found and num_bytes + transfer.part.most_bytes > ROUND_BYTES:
                yield found
                found, num_bytes = [], 0
            found.append(transfer)
            num_bytes += transfer.part.most_bytes
    yield found


@torch.no_grad()
def _carry(transfers: Sequence[_Transfer], rank: int, group: Any, progress: Callable[[], None]) -> None:
    """One message to each rank that something goes to, one from each that something comes from."""
    device = transfers[0].plan.layer.device
    stays: list[tuple[_Transfer, Piece, Tensor]] = []
    leaving: dict[int, list[Tensor]] = {}
    arriving: dict[int, list[tuple[_Transfer, Piece]]] = {}
    for transfer in transfers:
        for piece in transfer.pieces:
            if piece.source == piece.target:
                stays.append((transfer, piece, _bytes(transfer.source(piece)).clone()))
            elif piece.source == rank:
                leaving.setdefault(piece.target, []).append(_bytes(transfer.source(piece)))
            else:
                arriving.setdefault(piece.source, []).append((transfer, piece))
    ranks = dist.get_process_group_ranks(group)
    held, own, moves, places = [], [], [], {}
    for target, tensors in sorted(leaving.items()):
        packed = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        held.append(Held("experts", VALUE, 0, packed.numel(), (packed.numel(),), packed.dtype))
        own.append(packed)
        moves.append(Move(ranks[rank], ranks[target], len(own) - 1, 0, 0, packed.numel(), packed.numel()))
    for source, expected in sorted(arriving.items()):
        num_bytes = sum(transfer.num_bytes(piece) for transfer, piece in expected)
        places[len(moves)] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        moves.append(Move(ranks[source], ranks[rank], 0, 0, 0, num_bytes, num_bytes))
    carry_out(moves, held, own, places, device, group=group, progress=progress)
    for (_, expected), place in zip(sorted(arriving.items()), places.values(), strict=True):
        sizes = [transfer.num_bytes(piece) for transfer, piece in expected]
        for (transfer, piece), arrived in zip(expected, place.split(sizes), strict=True):
            transfer.put(piece, arrived)
    for transfer, piece, kept in stays:
        transfer.put(piece, kept)


def _bytes(tensor: Tensor) -> Tensor:
    """Types do not matter on the way."""
    return tensor.view(torch.uint8)


def _volume(transfers: Iterable[_Transfer], rank: int) -> tuple[int, int]:
    """Bytes that this rank sends, and receives."""
    sent = received = 0
    for transfer in transfers:
        for piece in transfer.pieces:
            if piece.source != piece.target:
                sent += transfer.num_bytes(piece) * (piece.source == rank)
                received += transfer.num_bytes(piece) * (piece.target == rank)
    return sent, received


def _gather(value: Any, group: Any) -> list[Any]:
    """Of each rank of the group, in its order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _naming_lost_peers() -> Iterator[None]:
    """Say what was going on when the connection to another rank broke; the backends only say that it did."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST_CONNECTION.search(str(error)):
            raise
        raise PeerError(
            f"rank {dist.get_rank()} lost another rank while experts were being moved; that rank's own error, if it "
            "could still give one, is the cause. Go on from the last checkpoint."
        ) from error
