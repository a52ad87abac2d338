"""Experts change slots: their values and everything that belongs to them goes straight to where it is needed.

All ranks know both placements, so that they need only tell each other which elements of a weight each of them holds: a
few integers, since with ZeRO 1 and 2 replicas hold fragments that are cut anywhere. From these each rank works out what
it sends and receives (:mod:`.expert_ranges`, :mod:`..state.exchange`).

A value that follows from a master which the same rank holds is made from that, as the optimizer's step does, and not
sent. Where the optimizer can wait for masters and states, only values are sent while training stands still: all else
comes beside the next step, which uses it at its end. Values may have been sent before (:mod:`.experts_ahead`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ..comm.control import SHARED, PeerError
from ..planning.experts import Placement
from ..state.exchange import ROUND_BYTES, Held, Move, Transfer, Wanted, carry_out, plan_moves
from ..state.exchange_beside import ExchangeBeside
from ..state.named import MASTER, VALUE
from ..supervise.first_cause import is_lost_connection
from ..supervise.watch import EVERYONE, WATCH
from .expert_ranges import Holding, Part, Route, Told, Weight, check, holdings, parts, routes, spans
from .experts_ahead import BesideSteps, Change, ExpertsAhead
from .layer import ExpertLayer
from .wrapper_states import StatePart, States, states_of

Guard = Callable[[str], AbstractContextManager[object]]
"""Around what must not end in the middle, given what that is."""

MOVING = "experts were being moved"

__all__ = ["Guard", "Moved", "StatePart", "States", "move_experts", "states_of"]


@dataclass(frozen=True)
class Moved:
    """Figures of a move of experts.

    Args:
        num_bytes: the most that one rank sends, or receives.
        paused_bytes: the same of what is sent while training stands still.
        transfer_s: in which the slowest rank packed, sent and received that, and put it into place.
        seconds: that training stood still.
    """

    num_bytes: int = 0
    paused_bytes: int = 0
    transfer_s: float = 0.0
    seconds: float = 0.0


def move_experts(
    changes: Sequence[Change],
    states: States,
    group: Any = None,
    *,
    beside: BesideSteps | None = None,
    ahead: ExpertsAhead | None = None,
    half_way: Guard = nullcontext,
    progress: Callable[[], None] = lambda: None,
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
        beside: brings masters and states later; None: they come with the values.
        ahead: has brought values already, for these very changes; only with ``beside``.
        half_way: holds what must not end in the middle, given what that is.
        progress: called after each transfer that training waits for.

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
        device = plans[0].layer.device
        later: list[list[Transfer]] = []
        if beside is None:
            rounds = list(_rounds(plans, rank, lambda part: True))
        else:
            for plan in plans:
                plan.makes_values, plan.sends_values = False, ahead is None
            rounds = list(_rounds(plans, rank, lambda part: part.kind == VALUE))
            later = list(_rounds(plans, rank, lambda part: part.kind != VALUE))
        transfer_begun = time.perf_counter()
        with half_way(MOVING):
            if ahead is not None:
                ahead.arrive()
            carry_out(rounds, device, group=group, in_place=True, progress=progress)
            if ahead is not None:
                ahead.put()
            for plan in plans:
                if beside is None:
                    plan.make_values(rank)
                    plan.empty_slots(lambda kind: True)
                else:
                    plan.empty_slots(lambda kind: kind == VALUE)
            get_accelerator().synchronize()
        now = time.perf_counter()
        # The end of the slowest is the end of all.
        ends, paused_ends = _volume([*rounds, *later], rank), _volume(rounds, rank)
        if ahead is not None:
            ends = ends[0] + ahead.sent[rank], ends[1] + sum(place.nbytes for place in ahead.places.values())
            paused_ends = paused_ends[0] + ahead.sent_late[rank], paused_ends[1]
        told = _gather((max(ends), max(paused_ends), now - transfer_begun, now - begun), group)
        if beside is not None:
            exchange = ExchangeBeside(later, device, beside.group, in_place=True)
            beside.expect(partial(_arrive, exchange, plans, half_way))
            exchange.start()  # not sooner: what ranks agree on would wait behind it
    return Moved(*map(max, zip(*told, strict=True)))


def _arrive(exchange: ExchangeBeside, plans: Sequence[_Plan], half_way: Guard) -> None:
    """Wait for masters and states, which somebody is about to look at."""
    doing = "moving states of experts"
    with _naming_lost_peers(), half_way(MOVING), WATCH.waiting(doing, EVERYONE):
        exchange.wait(progress=partial(WATCH.doing, doing, EVERYONE))
        for plan in plans:
            plan.empty_slots(lambda kind: kind != VALUE)


class _Plan:
    """Change of one layer's placement, as this rank sees it.

    Args:
        number: of the change among all.
    """

    told: list[Told]
    """By each rank of the group."""
    makes_values = True
    """Of masters that have come, and so they are not sent."""
    sends_values = True
    """Else those that are to change ranks have come already."""

    def __init__(
        self, number: int, layer: ExpertLayer, new: Placement, routes: Sequence[Route], states: States
    ) -> None:
        self.number, self.layer, self.new, self.routes = number, layer, new, routes
        self._emptied = range(new.owned[layer.rank], layer.placement.owned[layer.rank])
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

    def moves(self, part: Part, rank: int) -> tuple[list[Move], list[list[Held]], list[list[Wanted]]]:
        """Moves of one part from or to this rank, ``rank`` of the group, and what they point to."""
        of_part = self.weights[part.weight], part.kind, self.routes, self.told, rank
        held, wanted = holdings(*of_part, makes_values=self.makes_values)
        moves = plan_moves(held, wanted, [told.replica for told in self.told])
        return [move for move in moves if rank in (move.source, move.target)], held, wanted

    def transfers(self, part: Part, rank: int) -> Iterator[Transfer]:
        """Transfers of one part, with the memory that they read and write."""
        moves, held, wanted = self.moves(part, rank)
        slots = {route.expert: (route.slot, route.new_slot) for route in self.routes}
        for source, target, have, wish, start, stop, _ in moves:
            if part.kind == VALUE and source != target and not self.sends_values:
                continue
            old, new = slots[held[source][have].name][0], slots[wanted[target][wish].name][1]
            leaving = self.elements(part.weight, part.kind, old, start, stop) if source == rank else None
            place = self.elements(part.weight, part.kind, new, start, stop) if target == rank else None
            yield Transfer(source, target, leaving, place)

    @torch.no_grad()
    def make_values(self, rank: int) -> None:
        """Make the values that follow from masters which have come."""
        for route in self.routes:
            if route.new_device != self.told[rank].device:
                continue
            for number, weight in enumerate(self.weights):
                for _, span in spans(weight, MASTER, route.new_slot, self.told[rank]):
                    at = (route.new_slot, *span)
                    self.elements(number, VALUE, *at).copy_(self.elements(number, MASTER, *at))

    def empty_slots(self, of_kind: Callable[[str], bool]) -> None:
        """Fill this rank's own slots that no expert has any more with zeros, as all empty ones are."""
        for slot in self._emptied:
            for weight in self.weights:
                parameter, first = weight.places[slot]
                for held in self.held[parameter]:
                    start, stop = first - held.start, first + weight.numel - held.start
                    if of_kind(held.kind):
                        held.tensor[max(start, 0) : max(stop, 0)].zero_()

    def elements(self, weight: int, kind: str, slot: int, start: int, stop: int) -> Tensor:
        """Elements of a weight in an own slot: writing to them changes what the wrapper has."""
        parameter, first = self.weights[weight].places[slot]
        for held in self.held[parameter]:
            low, high = first + start - held.start, first + stop - held.start
            if held.kind == kind and low >= 0 and high <= held.tensor.numel():
                return held.tensor[low:high]
        raise AssertionError(f"this rank has no {kind} of elements {start} to {stop} in slot {slot}")


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


