"""Which elements of which expert's weights go from rank to rank when a layer changes its placement.

A weight of an expert is numbered from its own first element, wherever it lies; a *piece* is a run of these that one
rank has of one kind (value, master, an optimizer's state) and that another rank is to have.

Legend: M ranks that have the layer, R ranks of an expert-parallel group; a rank below is one of the M.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..planning.experts import Placement
from ..state.named import MASTER, VALUE

Span = tuple[int, int]
"""First element, end."""


class Holding(NamedTuple):
    """A run of elements of a flattened parameter that a rank has."""

    kind: str
    dtype: torch.dtype
    start: int
    stop: int


class Told(NamedTuple):
    """What a rank tells the others about a layer.

    Args:
        device: its number in the layer's expert-parallel group, 0 to R - 1.
        replica: which of these groups it is in; any number that is that group's alone.
        asked: the same on all ranks, if they are asked for the same.
        parameters: holdings of each parameter of the experts.
    """

    device: int
    replica: int
    asked: int
    parameters: tuple[tuple[Holding, ...], ...]


class Weight(NamedTuple):
    """One weight of the experts of a layer.

    Args:
        name: of it in the expert.
        places: for each own slot the number of the parameter and the first element in it.
    """

    name: str
    numel: int
    places: tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of one weight of an expert, from slot to slot."""

    source: int
    target: int
    from_slot: int
    to_slot: int
    start: int
    stop: int


class Part(NamedTuple):
    """One kind of one weight: what moves of it does not depend on any other part.

    Args:
        weight: its number.
        itemsize: bytes of an element.
        most_bytes: more than this no rank sends or receives.
    """

    weight: int
    kind: str
    itemsize: int
    most_bytes: int


class Route(NamedTuple):
    """Of an expert: the device and slot that own it, and those that are to."""

    device: int
    slot: int
    new_device: int
    new_slot: int


def routes(old: Placement, new: Placement) -> list[Route]:
    """Of each expert that changes its slot. Copies do not count."""
    before, after = _owned_slots(old), _owned_slots(new)
    return [Route(*before[expert], *after[expert]) for expert in sorted(before) if before[expert] != after[expert]]


def _owned_slots(placement: Placement) -> dict[int, tuple[int, int]]:
    return {
        expert: (device, slot)
        for device, (experts, owned) in enumerate(zip(placement.devices, placement.owned, strict=True))
        for slot, expert in enumerate(experts[:owned])
    }


def check(layer: str, weights: Sequence[Weight], told: Sequence[Told]) -> None:
    """Raise ValueError if what the ranks have does not fit together; all of them know it."""
    asked = [entry.asked for entry in told]
    if len(set(asked)) > 1:
        odd = next(rank for rank, each in enumerate(asked) if each != asked[0])
        raise ValueError(
            f"{layer}: ranks 0 and {odd} of its group have or ask for different placements: give all ranks the same."
        )
    devices = sorted({entry.device for entry in told})
    for weight in weights:
        parameters = sorted({number for number, _ in weight.places})
        dtypes: dict[str, set[torch.dtype]] = {}
        for entry in told:
            for number in parameters:
                for holding in entry.parameters[number]:
                    dtypes.setdefault(holding.kind, set()).add(holding.dtype)
        for kind, found in dtypes.items():
            if len(found) > 1:
                raise ValueError(
                    f"{layer}: {kind} of {weight.name} is of {sorted(map(str, found))} on different ranks: give all "
                    "the same."
                )
        size = len(weight.places) // len(parameters) * weight.numel
        for number in parameters:
            for device in devices:
                _check_complete(layer, weight.name, size, dtypes, device, number, told)


def _check_complete(
    layer: str, weight: str, size: int, kinds: Iterable[str], device: int, number: int, told: Sequence[Told]
) -> None:
    for kind in kinds:
        reached = 0
        spans = {
            (h.start, h.stop)
            for entry in told
            if entry.device == device
            for h in entry.parameters[number]
            if h.kind == kind
        }
        for start, stop in sorted(spans):
            if start <= reached:
                reached = max(reached, stop)
        if reached < size:
            raise ValueError(
                f"{layer}: device {device} has no {kind} of {weight}, or not all of it, and others have: experts can "
                "move when every rank's have been stepped equally often; let each step reach all of them."
            )


def parts(weights: Sequence[Weight], routes: Sequence[Route], told: Sequence[Told]) -> list[Part]:
    """Everything that may move of a layer, in an order which is the same on all ranks."""
    arriving = Counter(route.new_device for route in routes)
    most = max(arriving.values(), default=0)
    found = []
    for number, weight in enumerate(weights):
        sizes = {
            holding.kind: holding.dtype.itemsize for entry in told for holding in entry.parameters[weight.places[0][0]]
        }
        # Values first: those that follow from masters are overwritten with these, and may have to leave before.
        for kind, itemsize in sorted(sizes.items(), key=lambda item: (item[0] != VALUE, item[0])):
            found.append(Part(number, kind, itemsize, most * weight.numel * itemsize))
    return found


def pieces(weight: Weight, kind: str, routes: Sequence[Route], told: Sequence[Told], rank: int) -> Iterator[Piece]:
    """What ``rank`` sends, receives, or moves within itself of one part; in the same order on both sides.

    Each element comes once to each rank that is to have it, from the nearest that has it: the rank itself, one of the
    same replica, any. A value is left out where the rank gets the master of the same elements.
    """
    members: dict[int, list[int]] = {}
    for number, entry in enumerate(told):
        members.setdefault(entry.device, []).append(number)
    own = told[rank].device
    for device, slot, new_device, new_slot in routes:
        if own not in (device, new_device):
            continue
        for target in members[new_device] if own == device else [rank]:
            wanted = _spans(weight, kind, new_slot, told[target])
            if kind == VALUE:
                wanted = _without(wanted, _spans(weight, MASTER, new_slot, told[target]))
            nearest = _nearest(members[device], target, told)
            sources = {m: _spans(weight, kind, slot, told[m]) for m in nearest}
            for source, start, stop in _cover(wanted, sources):
                if rank in (source, target):
                    yield Piece(source, target, slot, new_slot, start, stop)


def _nearest(ranks: Sequence[int], target: int, told: Sequence[Told]) -> list[int]:
    replica = told[target].replica
    return sorted(ranks, key=lambda rank: (rank != target, told[rank].replica != replica, rank))


def _spans(weight: Weight, kind: str, slot: int, told: Told) -> list[Span]:
    """Elements of the weight in a slot that a rank has."""
    number, start = weight.places[slot]
    found = []
    for holding in told.parameters[number]:
        low, high = max(holding.start - start, 0), min(holding.stop - start, weight.numel)
        if holding.kind == kind and low < high:
            found.append((low, high))
    return found


def _cover(wanted: Sequence[Span], sources: Mapping[int, Sequence[Span]]) -> Iterator[tuple[int, int, int]]:
    """Each wanted element from the first source that has it."""
    missing = list(wanted)
    for source, spans in sources.items():
        for start, stop in missing:
            for low, high in spans:
                if max(start, low) < min(stop, high):
                    yield source, max(start, low), min(stop, high)
        missing = _without(missing, spans)
    assert not missing, f"nobody has elements {missing}"


def _without(spans: Sequence[Span], taken: Iterable[Span]) -> list[Span]:
    left = list(spans)
    for low, high in taken:
        left = [(a, b) for start, stop in left for a, b in ((start, min(stop, low)), (max(start, high), stop)) if a < b]
    return left
