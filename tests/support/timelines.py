"""Timelines to test with, made by arithmetic rather than by the simulator."""

from __future__ import annotations

from paceline.schedules.timeline import Span, Timeline, Transfer


def gpipe_timeline(
    num_ranks: int = 3,
    num_micro_batches: int = 4,
    *,
    forward_s: float = 0.02,
    backward_s: float = 0.04,
    transfer_s: float = 0.01,
    name: str = "by hand",
) -> Timeline:
    """All forwards, all backwards, then a reduction until all have taken part and a step of one forward's length."""
    spans, transfers = [], []
    last = num_ranks - 1
    turn_s = last * (forward_s + transfer_s) + num_micro_batches * forward_s
    end_s = turn_s + last * (backward_s + transfer_s) + num_micro_batches * backward_s + transfer_s
    for rank in range(num_ranks):
        back = last - rank
        for m in range(num_micro_batches):
            begin_s = rank * (forward_s + transfer_s) + m * forward_s
            done_s = begin_s + forward_s
            spans.append(Span(rank, "F", m, 0, begin_s, done_s))
            if rank < last:
                transfers.append(Transfer("activation", rank, rank + 1, m, 0, done_s, done_s + transfer_s, 1024.0))
        for m in range(num_micro_batches):
            begin_s = turn_s + back * (backward_s + transfer_s) + m * backward_s
            done_s = begin_s + backward_s
            spans.append(Span(rank, "B", m, 0, begin_s, done_s))
            if rank > 0:
                transfers.append(Transfer("gradient", rank, rank - 1, m, 0, done_s, done_s + transfer_s, 1024.0))
        spans.append(Span(rank, "reduce", -1, 0, done_s, end_s))
        spans.append(Span(rank, "step", -1, 0, end_s, end_s + forward_s))
    return Timeline(num_ranks, tuple(spans), tuple(transfers), name)