def _rounds(plans: Sequence[_Plan], rank: int, comes: Callable[[Part], bool]) -> Iterator[list[Transfer]]:
    """Put as many parts into a round as buffers have room for; the same on all ranks."""
    found: list[Transfer] = []
    num_bytes = 0
    for plan in plans:
        for part in filter(comes, parts(plan.weights, plan.routes, plan.told)):
            if num_bytes and num_bytes + part.most_bytes > ROUND_BYTES:
                yield found
                found, num_bytes = [], 0
            found += plan.transfers(part, rank)
            num_bytes += part.most_bytes
    yield found


def _volume(rounds: Iterable[Sequence[Transfer]], rank: int) -> tuple[int, int]:
    """Bytes that this rank sends, and receives."""
    sent = received = 0
    for transfer in (transfer for transfers in rounds for transfer in transfers):
        if transfer.source != transfer.target:
            sent += transfer.num_bytes * (transfer.source == rank)
            received += transfer.num_bytes * (transfer.target == rank)
    return sent, received


def _gather(value: Any, group: Any) -> list[Any]:
    """Gather the value of each rank of the group, in its order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _naming_lost_peers() -> Iterator[None]:
    """Say what was going on when the connection to another rank broke; the backends only say that it did."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise PeerError(
            f"rank {dist.get_rank()} lost another rank while experts were being moved; that rank's own error, if it "
            "could still give one, is the cause. Go on from the last checkpoint."
        ) from error
