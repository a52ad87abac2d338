"""Timelines of steps: how often they are written, and what goes into them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.report import step_records
from paceline.runtime.measured_costs import MeasuredCosts
from paceline.runtime.rank_reports import LaneKey, Report
from paceline.runtime.tracer import DRAWN, TimelineWriter, Tracer
from paceline.schedules.families import one_f_one_b
from support.reports import MICRO_BATCHES, ROUTES, STAGES, Run


class Gatherer:
    """Brings the same reports every time, on the first rank."""

    def __init__(self, reports: list[Report]) -> None:
        self.reports, self.times = reports, 0

    def gather(self, after: dict[LaneKey, int]) -> list[Report]:
        self.times += 1
        return self.reports


class Job:
    """Steps of a job."""

    def __init__(self, folder: Path, every: int, *, is_first: bool = True, replicas: int = 1) -> None:
        self.step, self.run = 0, Run()
        reports = [report for replica in range(replicas) for report in self.run.reports(replica)]
        self.gatherer: Any = Gatherer(reports if is_first else [])
        schedule = one_f_one_b(STAGES, MICRO_BATCHES)
        timelines = TimelineWriter(lambda: self.step, lambda: schedule, lambda: self.run.size, lambda: folder)
        self.tracer = Tracer(every, MeasuredCosts(ROUTES), self.gatherer, timelines, is_first=is_first)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.tracer.after_step()


def test_every_so_many_steps_one_is_written_and_all_ranks_take_part(tmp_path: Path) -> None:
    first, other = Job(tmp_path / "first", 3), Job(tmp_path / "other", 3, is_first=False)
    for job in (first, other):
        job.train(7)
        assert job.gatherer.times == 2
    assert [record.step for record in step_records.read(tmp_path / "first")] == [3, 6]
    assert not (tmp_path / "other").exists()


def test_a_record_has_the_measured_step_over_the_predicted_one(tmp_path: Path) -> None:
    job = Job(tmp_path, 1, replicas=2)
    job.train(1)
    (record,) = step_records.read(tmp_path)
    last = job.run.reports()[0].steps[-1]
    assert record.measured_s == pytest.approx(last.ended_s - last.begun_s)
    assert record.predicted_s == pytest.approx(record.measured_s, rel=0.5)
    assert record.measured.num_ranks == record.predicted.num_ranks == STAGES
    for timeline in (record.measured, record.predicted):
        assert sum(span.kind in ("F", "B") for span in timeline.spans) == 2 * STAGES * MICRO_BATCHES


def test_a_step_takes_from_the_first_rank_that_begins_to_the_last_that_ends(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    (*reports, last) = job.gatherer.reports
    steps = [replace(step, begun_s=step.begun_s + 1.0, ended_s=step.ended_s + 1.5) for step in last.steps]
    job.gatherer.reports = [*reports, replace(last, steps=steps)]
    job.train(1)
    (record,) = step_records.read(tmp_path)
    assert record.measured_s == pytest.approx(steps[-1].ended_s - reports[0].steps[-1].begun_s)


def test_a_step_that_was_reported_earlier_keeps_its_number(tmp_path: Path) -> None:
    """A planning may go on beside further steps."""
    job = Job(tmp_path, 1)
    job.train(1)
    job.step = 3
    job.tracer.timelines.write(job.gatherer.reports, job.tracer.costs, 2)
    assert [record.step for record in step_records.read(tmp_path)] == [1, 2]


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "a file"
    taken.write_text("")
    Job(taken, 1).train(1)
    assert [record.getMessage()[:26] for record in caplog.records if record.levelno == logging.WARNING] == [
        "step 1 was not recorded: ["
    ]


def test_what_is_too_large_for_a_picture() -> None:
    def writer(num_micro_batches: int) -> TimelineWriter:
        schedule = one_f_one_b(2, num_micro_batches)
        return TimelineWriter(lambda: 1, lambda: schedule, lambda: 1, Path)

    assert writer(DRAWN // 2).is_drawn
    assert not writer(DRAWN // 2 + 1).is_drawn


def test_reports_of_one_replica_alone_are_written(tmp_path: Path) -> None:
    """The others' steps began at other times; their costs count."""
    job = Job(tmp_path, 1)
    slower = Run(forward_s=(0.02, 0.06, 0.04)).reports(replica=1)
    costs = MeasuredCosts(ROUTES)
    costs.update([*job.gatherer.reports, *slower])
    job.step = 1
    job.tracer.timelines.write([*job.gatherer.reports, *slower], costs)
    (record,) = step_records.read(tmp_path)
    last = job.run.reports()[0].steps[-1]
    assert record.measured_s == pytest.approx(last.ended_s - last.begun_s)
    assert record.predicted_s > record.measured_s
