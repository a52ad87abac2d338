"""Activations of micro-batches that a rank keeps although they may be computed again, as memory allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import NamedTuple, TypeAlias

from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action

Cell: TypeAlias = tuple[int, int]
"""Chunk of a rank, and micro-batch."""

CLOSE = 1e-9
"""Share of a layer that is a rounding error."""

_BACKWARDS = (BACKWARD, BACKWARD_INPUT)


class Keeping(NamedTuple):
    """How activations are dealt with in a step.

    Args:
        is_early: those that are computed again are so before the gradient of their micro-batch is there.
        kept: of micro-batches, the first layers that keep theirs from the forward on, so many.
    """

    is_early: bool
    kept: Mapping[Cell, int]


NOTHING = Keeping(False, {})


class Layers(NamedTuple):
    """Layers of a chunk that may be recomputed.

    Args:
        num_bytes: what all of them keep of a micro-batch if they are not.
        number: how many they are.
    """

    num_bytes: float
    number: int


def keeping(
    actions: Sequence[Action],
    waits: Collection[int],
    saved: Mapping[int, float],
    deferred: Mapping[int, float],
    again: Mapping[int, Layers],
    room_bytes: float,
) -> Keeping:
    """As many activations as there is room for at every moment of a step.

    Of those that are alive when there is too little, the ones are given up whose backward comes last.

    Args:
        actions: of a rank.
        waits: chunks whose gradients come from another rank.
        saved: bytes that a live micro-batch keeps with all layers recomputed, by chunk.
        deferred: the same between its two backwards, where they are split.
        again: by chunk, what it keeps where they are not, or no longer, to be recomputed.
    """
    kept = _kept(actions, saved, deferred, again, room_bytes, waits)
    if kept is not None:
        return Keeping(bool(waits) or bool(kept), kept)
    kept = _kept(actions, saved, deferred, again, room_bytes, ())
    return Keeping(False, kept) if kept else NOTHING


def kept_shares(found: Keeping, actions: Sequence[Action], again: Mapping[int, Layers]) -> dict[int, float]:
    """By chunk, the share of the activations of its micro-batches that is kept."""
    numbers = Counter(chunk for kind, _, chunk in actions if kind == FORWARD)
    layers = Counter[int]()
    for (chunk, _), count in found.kept.items():
        layers[chunk] += count
    return {chunk: layers[chunk] / (each.number * numbers[chunk]) for chunk, each in again.items()}


def _kept(
    actions: Sequence[Action],
    saved: Mapping[int, float],
    deferred: Mapping[int, float],
    again: Mapping[int, Layers],
    room_bytes: float,
    early: Collection[int],
) -> dict[Cell, int] | None:
    """By micro-batch, the layers that keep their activations, of which there are some.

    Args:
        early: chunks whose other layers are all computed again before a backward. None is returned where these have no
            room.
    """
    ends = {(chunk, number): place for place, (kind, number, chunk) in enumerate(actions) if kind in _BACKWARDS}
    layer_bytes = {chunk: each.num_bytes / each.number for chunk, each in again.items()}
    kept: dict[Cell, int] = {}
    alive: list[Cell] = []
    held = 0.0
    """Bytes of all that is alive."""

    def own_bytes(cell: Cell) -> float:
        return kept.get(cell, 0) * layer_bytes.get(cell[0], 0.0)

    def more_bytes(cell: Cell) -> float:
        """Beside what is alive, while a backward runs."""
        chunk = cell[0]
        if chunk not in again:
            return 0.0
        left = again[chunk].number - kept.get(cell, 0)
        # Gradients of what is saved anyway, such as logits, are there before any layer is done.
        gradients = saved.get(chunk, 0.0) if kept.get(cell) else 0.0
        return gradients + layer_bytes[chunk] * (left if chunk in early else min(left, 1))

    for kind, number, chunk in actions:
        cell, live = (chunk, number), saved.get(chunk, 0.0)
        later = deferred.get(chunk, live)
        is_backward = kind in _BACKWARDS
        if kind == FORWARD:
            alive.append(cell)
            if chunk in again and cell in ends:
                kept[cell] = again[chunk].number
            held += live + own_bytes(cell)
        while (over := held + (more_bytes(cell) if is_backward else 0.0) - room_bytes) > 0:
            last = max(filter(own_bytes, alive), key=ends.__getitem__, default=None)
            if last is None:
                if is_backward and chunk in early and chunk in again:
                    return None
                break
            each = layer_bytes[last[0]]
            given = min(kept[last], max(1, ceil(over / each - CLOSE)))
            kept[last] -= given
            held -= given * each
        if is_backward:
            alive.remove(cell)
            held -= live + own_bytes(cell)
            held += later if kind == BACKWARD_INPUT else 0.0
        elif kind == BACKWARD_WEIGHT:
            held -= later
    return {cell: layers for cell, layers in kept.items() if layers}
