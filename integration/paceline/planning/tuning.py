"""Values of the tuning loop: when it plans anew, changes that are proposed, and the record of its decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from .switching import Decision

SCHEDULE, PARTITION, EXPERTS, SHARES = "schedule", "partition", "experts", "shares"
"""Subjects of decisions."""

KEPT = 1024
"""Decisions, and measurements, that are kept until somebody takes them."""

Change = TypeVar("Change")
Outcome = TypeVar("Outcome")


@dataclass
class TuningInterval:
    """Steps from one planning to the next.

    Args:
        every: steps between plannings; 0: there is none.
        first: steps until the first.
    """

    every: int
    first: int = 0
    last: int = 0
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.first

    def steps_if_due(self, done: int) -> int | None:
        """Steps since the last planning, if it is time for another after ``done`` steps, which begins an interval."""
        if not self.every or done < self.next:
            return None
        steps = done - self.last
        self.last, self.next = done, done + self.every
        return steps

    def go_on(self, done: int) -> None:
        """Count from ``done`` steps: the run was resumed there."""
        self.last, self.next = done, done + self.first


@dataclass(frozen=True)
class DecisionRecord:
    """One decision, taken or not, with its numbers.

    Args:
        what: :data:`SCHEDULE`, :data:`PARTITION`, :data:`EXPERTS` or :data:`SHARES`.
        step: steps that were done.
        switched: whether something changed.
        predicted_best_s: seconds of a step (of experts in it) with the best option; ``decision`` may count less.
        figures: of this kind of decision, in a form for JSON.
        stage: whose experts they are, in a pipeline.
    """

    what: str
    step: int
    switched: bool
    decision: Decision
    predicted_best_s: float
    figures: Mapping[str, Any]
    stage: int | None = None

    def of_stage(self, stage: int) -> DecisionRecord:
        """Record the stage that decided."""
        return replace(self, stage=stage)

    def to_json(self) -> dict[str, Any]:
        """The record as it is in a run's files."""
        decision = self.decision
        return {
            "what": self.what,
            "step": self.step,
            "switched": self.switched,
            "why": decision.why,
            "predicted_now_s": decision.now_s,
            "predicted_best_s": self.predicted_best_s,
            "switch_s": decision.switch_s,
            **self.figures,
            **({} if self.stage is None else {"stage": self.stage}),
        }


@dataclass(frozen=True)
class Proposal(Generic[Change, Outcome]):
    """A decision of an actuator before it is carried out, on the rank that decides.

    Args:
        change: to apply on all ranks; None: nothing changes.
        record: makes the record once it is known what became of the change (None where there was none).
    """

    change: Change | None
    record: Callable[[Outcome | None], DecisionRecord]


@dataclass
class DecisionLog:
    """The record of a run's decisions and of the measurements behind them, on its first rank; the last :data:`KEPT`.

    Attributes:
        num_moves: of layers and experts, so far.
    """

    num_moves: int = 0
    _decisions: list[DecisionRecord] = field(default_factory=list)
    _measurements: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, records: Sequence[DecisionRecord]) -> None:
        self._decisions = [*self._decisions, *records][-KEPT:]
        self.num_moves += sum(record.switched and record.what not in (SCHEDULE, SHARES) for record in records)

    def add_measurement(self, measured: Mapping[str, Any]) -> None:
        """Keep what was measured of stages and links at a planning, in a form for JSON."""
        self._measurements = [*self._measurements, measured][-KEPT:]

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Decisions since they were taken last, in a form for JSON."""
        return [record.to_json() for record in self._decisions]

    def take_decisions(self) -> list[dict[str, Any]]:
        """:attr:`decisions`, once."""
        found, self._decisions = self.decisions, []
        return found

    def take_measurements(self) -> list[Mapping[str, Any]]:
        """Measurements since they were taken last."""
        found, self._measurements = self._measurements, []
        return found
