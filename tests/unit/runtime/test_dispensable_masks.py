"""When a stage computes without a mask that its loss does not depend on."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.hf.masks import MaskFacts, known_facts
from paceline.runtime.causal_lm_runner import CausalLMRunner


@pytest.mark.parametrize(
    ("trains", "own_loss", "is_dispensable"),
    [(True, None, True), (False, None, False), (True, lambda *_: None, False)],
)
def test_only_where_nobody_else_looks_at_its_outputs(trains: bool, own_loss: Any, is_dispensable: bool) -> None:
    told: list[MaskFacts | None] = []

    class Module:
        training = trains

        def __call__(self, *_: Any) -> tuple[None, None]:
            told.append(known_facts())
            return None, None

    facts = MaskFacts(is_padded=True, is_dispensable=True)
    runner: Any = SimpleNamespace(
        _book=SimpleNamespace(shapes=[SimpleNamespace(masks=facts)], label_tokens=0),
        _module=Module(),
        _chunk=0,
        _graph=nullcontext,
        _around=SimpleNamespace(forward=nullcontext),
        own_loss=own_loss,
        is_last=False,
    )
    CausalLMRunner.forward(runner, SimpleNamespace(inputs=(None, {}, None)), 0)  # type: ignore[arg-type]
    assert told == [MaskFacts(is_padded=True, is_dispensable=is_dispensable)]
