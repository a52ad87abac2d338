"""How long the steps of one pipeline took, and the part of them in which its schedule ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..measure.recorder import COMPUTED
from .rank_reports import WAIT, Report, clocks_of

OF_SCHEDULE = frozenset((*COMPUTED, WAIT))
"""Kinds of what ranks do while the schedule runs."""


class StepSpan(NamedTuple):
    """Seconds of a step.

    Args:
        schedule_s: from the first computation or wait of any rank to the last one.
        whole_s: from its beginning on the first rank to its end on the last.
    """

    schedule_s: float
    whole_s: float


def step_spans(pipe: Sequence[Report]) -> list[StepSpan]:
    """The last steps, oldest first.

    Args:
        pipe: reports of one pipeline, in the order of the devices.
    """
    clocks, found = clocks_of(pipe), []
    for index in range(min(len(report.steps) for report in pipe)):
        steps = [(report.steps[index], clock) for report, clock in zip(pipe, clocks, strict=True)]
        spans = [(span.start - c, span.end - c) for s, c in steps for span in s.spans if span.kind in OF_SCHEDULE]
        whole = max(s.ended_s - c for s, c in steps) - min(s.begun_s - c for s, c in steps)
        if spans:
            found.append(StepSpan(max(end for _, end in spans) - min(start for start, _ in spans), whole))
    return found
