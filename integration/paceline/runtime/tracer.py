"""Every so many steps: the timeline of the step that was, over the one that was predicted, into the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report.step_records import StepRecord, write
from ..schedules.simulate import simulate
from .measured_costs import Knowledge
from .rank_reports import Report, gather_reports, timeline

logger = logging.getLogger("paceline")

DRAWN = 4096
"""Stages times micro-batches up to which steps are recorded that nobody asked for: more take long, and no picture."""


def is_drawn(engine: Any) -> bool:
    """Whether a step is small enough for a picture."""
    return bool(engine.num_stages * engine.run_micro_batches <= DRAWN)


@dataclass
class Tracer:
    """Records steps of one engine, those of its first replica. Every rank has one.

    Args:
        every: steps from one record to the next.
    """

    engine: Any
    every: int
    _knowledge: Knowledge = field(init=False)
    _after: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._knowledge = Knowledge(self.engine.num_stages)

    def after_step(self) -> None:
        """Record the step that has just ended, if it is time to. Collective."""
        step = self.engine.global_steps
        if step % self.every:
            return
        reports = gather_reports(self.engine, self._after)
        if self.engine.global_rank != 0:
            return
        self._knowledge.update(reports)
        record_step(self.engine, reports, self._knowledge)


def record_step(engine: Any, reports: Sequence[Report], knowledge: Knowledge) -> None:
    """Write the last step, which ran as the next one is to, into the folder of the run. For the first rank.

    Args:
        reports: of all ranks, of steps up to this one.
        knowledge: that has taken them in.
    """
    step, schedule = engine.global_steps, engine.schedule
    pipe = sorted((report for report in reports if report.replica == 0), key=lambda report: report.stage)
    predicted = simulate(schedule, knowledge.costs(engine.cut), timeline=True)
    times = [report.steps[-1] for report in pipe]
    record = StepRecord(
        step=step,
        schedule=schedule.name,
        predicted=predicted.timeline,
        measured=timeline(pipe),
        predicted_s=predicted.makespan_s,
        measured_s=max(time.ended_s - time.begun_s for time in times),
    )
    try:
        write(engine.run_dir, record)
    except OSError as error:  # the run matters more
        logger.warning("step %d was not recorded: %s", step, error)
