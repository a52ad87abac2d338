"""An evaluation on one rank of a pipeline."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch import nn

from paceline.runtime.causal_lm_runner import StepBook
from paceline.runtime.evaluation import Evaluation
from paceline.supervise.watch import EVERYONE, WATCH


def test_a_stage_that_reads_nothing_needs_no_batches() -> None:
    """Whatever it is given is ignored, as by a training step."""
    steps: Any = SimpleNamespace(reads=False, is_stopping=False, open=lambda *_, **__: 0)
    pipeline: Any = SimpleNamespace(
        data_iterator=None, module=nn.Linear(1, 1), micro_batches=2, between_steps=nullcontext
    )
    control: Any = SimpleNamespace(rank=1, sum=lambda values: values)
    evaluation = Evaluation(pipeline, steps, StepBook(), [], control, loss_rank=2, is_pipe_parallel=True)
    nothing: Any = None
    found = evaluation.evaluate(nothing)
    assert found["eval_tokens"] == 0
    assert math.isnan(found["eval_loss"])
    assert list(evaluation.predict(nothing)) == []
    assert pipeline.module.training


def test_after_an_evaluation_nobody_waits_for_this_rank() -> None:
    """A ``compute_metrics`` of an hour is no hang, and an error in one is not "agreeing on the step"."""
    steps: Any = SimpleNamespace(
        reads=True, is_stopping=False, open=lambda *_, **__: WATCH.doing("agreeing on the step", EVERYONE)
    )
    pipeline: Any = SimpleNamespace(
        data_iterator=None, module=nn.Linear(1, 1), micro_batches=2, between_steps=nullcontext
    )
    control: Any = SimpleNamespace(rank=0, sum=lambda values: values)
    Evaluation(pipeline, steps, StepBook(), [], control, loss_rank=2, is_pipe_parallel=True).evaluate([])
    assert WATCH.operation == ""
