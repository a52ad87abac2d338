"""Whether a rank has room to compute a micro-batch's activations again before their gradient arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..schedules.lower import RUN_BACKWARD, RUN_BACKWARD_INPUT, RUN_BACKWARD_WEIGHT, RUN_FORWARD, Op

if TYPE_CHECKING:
    from .meter import Meter

Cell: TypeAlias = tuple[int, int]
"""Chunk of this rank, and micro-batch."""

NOTHING: Mapping[int, float] = MappingProxyType({})

RECOMPUTE_EARLY = "PACELINE_RECOMPUTE_EARLY"
"""Variable of the environment; ``0``: all is computed again within backwards."""


class Extent(NamedTuple):
    """Size of a micro-batch, or of the largest of a step."""

    tokens: int
    length: int

    def growth(self, other: Extent) -> float:
        """How many times as much ``other`` keeps at most: some of it grows with the length of each token's context."""
        return other.tokens / self.tokens * max(1.0, other.length / self.length)


class EarlyRoom:
    """Decides in which steps a rank computes activations again while it waits for a gradient.

    All of a stage's are there then at once, not those of one layer. They have room where the micro-batches that are
    alive, and what is left for later, leave as much of the free memory.

    Args:
        room_bytes: what this rank may still take while no micro-batch is alive.
    """

    def __init__(self, meter: Meter, room_bytes: Callable[[], float]) -> None:
        self._meter, self._room_bytes = meter, room_bytes
        self._known: tuple[object, float] = ((), 0.0)
        """Program and measured bytes, and the largest growth that had room."""

    def suffices(self, program: Sequence[Op], most: Extent | None, kept: Collection[Cell] = ()) -> bool:
        """Whether the activations of each micro-batch of a step have room.

        Args:
            program: of the step on this rank.
            most: of its micro-batches.
            kept: micro-batches that keep their activations from the forward on: also while the gradients are made of
                what they keep anyway, such as logits.
        """
        meter, size = self._meter, self._meter.measures_memory_of
        again = {} if size is None else meter.recomputed_bytes.get(size, {})
        if size is None or not again or most is None or meter.times_single_layers:
            return False
        growth = max(1.0, *(extent.growth(most) for extent, _ in again.values()))
        saved, deferred = meter.saved_bytes.get(size, {}), meter.deferred_bytes.get(size, {})
        of_what = (tuple(program), size, dict(again), dict(saved), dict(deferred), kept)
        if self._known[0] == of_what and growth <= self._known[1]:
            return True
        recomputed = {chunk: num_bytes for chunk, (_, num_bytes) in again.items()}
        backwards = {(op.chunk, op.micro_batch) for op in program if op.kind in (RUN_BACKWARD, RUN_BACKWARD_INPUT)}
        late = {chunk for chunk, _ in backwards.difference(kept)}
        need = peak_bytes(program, saved, deferred, kept, recomputed)
        need += max((recomputed.get(chunk, 0.0) for chunk in late), default=0.0)
        need += sum(saved.get(chunk, 0.0) for chunk in {chunk for chunk, _ in kept})
        fits = growth * need <= self._room_bytes()
        if fits:
            self._known = of_what, growth
        return fits


def peak_bytes(
    program: Sequence[Op],
    saved: Mapping[int, float],
    deferred: Mapping[int, float],
    kept: Collection[Cell] = (),
    recomputed: Mapping[int, float] = NOTHING,
) -> float:
    """Most that a rank keeps of micro-batches at a time.

    Args:
        saved: what one that is alive keeps, by chunk.
        deferred: the same between its two backwards, where they are split.
        kept: micro-batches that keep what others recompute.
        recomputed: how much that is, by chunk.
    """
    held = most = 0.0
    for kind, micro_batch, chunk, _ in program:
        live = saved.get(chunk, 0.0)
        later = deferred.get(chunk, live)
        live += recomputed.get(chunk, 0.0) if (chunk, micro_batch) in kept else 0.0
        held += {
            RUN_FORWARD: live, RUN_BACKWARD: -live, RUN_BACKWARD_INPUT: later - live, RUN_BACKWARD_WEIGHT: -later
        }.get(kind, 0.0)  # fmt: skip
        most = max(most, held)
    return most
