"""When a stage computes without a mask that its loss does not depend on."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.hf.masks import MaskFacts, known_facts
from paceline.runtime.causal_lm_runner import CausalLMRunner, StepBook


@pytest.mark.parametrize(
    ("trains", "own_loss", "natural", "is_dispensable"),
    [
        (True, None, False, True),
        (False, None, False, False),
        (True, lambda *_: None, False, False),
        (True, None, True, False),
    ],
)
def test_only_where_nobody_else_looks_at_its_outputs(
    trains: bool, own_loss: Any, natural: bool, is_dispensable: bool
) -> None:
    """However the step was begun: natural gradients look at all rows without a flush, too."""
    told: list[MaskFacts | None] = []

    class Module:
        training = trains

        def __call__(self, *_: Any) -> tuple[None, None]:
            told.append(known_facts())
            return None, None

    facts = MaskFacts(is_padded=True, is_dispensable=True)
    runner: Any = SimpleNamespace(
        _book=StepBook(shapes=[SimpleNamespace(masks=facts)], keeps_masks=natural),  # type: ignore[list-item]
        _module=Module(),
        _chunk=0,
        _graph=nullcontext,
        _around=SimpleNamespace(forward=nullcontext),
        own_loss=own_loss,
        is_last=False,
    )
    CausalLMRunner.forward(runner, SimpleNamespace(inputs=(None, {}, None)), 0)  # type: ignore[arg-type]
    assert told == [MaskFacts(is_padded=True, is_dispensable=is_dispensable)]
