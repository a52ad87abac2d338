"""Agreement of a pipeline's stages on moves of their experts.

Each stage decides about its own experts. What it saves shortens the step only as far as the other stages let it, so
they tell each other how long they compute; and the first rank of the job gets all decisions, for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..comm.control import ControlPlane
from ..planning.rebalance import step_saved_s
from ..planning.tuning import DecisionLog, DecisionRecord

FIRST_LOOK = 10
"""Steps until the first look, if there are to be more between looks."""

KEPT = 1024
"""Decisions that are kept."""


@dataclass
class Looks:
    """When to look: every so many steps, and the first time soon.

    Args:
        every: steps between looks; 0: never.
    """

    every: int
    step: int = 0
    last: int = 0
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = min(self.every, FIRST_LOOK)

    def after_step(self) -> int:
        """Count a step. Steps since the last look, if now is the time for another; else 0."""
        self.step += 1
        if not self.every or self.step < self.next:
            return 0
        steps = self.step - self.last
        self.last, self.next = self.step, self.step + self.every
        return steps

    def go_on(self, step: int) -> None:
        """Count from ``step``: of a run that goes on."""
        self.step = self.last = step
        self.next = step + min(self.every, FIRST_LOOK)


@dataclass
class Stages:
    """The stages of a pipeline of which this rank has one. All ranks of the job call both methods at each look.

    Args:
        stage: of this rank.
        num_stages: more than one.
        computed_s: seconds that this rank computed in the step that ends now.
        num_micro_batches: of a step.
    """

    stage: int
    num_stages: int
    control: ControlPlane
    computed_s: Callable[[], float]
    num_micro_batches: Callable[[], int]

    def step_saved_s(self, saved_s: float, pays: bool) -> float:
        """By how much the step becomes shorter if this stage saves what it can.

        Args:
            saved_s: of the stage's computing; on the stage's first rank, on others 0.
            pays: whether the stage would move if all of that counted; else the others cannot build on it.
        """
        told = self.control.gather((self.stage, self.computed_s(), saved_s, pays))
        busy, saved = [0.0] * self.num_stages, [0.0] * self.num_stages
        for stage, computed, could_save, would in told:
            busy[stage] = max(busy[stage], computed)
            if would or stage == self.stage:
                saved[stage] = max(saved[stage], could_save)
        return step_saved_s(busy, saved, self.stage, self.num_micro_batches())

    def records(self, own: Sequence[DecisionRecord]) -> list[DecisionRecord]:
        """Gather the decisions of all stages, in their order, on the first rank of the job; nothing elsewhere.

        Args:
            own: of this stage, on its first rank.
        """
        found = self.control.gather_at_first([record.of_stage(self.stage) for record in own])
        return sorted((record for told in found for record in told), key=lambda record: record.stage)


class Bystander:
    """A stage none of whose experts can move, which takes part when the others look at theirs.

    Args:
        decided: gets the decisions of all stages.
    """

    def __init__(self, every: int, stages: Stages, decided: DecisionLog) -> None:
        self.looks, self.stages, self.decided = Looks(every), stages, decided

    def after_step(self) -> None:
        """Once after every step of the optimizer. Collective over the job."""
        if self.looks.after_step():
            self.stages.step_saved_s(0.0, False)
            self.decided.add(self.stages.records([]))

    def go_on(self, step: int) -> None:
        """Count from ``step``: of a run that goes on."""
        self.looks.go_on(step)
