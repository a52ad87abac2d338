"""Configurations of steps, which a job can change while it trains, and the seconds of the steps under each."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..messages import plural


@dataclass(frozen=True)
class Running:
    """The configuration of one step.

    Args:
        schedule: its name; a micro-batch size in it is removed.
        micro_batch_size: samples, as the step was cut.
        partition: boundaries over the items (embedding, decoder layers, head).
        moves: how often layers or experts have moved until then.
    """

    schedule: str
    micro_batch_size: int
    partition: tuple[int, ...]
    moves: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", self.schedule.partition(", micro-batch")[0])

    def __str__(self) -> str:
        """A short form: ``1f1b · 5|4|5 · 2 moves``."""
        parts = [self.schedule]
        if len(self.partition) > 2:
            parts.append("|".join(str(end - start) for start, end in pairwise(self.partition)))
        if self.moves:
            parts.append(plural(self.moves, "move"))
        return " · ".join(parts)


@dataclass
class StepLog:
    """The steps since the last report, for its line in ``metrics.jsonl``."""

    _found: list[dict[str, Any]] = field(default_factory=list)
    _last: Running | None = None

    def add(self, step: int, running: Running, seconds: float) -> None:
        """Step number ``step`` is over; it took so long by the host's clock."""
        if not self._found or running != self._last:
            self._last = running
            self._found.append({"step": step, **vars(running), "partition": [*running.partition], "seconds": []})
        self._found[-1]["seconds"].append(round(seconds, 6))

    def take(self) -> list[dict[str, Any]]:
        """Rows of steps that ran alike: the first one's number, how, and the ``seconds`` of each."""
        found, self._found = self._found, []
        return found
