"""The outer step of islands that send in a format: what they have in common, and what is still to be sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.averaging.outer_step import OuterStep
from paceline.averaging.rounded_means import Residuals
from paceline.averaging.rules import Report
from paceline.config.averaging_keys import AveragingConfig


def step_of(format: Any = "int8", **section: Any) -> OuterStep:
    return OuterStep.of(AveragingConfig(lighthouse="node1:29510", format=format, **section))


def values(shift: float = 0.0) -> list[Tensor]:
    return [torch.arange(6.0) / 7 + shift, torch.tensor([1e3, -1e-3]) + shift]


def reports(*checksums: float) -> list[Report]:
    one = Report(0, 0, 0.0, 1.0, 10, counts=True, round=1)
    return [replace(one, island=number, checksum=checksum) for number, checksum in enumerate(checksums)]


def test_islands_agree_where_every_bit_of_their_anchors_does() -> None:
    one, other, lacking = step_of(), step_of(), step_of()
    one.anchor(values())
    other.anchor([tensor.flip(0).flip(0) for tensor in values()])
    found = [each.checksum(range(2)) for each in (one, other, lacking)]
    assert found[0] == found[1] == int(found[0])
    assert one.agrees(reports(found[0], found[1]))
    assert not one.agrees(reports(found[0], found[2])), "one has no anchors"
    assert not one.agrees(reports(found[2], found[2]))
    close = values()
    close[0][3] = torch.nextafter(close[0][3], torch.tensor(9.0))
    other = step_of()
    other.anchor(close)
    assert not one.agrees(reports(found[0], other.checksum(range(2))))
    assert step_of(None).agrees(reports(0.0, 0.0))


def test_what_a_round_leaves_is_sent_with_the_next_and_dropped_by_an_exact_one() -> None:
    step = step_of()
    step.anchor(values())
    sent = step.rounded([0, 1], values(0.5), [])
    assert sent is not None
    assert not any(tensor.any() for residuals in sent.residuals for tensor in residuals)
    left = [torch.full_like(tensor, 0.125) for tensor in values()]
    averages = step.averages([0, 1], [torch.full_like(tensor, 0.5) for tensor in values()], Residuals(left, left))
    torch.testing.assert_close(list(averages), values(0.5))
    assert step.step([0, 1], averages, 1.0) is averages
    sent = step.rounded([0, 1], values(0.5), [])
    assert sent is not None
    assert [tensor.unique().tolist() for tensor in sent.residuals.of_changes] == [[0.125], [0.125]]
    assert all(not change.any() for change in sent.changes), "the average is the new anchor"
    assert step.averages([0, 1], averages, None) is averages
    sent = step.rounded([0, 1], values(0.5), [])
    assert sent is not None
    assert not any(tensor.any() for residuals in sent.residuals for tensor in residuals)


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_it_goes_on_from_its_state_and_from_one_without_residuals(outer: Any) -> None:
    step = step_of(outer=outer)
    step.anchor(values())
    left = [torch.full_like(tensor, 0.125) for tensor in values()]
    step.step([0, 1], step.averages([0, 1], left, Residuals(left, left)), 1.0)
    state = step.state_dict()
    again = step_of(outer=outer)
    again.load_state_dict(state)
    assert again.checksum(range(2)) == step.checksum(range(2))
    for one, other in zip(*(each.rounded([0, 1], values(), []).residuals for each in (step, again)), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(list(one), list(other), rtol=0, atol=0)
    old = step_of(outer=outer)
    old.load_state_dict({key: value for key, value in state.items() if key != "left"})
    assert old.num_anchors == 2
    plain = step_of(None, outer=outer)
    plain.load_state_dict(state)
    assert (plain.num_anchors > 0) == (outer == "nesterov")
    exact = step_of(None)
    assert (exact.has_anchors, exact.rounded([0], values()[:1], []), exact.state_dict()) == (False, None, {})


def test_anchors_that_no_round_has_made_are_compared_without_a_format_too() -> None:
    """Islands that go on from checkpoints without anchors begin at values of their own."""
    steps = [step_of(None, outer="nesterov") for _ in range(3)]
    for step, shift in zip(steps, (0.0, 0.0, 0.5), strict=True):
        step.anchor(values(shift))
    one, same, other = (step.checksum(range(2)) for step in steps)
    assert steps[0].agrees(reports(one, same))
    assert not steps[0].agrees(reports(one, other))
    for step in steps[:2]:
        step.step([0], values()[:1], 1.0)
    assert steps[0].checksum([0]) == 0.0
    assert steps[0].checksum([0, 1]) == one
    steps[2].take_shared([0, 1], [*values(), *values()])
    assert steps[2].checksum(range(2)) == 0.0
