"""Ranges of experts' weights that ranks hold and want when a layer changes its placement.

A weight of an expert is numbered from its own first element, wherever it lies; each rank has runs of these elements of
one kind (value, master, an optimizer's state). :mod:`..state.exchange` plans from them who sends what to whom.

Legend: M ranks that have the layer, R ranks of an expert-parallel group; a rank below is one of the M.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..planning.experts import Placement
from ..state.exchange import Held, Span, Wanted, without
from ..state.named import MASTER, VALUE


class Holding(NamedTuple):
    """A run of elements of a flattened parameter that a rank has."""

    kind: str
    dtype: torch.dtype
    start: int
    stop: int


class Told(NamedTuple):
    """Holdings of a rank in a layer, as it tells the others.

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


class Part(NamedTuple):
    """One kind of one weight, which moves independently of every other part.

    Args:
        weight: its number.
        most_bytes: more than this no rank sends or receives.
    """

    weight: int
    kind: str
    most_bytes: int


class Route(NamedTuple):
    """The device and slot that own an expert, and those that are to."""

    expert: str
    device: int
    slot: int
    new_device: int
    new_slot: int


def routes(old: Placement, new: Placement) -> list[Route]:
    """List the experts that change their slots. Copies do not count."""
    before, after = _owned_slots(old), _owned_slots(new)
    moving = [expert for expert in sorted(before) if before[expert] != after[expert]]
    return [Route(str(expert), *before[expert], *after[expert]) for expert in moving]


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
    """List all that may move of a layer, in an order which is the same on all ranks."""
    arriving = Counter(route.new_device for route in routes)
    most = max(arriving.values(), default=0)
    found = []
    for number, weight in enumerate(weights):
        sizes = {
            holding.kind: holding.dtype.itemsize for entry in told for holding in entry.parameters[weight.places[0][0]]
        }
        for kind, itemsize in sorted(sizes.items()):
            found.append(Part(number, kind, most * weight.numel * itemsize))
    return found


def holdings(
    weight: Weight, kind: str, routes: Sequence[Route], told: Sequence[Told], rank: int, *, makes_values: bool = True
) -> tuple[list[list[Held]], list[list[Wanted]]]:
    """List which elements of one kind of a weight each rank has and is to have, of those that concern ``rank``.

    Args:
        makes_values: a rank makes values from the masters that it is to have, and does not want these.
    """
    members: dict[int, list[int]] = {}
    for number, entry in enumerate(told):
        members.setdefault(entry.device, []).append(number)
    own = told[rank].device
    held: list[list[Held]] = [[] for _ in told]
    wanted: list[list[Wanted]] = [[] for _ in told]
    for expert, device, slot, new_device, new_slot in routes:
        if own not in (device, new_device):
            continue
        for source in members[device]:
            having = spans(weight, kind, slot, told[source])
            held[source] += [Held(expert, kind, *span, dtype) for dtype, span in having]
        for target in members[new_device] if own == device else [rank]:
            missing = [span for _, span in spans(weight, kind, new_slot, told[target])]
            if kind == VALUE and makes_values:
                missing = without(missing, [span for _, span in spans(weight, MASTER, new_slot, told[target])])
            wanted[target] += [Wanted(expert, *span, kind) for span in missing]
    return held, wanted


def spans(weight: Weight, kind: str, slot: int, told: Told) -> Iterator[tuple[torch.dtype, Span]]:
    """Elements of the weight in a slot that a rank has, with their type."""
    number, start = weight.places[slot]
    for holding in told.parameters[number]:
        low, high = max(holding.start - start, 0), min(holding.stop - start, weight.numel)
        if holding.kind == kind and low < high:
            yield holding.dtype, (low, high)
