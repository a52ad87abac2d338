"""The one loop: measure, predict, choose, switch.

At the end of each tuning interval all ranks bring together what they measured, the first rank decides, and all of them
apply its decision before the same step: the next one, or one later where deciding takes long, or a part of the change
can be made beside a step. The things that change are actuators: a pipeline's schedule, its partition, and the placement
of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ..planning.tuning import DecisionLog, DecisionRecord, Proposal, TuningInterval

Value = TypeVar("Value")


class Actuator(Protocol):
    """Something that can change between two steps. All ranks of the :class:`Agreement` have one and call it alike."""

    def propose(self, steps: int) -> Proposal[Any, Any] | None:
        """Find the best option and decide whether it pays. Collective.

        An actuator may count on the proposals of those before it in the same planning.

        Args:
            steps: since the last proposal.

        Returns:
            On the rank that decides, if there was something to decide.
        """

    def apply(self, change: Any) -> Any:
        """Make a change that the first rank proposed, before the next step. Collective.

        Returns:
            What became of it, for the record.
        """


@runtime_checkable
class PlansAside(Protocol):
    """An actuator that can find its best option beside a step."""

    def begin(self, steps: int) -> bool:
        """Begin to do so, for :meth:`Actuator.propose` to take what was found one step later.

        Returns:
            False: nothing was begun, and the proposal can be made at once; the same on all ranks.
        """


@runtime_checkable
class Prepares(Protocol):
    """An actuator that can do a part of a change beside steps."""

    def prepare(self, change: Any) -> bool:
        """Begin to do so. Collective over all ranks of the job that plan now.

        Args:
            change: None: nothing changes here, though it may on ranks of other agreements.

        Returns:
            Whether changes are to wait until :meth:`is_prepared`; the same on all these ranks.
        """

    def is_prepared(self) -> bool:
        """Whether that is done. Asked after each step, collective over the same ranks."""

    def forget_prepared(self) -> None:
        """Let go of what was prepared: the change does not come. On the same ranks."""


@runtime_checkable
class FollowsSteps(Protocol):
    """An actuator of something that is made for a number of micro-batches."""

    def run_again(self) -> None:
        """Run it with the number that a step has now. Collective."""


class Decided(NamedTuple):
    """Proposals of one planning and the changes agreed on, of each actuator that took part."""

    actuators: Sequence[Actuator]
    proposals: Sequence[Proposal[Any, Any] | None]
    changes: Sequence[Any]


class Measurements(Protocol):
    """Measurements that proposals are built on."""

    def end_step(self, done: int) -> None:
        """A step has ended, ``done`` in all."""

    def is_complete(self, done: int) -> bool:
        """Say whether there is enough for a first planning. Collective."""

    def gather(self) -> None:
        """Bring together what the ranks measured since the last time. Collective."""

    def before_switch(self, *, switches: bool) -> None:
        """Proposals were made and agreed on; nothing has changed yet."""

    def begin_step(self, done: int, until_planning: int | None) -> None:
        """A step begins after ``done`` others, and the next planning comes in ``until_planning`` steps, if ever."""


class Agreement(Protocol):
    """The ranks that decide together."""

    @property
    def decides(self) -> bool:
        """Whether this rank is the one that decides."""

    def from_first(self, value: Value) -> Value:
        """The deciding rank's value, on all. Collective."""

    def tell_failure(self, error: Exception) -> None:
        """A proposal failed on this rank. Of the one that decides, have :meth:`from_first` raise on those that wait."""

    def records(self, own: Sequence[DecisionRecord]) -> Sequence[DecisionRecord]:
        """Gather the records of all who decide in this job on its first rank. Collective."""


class Changes(Protocol):
    """Notices that steps have become shorter or longer."""

    def step_took(self, seconds: float, size: float) -> None:
        """A step of ``size`` tokens, or samples, is over, which took so long on this rank's host."""

    def planned(self, *, switched: bool) -> None:
        """A planning is over."""

    def planning_by(self, done: int, next_planning: int) -> int | None:
        """When all actuators are to plan, after ``done`` steps, if steps have changed. The same on all ranks."""


