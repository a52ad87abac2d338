"""Activations that have room although they may be computed again: some are kept, the others computed again early."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from math import ceil, log2
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from ..config import ScheduleChoice
from ..planning.strategy_costs import UNEVEN
from ..schedules.keeping import NOTHING, Keeping, Layers, keeping, kept_shares
from ..schedules.lower import RUN_BACKWARD, RUN_BACKWARD_INPUT, RUN_BACKWARD_WEIGHT, RUN_FORWARD, WAIT_GRADIENT, Op
from ..schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action

if TYPE_CHECKING:
    from .meter import Meter

logger = logging.getLogger("paceline")

RECOMPUTE_EARLY = "PACELINE_RECOMPUTE_EARLY"
"""Variable of the environment; ``0``: all is computed again within backwards."""

PLANNED = 0.9
"""Share of the memory that a partition may be planned with that counts for activations which are kept."""

GROWTHS = 4
"""Sizes of a step's largest micro-batch are told apart as far as one needs 2^(1/4) times the memory of another."""

MEASURED_ANEW = 1.5
"""A step whose micro-batches would need so many times as much, and do not have it, measures what they need in fact."""


def keeps_what_has_room(schedule: ScheduleChoice) -> bool:
    """Whether a Hugging Face model keeps activations that may be computed again, where they have room."""
    return os.environ.get(RECOMPUTE_EARLY) != "0" and not schedule.is_asynchronous


_KINDS = {
    RUN_FORWARD: FORWARD,
    RUN_BACKWARD: BACKWARD,
    RUN_BACKWARD_INPUT: BACKWARD_INPUT,
    RUN_BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}


class Extent(NamedTuple):
    """Size of a micro-batch, or of the largest of a step."""

    tokens: int
    length: int

    def growth(self, other: Extent) -> float:
        """How many times as much ``other`` keeps at most: some of it grows with the length of each token's context."""
        return other.tokens / self.tokens * max(1.0, other.length / self.length)


class Recomputed(NamedTuple):
    """Layers of a micro-batch that were computed again, and what they keep then.

    Args:
        extent: of that micro-batch.
        num_bytes: of all layers together.
        layers: how many they are.
    """

    extent: Extent
    num_bytes: float
    layers: int = 1


class EarlyRoom:
    """Decides, step by step, for which activations there is memory.

    Those of a micro-batch that are kept from the forward on need not be computed again. While a rank waits for a
    gradient, it computes again what it has not kept; all of that is there at once then, not one layer after another.
    Nothing depends on it but memory and time, so each rank decides for itself.

    Args:
        room_bytes: what this rank may still take while no micro-batch is alive.
        logs: write a line when something is kept for the first time.
        agree: of ranks whose layers are collective, whether all have room for everything. Nothing is kept otherwise,
            and nothing computed again early, as each would do that at its own time.
    """

    def __init__(
        self,
        meter: Meter,
        room_bytes: Callable[[], float],
        *,
        logs: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._meter, self._room_bytes, self._logs, self._agree = meter, room_bytes, logs, agree
        meter.keeps_all_or_nothing = agree is not None
        self._of_what: object = None
        """Program and measured bytes."""
        self._measured_in: dict[int, Extent] = {}
        """By micro-batch size, sizes of the step that measured, or measures, what micro-batches need."""
        self._known: dict[int, _Decided] = {}
        """Decisions for them, by the size of the largest micro-batch."""

    def choose(self, program: Sequence[Op], most: Extent | None) -> Keeping:
        """Decide what a step keeps: there is room for it also in its largest micro-batches. Collective with ``agree``.

        Args:
            program: of the step on this rank.
            most: of its micro-batches.
        """
        meter, decided = self._meter, self._decide(program, most)
        if self._agree is not None:
            is_whole = self._agree(decided is not None and decided.is_whole)
            if not is_whole and decided is not None:
                decided = _Decided(NOTHING, dict.fromkeys(decided.shares, 0.0), decided.room_bytes)
        if decided is None:
            return NOTHING
        meter.recorder.keeps(decided.shares)
        meter.again_room_bytes = decided.room_bytes
        if self._logs and decided.found.kept:
            self._logs = False
            logger.info(
                "this rank has memory for %.3g %% of the activations that it would compute again, and keeps them "
                "(%s=0 in the environment: it keeps none)",
                *(100 * fmean(decided.shares.values()), RECOMPUTE_EARLY),
            )
        return decided.found

    def _decide(self, program: Sequence[Op], most: Extent | None) -> _Decided | None:
        meter, size = self._meter, self._meter.measures_memory_of
        measured = {} if size is None else meter.recomputed_bytes.get(size, {})
        if size is not None and most is not None and not measured:
            self._measured_in[size] = most
        # Layers of others have checkpoints of their own.
        again = {chunk: each for chunk, each in measured.items() if each.num_bytes}
        if size is None or not again or most is None or meter.times_single_layers:
            return None
        growth = max(each.extent.growth(most) for each in again.values())
        saved, deferred = meter.saved_bytes.get(size, {}), meter.deferred_bytes.get(size, {})
        of_what = (tuple(program), size, again, dict(saved), dict(deferred))
        if self._of_what != of_what:
            self._of_what, self._known = of_what, {}

        def decision(growth: float) -> _Decided:
            growths = ceil(GROWTHS * log2(growth * (UNEVEN if self._agree is not None else 1.0)))
            if growths in self._known:
                return self._known[growths]
            room = self._room_bytes() / 2 ** (growths / GROWTHS)
            layers = {chunk: Layers(each.num_bytes, each.layers) for chunk, each in again.items()}
            actions = [Action(_KINDS[op.kind], op.micro_batch, op.chunk) for op in program if op.kind in _KINDS]
            waits = {op.chunk for op in program if op.kind == WAIT_GRADIENT}
            found = keeping(actions, waits, saved, deferred, layers, room)
            decided = _Decided(found, kept_shares(found, actions, layers), room)
            if found != NOTHING:
                self._known[growths] = decided
            return decided

        decided = decision(max(growth, 1.0))
        if growth < 1.0 and not decided.is_whole:
            return decision(growth)
        if growth >= MEASURED_ANEW and not decided.is_whole:
            # The longest of a step need not be the one with most tokens: steps alike would be measured for ever.
            before = self._measured_in.get(size)
            if before is not None and before.growth(most) < MEASURED_ANEW:
                return decided
            self._measured_in[size] = most
            meter.forget_memory(size)
            return None
        return decided


class _Decided(NamedTuple):
    found: Keeping
    shares: dict[int, float]
    """By chunk."""
    room_bytes: float

    @property
    def is_whole(self) -> bool:
        """Whether everything is kept."""
        return set(self.shares.values()) == {1.0}
