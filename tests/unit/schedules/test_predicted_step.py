"""The predicted step: of a schedule with a flush its simulation, of one without a window of the run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.schedules import asynchronous
from paceline.schedules.costs import Costs
from paceline.schedules.families import dualpipev
from paceline.schedules.predicted_step import predicted_step
from paceline.schedules.simulate import simulate
from paceline.schedules.steady import period
from paceline.schedules.stream import UPDATE, Stream
from paceline.schedules.timeline import Span

STREAMS = {
    "two devices": asynchronous.multidirection(2, 4),
    "four devices": asynchronous.multidirection(4, 8),
    "there and back": asynchronous.multidirection(6, 6),
    "one direction": asynchronous.one_direction(4, 4),
    "few micro-batches": asynchronous.one_direction(5, 2),
}


def costs_of(num_stages: int) -> Costs:
    return Costs.uniform(num_stages, 1.0, 2.0, transfer_s=0.25, latency_s=0.125)


def actions(spans: Iterable[Span], rank: int) -> list[tuple[str, int, int]]:
    return [(span.kind, span.micro_batch, span.chunk) for span in spans if span.rank == rank]


def expected(stream: Stream, rank: int, begun: int) -> list[tuple[str, int, int]]:
    """Numbered on from the micro-batches of the oldest step of which any rank runs anything."""
    ran = [[a for a in stream.window(r, begun) if a.kind != UPDATE] for r in range(stream.num_ranks)]
    oldest = max(action.lag for window in ran for action in window)
    return [(a.kind, (oldest - a.lag) * stream.num_micro_batches + a.micro_batch, a.chunk) for a in ran[rank]]


def test_with_a_flush_it_is_the_simulation() -> None:
    schedule, costs = dualpipev(2, 4), costs_of(4)
    whole = simulate(schedule, costs, timeline=True)
    found = predicted_step(schedule, costs, begun=7)
    assert (found.timeline, found.step_s) == (whole.timeline, whole.makespan_s)
    assert found.timeline.stages == ((0, 3), (1, 2))


@pytest.mark.parametrize("begun", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("name", STREAMS)
def test_without_one_it_is_what_every_rank_runs_in_that_step(name: str, begun: int) -> None:
    stream = STREAMS[name]
    costs = costs_of(len(stream.routes[0]))
    found = predicted_step(stream, costs, begun)
    assert found.step_s == period(stream, costs)
    for rank in range(stream.num_ranks):
        assert actions(found.timeline.spans, rank) == expected(stream, rank, begun)
    assert min(span.start_s for span in found.timeline.spans) >= 0
    for sent in found.timeline.transfers:
        maker = ("F" if sent.kind == "activation" else "B", sent.micro_batch, sent.chunk)
        assert maker in actions(found.timeline.spans, sent.source)
        stage = found.timeline.stage(sent.source, sent.chunk)
        step = 1 if sent.kind == "activation" else -1
        assert stage is not None
        assert stream.routes[sent.micro_batch % len(stream.routes)][stage + step] == sent.target


def test_a_window_of_the_steady_state_is_about_as_long_as_a_step() -> None:
    stream = STREAMS["four devices"]
    found = predicted_step(stream, costs_of(4), 50)
    for rank in range(4):
        own = [span for span in found.timeline.spans if span.rank == rank]
        assert max(s.end_s for s in own) - min(s.start_s for s in own) <= found.step_s * 1.01
    assert found.timeline.end_s < 2 * found.step_s
