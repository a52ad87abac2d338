"""Timelines of steps that ran, each over the one that was predicted, in the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..report.step_records import StepRecord, write
from ..schedules.predicted_step import predicted_step
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from .measured_costs import MeasuredCosts
from .rank_reports import LaneKey, Report, ReportGatherer, clocks_of, timeline

logger = logging.getLogger("paceline")

DRAWN = 4096
"""Stages times micro-batches up to which steps are recorded that nobody asked for: more take long, and no picture."""


@dataclass
class TimelineWriter:
    """Writes timelines of steps. One on every rank; the first one is asked to write.

    Args:
        step: number of steps done.
        order: of the last step, and of the next.
        micro_batch_size: likewise.
        folder: of the run.
        begun: steps before the last one since the start or the last drain, where steps run into each other.
        records_switches: whether the controller has steps around a switch written.
    """

    step: Callable[[], int]
    order: Callable[[], Schedule | Stream]
    micro_batch_size: Callable[[], int]
    folder: Callable[[], Path]
    begun: Callable[[], int] = lambda: 0
    records_switches: bool = False

    @property
    def is_drawn(self) -> bool:
        """Whether a step is small enough for a picture."""
        order = self.order()
        num_stages = order.num_stages if isinstance(order, Schedule) else len(order.routes[0])
        return num_stages * order.num_micro_batches <= DRAWN

    def write(self, reports: Sequence[Report], costs: MeasuredCosts, step: int | None = None) -> None:
        """Write the last reported step of the first replica, which ran as the next one is to.

        Args:
            reports: of all ranks.
            costs: updated by them.
            step: number of that step; None: it is the last one that is done.
        """
        order, step = self.order(), self.step() if step is None else step
        pipe = sorted((report for report in reports if report.replica == 0), key=lambda report: report.device)
        size = self.micro_batch_size()
        # Nothing was measured of a size of which no step has run whole.
        predicted = predicted_step(order, costs.costs(size), self.begun()) if size in costs.sizes() else None
        times = [(report.steps[-1], clock) for report, clock in zip(pipe, clocks_of(pipe), strict=True)]
        record = StepRecord(
            step=step,
            schedule=order.name,
            predicted=None if predicted is None else predicted.timeline,
            measured=timeline(pipe, costs.routes, order.num_micro_batches),
            predicted_s=None if predicted is None else predicted.step_s,
            measured_s=max(time.ended_s - clock for time, clock in times)
            - min(time.begun_s - clock for time, clock in times),
        )
        try:
            write(self.folder(), record)
        except OSError as error:  # the run matters more
            logger.warning("step %d was not recorded: %s", step, error)


@dataclass
class Tracer:
    """Writes the timeline of every so many steps. Every rank has one.

    Args:
        every: steps from one record to the next.
        costs: of the pipeline's steps; they are measured here.
        is_first: whether this rank writes.
    """

    every: int
    costs: MeasuredCosts
    reports: ReportGatherer
    timelines: TimelineWriter
    is_first: bool
    _after: dict[LaneKey, int] = field(default_factory=dict)

    def after_step(self) -> None:
        """Record the step that has just ended, if it is time to. Collective."""
        if self.timelines.step() % self.every:
            return
        reports = self.reports.gather(self._after)
        if self.is_first:
            self.costs.update(reports)
            self.timelines.write(reports, self.costs)
