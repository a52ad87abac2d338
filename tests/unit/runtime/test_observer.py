"""Messages with both their ends, from what the ranks report: hand-made reports of a pipeline whose times are known."""

from __future__ import annotations

import pytest

from paceline.runtime.observer import messages
from reports import MICRO_BATCHES, STAGES, Run


def test_a_message_is_seen_once() -> None:
    after: dict[tuple[int, int, str], int] = {}
    reports = Run().reports()
    assert len(messages(reports, after)) == 2 * MICRO_BATCHES * 2 * (STAGES - 1)
    assert messages(reports, after) == []
    assert len(messages(Run(steps=3).reports(), after)) == MICRO_BATCHES * 2 * (STAGES - 1)


def test_messages_are_on_the_first_stages_clock_and_begin_when_both_ends_are_ready() -> None:
    run = Run(offsets_s=(5.0, -70.0, 12.5))
    reports = run.reports()
    late = reports[1].records["activations_in"][0]
    ready = late.done_s - 0.003  # its receive was posted three milliseconds before it had come
    reports[1].records["activations_in"][0] = late._replace(begun_s=ready)
    first, second, *_ = [seen for seen in messages(reports) if (seen.kind, seen.source) == ("activation", 0)]
    assert first.record.begun_s == pytest.approx(ready + 70.0 + 5.0)
    assert first.record.done_s - first.record.begun_s == pytest.approx(0.003)
    assert second.record.done_s - second.record.begun_s == pytest.approx(0.005)
    assert {(s.kind, s.source, s.target) for s in messages(reports)} == {
        *(("activation", stage, stage + 1) for stage in range(STAGES - 1)),
        *(("gradient", stage + 1, stage) for stage in range(STAGES - 1)),
    }


def test_numbers_that_are_missing_at_one_end_are_left_out() -> None:
    reports = Run().reports()
    sent = reports[0].records["activations_out"]
    del sent[0], sent[-1]  # forgotten, and not noted yet
    del reports[1].records["activations_in"][3]
    after: dict[tuple[int, int, str], int] = {}
    seen = [s.record.number for s in messages(reports, after) if (s.kind, s.source) == ("activation", 0)]
    assert seen == [2, 3, 5, 6, 7]
    # What the sender notes a moment later is seen at the next look.
    late = [s.record.number for s in messages(Run().reports(), after) if (s.kind, s.source) == ("activation", 0)]
    assert late == [8]
