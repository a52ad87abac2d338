"""The step that a run is about to make, as it is predicted: when everything runs, and the seconds it takes.

Where steps run into each other a step of a rank is a *window*: the forwards of one step, and what lags of those before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from .costs import Costs
from .schedule import BACKWARD, FORWARD, Schedule
from .simulate import simulate
from .steady import period
from .stream import UPDATE, Stream
from .timeline import Span, Timeline, Transfer

_SETTLED = 3
"""Windows after those that lack what would lag behind nothing, until a run has found its rhythm."""

_MAKER = {"activation": FORWARD, "gradient": BACKWARD}
_Event = TypeVar("_Event", Span, Transfer)


@dataclass(frozen=True)
class PredictedStep:
    """A step of a run.

    Args:
        timeline: micro-batches are numbered on from those of the oldest step of which anything runs.
        step_s: seconds of the step; without a flush, of one in the steady state.
    """

    timeline: Timeline
    step_s: float


def predicted_step(order: Schedule | Stream, costs: Costs, begun: int = 0) -> PredictedStep:
    """Simulate a step.

    Args:
        costs: one value a stage of one direction.
        begun: steps before it since the start of the run, or the last drain; with a flush it does not matter.

    Raises:
        ValueError: costs and schedule do not fit.
    """
    if isinstance(order, Schedule):
        whole = simulate(order, costs, timeline=True)
        assert whole.timeline is not None
        return PredictedStep(whole.timeline, whole.makespan_s)
    return PredictedStep(_window(order, costs, min(begun, order.most_lag + _SETTLED)), period(order, costs))


def _window(stream: Stream, costs: Costs, begun: int) -> Timeline:
    """A window of the beginning of a run, which goes on behind it."""
    run = simulate(stream.unrolled(begun + stream.most_lag + 2), costs.without_ahead(), timeline=True).timeline
    assert run is not None
    by_rank: list[list[Span]] = [[] for _ in range(stream.num_ranks)]
    for span in run.spans:
        if span.micro_batch >= 0:
            by_rank[span.rank].append(span)
    found, begins_s = [], []
    for rank, spans in enumerate(by_rank):
        counts = [sum(a.kind != UPDATE for a in stream.window(rank, step)) for step in range(begun + 1)]
        first, end = [0, *accumulate(counts)][-2:]
        begins_s.append(spans[first - 1].end_s if first else 0.0)
        found += spans[first:end]
    zero, until = min(begins_s), max(span.end_s for span in found)
    oldest = min(span.micro_batch for span in found)
    number = oldest - oldest % stream.num_micro_batches

    def shifted(event: _Event) -> _Event:
        return event._replace(
            micro_batch=event.micro_batch - number, start_s=event.start_s - zero, end_s=event.end_s - zero
        )

    made = {(span.rank, span.kind, span.micro_batch, span.chunk) for span in found}
    sent = [
        shifted(transfer)
        for transfer in run.transfers
        if transfer.end_s <= until
        and (transfer.source, _MAKER[transfer.kind], transfer.micro_batch, transfer.chunk) in made
    ]
    return Timeline(stream.num_ranks, tuple(map(shifted, found)), tuple(sent), stream.name, run.stages)