class Controller:
    """Runs the loop. Every rank has one, and calls :meth:`before_step` or :meth:`after_step` at each step.

    Args:
        actuators: each with the interval between its plannings, in the order in which they propose and are applied.
        log: gets the decisions.
        settle: called on all ranks of the job that plan now, with whether the agreement's are about to change
            something: finishes steps under way where any are.
        changes: after which planning comes soon; None: it comes at the ends of intervals only.
    """

    def __init__(
        self,
        measurements: Measurements,
        actuators: Mapping[Actuator, TuningInterval],
        agreement: Agreement,
        log: DecisionLog,
        settle: Callable[[bool], None] = lambda switches: None,
        changes: Changes | None = None,
    ) -> None:
        self._changes = changes
        self.measurements, self.log, self._settle = measurements, log, settle
        self._actuators, self._agreement = actuators, agreement
        self._begun: dict[Actuator, int] = {}
        """Actuators of a planning that goes on beside a step, and their steps since the last."""
        self._prepared: Decided | None = None
        """Decisions that take effect after the steps beside which they are prepared."""
        self._done = 0
        """Steps."""
        self._begin_step()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """See :attr:`~paceline.planning.tuning.DecisionLog.decisions`."""
        return self.log.decisions

    def before_step(self) -> None:
        """Plan anew and switch, if it is time to. Collective.

        Raises:
            RuntimeError: a rank was lost.
        """
        self._between_steps()
        self._done += 1

    def after_step(self) -> None:
        """As :meth:`before_step`, where no call comes before the first step."""
        self._done += 1
        self._between_steps()

    def step_took(self, seconds: float, size: float) -> None:
        """A step of ``size`` tokens, or samples, is over, which took so long on this rank's host."""
        if self._changes is not None:
            self._changes.step_took(seconds, size)

    def go_on(self, done: int) -> None:
        """Count from ``done`` steps: the run was resumed there."""
        self._done = done
        self._drop_decisions()
        for interval in self._actuators.values():
            interval.go_on(done)
        self._begin_step()

    def step_has_changed(self) -> None:
        """Drop decisions that have not taken effect: a step has another number of micro-batches. On all ranks."""
        self._drop_decisions()
        for actuator in self._actuators:
            if isinstance(actuator, FollowsSteps):
                actuator.run_again()

    def _drop_decisions(self) -> None:
        """Forget decisions that have not taken effect, with what was prepared for them."""
        prepared, self._prepared, self._begun = self._prepared, None, {}
        for actuator in () if prepared is None else prepared.actuators:
            if isinstance(actuator, Prepares):
                actuator.forget_prepared()

    def _between_steps(self) -> None:
        self.measurements.end_step(self._done)
        if (prepared := self._prepared) is not None:
            if not all(self._is_prepared(actuator) for actuator in prepared.actuators):
                self._begin_step()
                return
            self._prepared = None
            self._carry_out(prepared)
        if begun := self._begun:
            self._begun = {}
            self._decide(begun)
        if self._changes is not None:
            soonest = min(interval.next for interval in self._actuators.values())
            planning = self._changes.planning_by(self._done, soonest)
            if planning is not None:
                for interval in self._actuators.values():
                    interval.next = planning
        if self.measurements.is_complete(self._done):
            planned = {a: interval.steps_if_due(self._done) for a, interval in self._actuators.items()}
            if due := {actuator: steps for actuator, steps in planned.items() if steps is not None}:
                self._plan(due)
        self._begin_step()

    def _begin_step(self) -> None:
        ahead = [interval.next - self._done for interval in self._actuators.values() if interval.every]
        self.measurements.begin_step(self._done, min(ahead, default=None))

    def _plan(self, due: dict[Actuator, int]) -> None:
        self.measurements.gather()
        begun = [actuator.begin(steps) for actuator, steps in due.items() if isinstance(actuator, PlansAside)]
        if any(begun):
            self._begun = due
        else:
            self._decide(due)

    def _decide(self, due: Mapping[Actuator, int]) -> None:
        try:
            proposals = [actuator.propose(steps) for actuator, steps in due.items()]
        except Exception as error:
            self._agreement.tell_failure(error)
            raise
        changes = self._agreement.from_first([None if p is None else p.change for p in proposals])
        decided = Decided(tuple(due), proposals, changes)
        waits = [self._prepare(actuator, change) for actuator, change in zip(due, changes, strict=True)]
        if any(waits):
            self._prepared = decided
        else:
            self._carry_out(decided)

    @staticmethod
    def _prepare(actuator: Actuator, change: Any) -> bool:
        return isinstance(actuator, Prepares) and actuator.prepare(change)

    @staticmethod
    def _is_prepared(actuator: Actuator) -> bool:
        return not isinstance(actuator, Prepares) or actuator.is_prepared()

    def _carry_out(self, decided: Decided) -> None:
        actuators, proposals, changes = decided
        switches = any(change is not None for change in changes)
        self.measurements.before_switch(switches=switches)
        self._settle(switches)
        outcomes = [
            None if change is None else actuator.apply(change)
            for actuator, change in zip(actuators, changes, strict=True)
        ]
        own = [p.record(outcome) for p, outcome in zip(proposals, outcomes, strict=True) if p is not None]
        self.log.add(self._agreement.records(own))
        if self._changes is not None:
            self._changes.planned(switched=switches)
