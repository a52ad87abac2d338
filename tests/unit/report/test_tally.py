"""Losses and tokens between reports, also across a break."""

from __future__ import annotations

import math

from paceline.report.tally import Counted, Tally


class Loss:
    """A loss that says when it was read."""

    def __init__(self, value: float) -> None:
        self.value, self.is_read = value, False

    def item(self) -> float:
        self.is_read = True
        return self.value


def test_losses_are_read_when_they_are_reported() -> None:
    tally, losses = Tally(), [Loss(2.0), Loss(4.0)]
    for loss in losses:
        tally.add(loss, 10)
    assert not any(loss.is_read for loss in losses)
    assert (tally.tokens, tally.all_tokens) == (0, 20)
    assert tally.report() == Counted(loss=3.0, steps=2, tokens=20)
    assert (tally.tokens, tally.all_tokens) == (20, 20)
    assert math.isnan(tally.report().loss)


def test_a_report_after_a_break_has_the_losses_of_both_parts_and_the_time_of_one() -> None:
    before, after = Tally(), Tally()
    before.add(Loss(1.0), 7)
    before.report()
    before.add(Loss(2.0), 8)
    state = before.state_dict()
    assert state == {"tokens": 7, "pending_tokens": 8, "losses": [2.0]}
    after.load_state_dict(state)
    assert after.all_tokens == 15
    after.add(Loss(5.0), 9)
    assert after.report() == Counted(loss=3.5, steps=1, tokens=9)
    assert after.tokens == 24
    assert state["losses"] == [2.0]
