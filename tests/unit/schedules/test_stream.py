"""Streams: start, run, drain and the versions of weights, on small ones that are written out by hand."""

from __future__ import annotations

import pytest

from paceline.schedules.asynchronous import multidirection, one_direction
from paceline.schedules.schedule import Schedule, backward, forward
from paceline.schedules.stream import Stream, StreamAction, Versioned
from paceline.schedules.text import to_text


def stream_of(*rows, num_micro_batches):
    """From text, a quote for each step of lag: ``F0 B1' U'``."""

    def action(word):
        lag = word.count("'")
        word = word.rstrip("'")
        return StreamAction("U", -1, -1, lag) if word == "U" else StreamAction(word[0], int(word[1:]), 0, lag)

    windows = tuple(tuple(map(action, row.split())) for row in rows)
    return Stream(windows, num_micro_batches, name="by hand", routes=(tuple(range(len(rows))),))


TWO_STAGES = stream_of("F0 B1' U' F1 B0", "F0 B0 U' F1 B1", num_micro_batches=2)
# The first stage runs five forwards ahead of its backwards, which is more than two steps of two.
DEEP = stream_of("F0 B1''' U''' F1 B0''", num_micro_batches=2)


def text(stream, rank, num_steps, flushes=()):
    """All actions of a rank, each with the number of its step: ``F0/1``."""
    rows = stream.actions(rank, num_steps, flushes)
    return " ".join(f"{str(action).rstrip(chr(39))}/{step}" for step, action in rows)


def test_actions_show_their_lag():
    assert " ".join(map(str, TWO_STAGES.windows[0])) == "F0 B1' U' F1 B0"
    assert str(StreamAction("B", 3, 2, 2)) == "B3.2''"


def test_starts_runs_and_drains():
    assert text(TWO_STAGES, 0, 1) == "F0/0 F1/0 B0/0 B1/0 U/0"
    assert text(TWO_STAGES, 1, 1) == "F0/0 B0/0 F1/0 B1/0 U/0"
    assert text(TWO_STAGES, 0, 2) == "F0/0 F1/0 B0/0 F0/1 B1/0 U/0 F1/1 B0/1 B1/1 U/1"
    assert text(TWO_STAGES, 1, 2) == "F0/0 B0/0 F1/0 B1/0 F0/1 B0/1 U/0 F1/1 B1/1 U/1"


def test_lags_of_several_steps():
    assert DEEP.most_lag == 3
    assert text(DEEP, 0, 1) == "F0/0 F1/0 B0/0 B1/0 U/0"
    assert text(DEEP, 0, 3) == "F0/0 F1/0 F0/1 F1/1 F0/2 F1/2 B0/0 B1/0 U/0 B0/1 B1/1 U/1 B0/2 B1/2 U/2"
    assert text(DEEP, 0, 4).startswith("F0/0 F1/0 F0/1 F1/1 F0/2 F1/2 B0/0 F0/3 B1/0 U/0 F1/3 B0/1 B1/1 U/1 B0/2")


def test_a_flush_begins_the_run_anew():
    first, second = text(TWO_STAGES, 0, 2), text(TWO_STAGES, 0, 1)
    assert text(TWO_STAGES, 0, 3, {1}) == first + " " + second.replace("/0", "/2")
    each = " ".join(second.replace("/0", f"/{step}") for step in range(3))
    assert text(TWO_STAGES, 0, 3, {0, 1, 2}) == each
    assert text(TWO_STAGES, 0, 3, range(2)) == each  # the end of a run is a flush anyway


@pytest.mark.parametrize("stream", [TWO_STAGES, DEEP, multidirection(4, 8), one_direction(4, 1)], ids=lambda s: s.name)
@pytest.mark.parametrize("flushes", [(), {0}, {1, 3}, {0, 1, 2, 3, 4}])
def test_every_action_of_every_step_once(stream, flushes):
    for rank, window in enumerate(stream.windows):
        ran = [(step, *action[:3]) for step, action in stream.actions(rank, 5, flushes)]
        assert len(set(ran)) == len(ran)
        assert sorted(ran) == sorted((step, *action[:3]) for step in range(5) for action in window)


def test_window_and_drain_agree_with_the_run():
    """The engine runs windows one by one and drains when it must."""
    for stream in (TWO_STAGES, DEEP, multidirection(8, 8)):
        for rank in range(stream.num_ranks):
            run = [(step - a.lag, a) for step in range(4) for a in stream.window(rank, step)]
            assert [*run, *stream.drain(rank, 4)] == list(stream.actions(rank, 4))


def test_unrolled():
    order = [forward(0), forward(1), backward(0), forward(2), backward(1), forward(3), backward(2), backward(3)]
    other = [kind(m) for m in range(4) for kind in (forward, backward)]
    assert TWO_STAGES.unrolled(2) == Schedule((tuple(order), tuple(other)), 4, 1, "by hand", ((0, 1),))


def test_unrolled_has_a_text():
    assert "rank 1: F0 B0 F1 B1 F2 B2 F3 B3\n" in to_text(TWO_STAGES.unrolled(2))


def test_versions():
    first, second = TWO_STAGES.versions(2)
    assert [(v.kind, 2 * v.step + v.micro_batch, v.version) for v in first] == [
        *(("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("F", 2, 0), ("B", 1, 0)),
        *(("F", 3, 1), ("B", 2, 1), ("B", 3, 1)),
    ]
    assert second[4:] == (
        *(Versioned("F", 1, 0, 0, 0), Versioned("B", 1, 0, 0, 0)),
        *(Versioned("F", 1, 1, 0, 1), Versioned("B", 1, 1, 0, 1)),
    )
    assert TWO_STAGES.mismatches(2)[0] == {(0, 0, 0): 0, (0, 1, 0): 0, (1, 0, 0): 1, (1, 1, 0): 0}
    assert set(TWO_STAGES.mismatches(2)[1].values()) == {0}


@pytest.mark.parametrize("stream", [TWO_STAGES, DEEP, multidirection(4, 4), one_direction(5, 2)], ids=lambda s: s.name)
def test_after_a_flush_all_weights_are_of_all_steps_before(stream):
    num_steps = 4
    for row in stream.versions(num_steps, flushes=range(num_steps)):
        assert all(action.version == action.step for action in row)
