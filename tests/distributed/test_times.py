"""What DeepSpeed can tell of time: ``wall_clock_breakdown`` and ``flops_profiler``, without ``steps_per_print``."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import without_effect
from support.jobs import ds_config, model_config, step_batches
from support.ranks import RankError, run_ranks

STEPS = 11
"""One more than lines of times are apart."""


def told(kind: str, **keys: Any) -> str:
    """What rank 0 prints in some steps with ``keys`` in the JSON."""
    import paceline

    config = {**ds_config(), **keys}
    del config["steps_per_print"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if kind == "plain":
            config["paceline"] = {"natural_gradient": {}}
            config["optimizer"]["params"]["torch_adam"] = True  # the other one is compiled first
            engine, *_ = paceline.initialize(model=nn.Linear(4, 4), config=config)
            for _ in range(4 * STEPS):
                engine.backward(engine(torch.randn(2, 4)).square().mean())
                engine.step()
        else:
            config["paceline"] = {"pipeline": {"stages": 2, "schedule": {"type": kind}}}
            engine, *_ = paceline.initialize(model=model_config(), config=config)
            for step in range(STEPS):
                engine.train_batch(iter(step_batches(step)[:4])).item()
    return out.getvalue()


@pytest.mark.parametrize("kind", ["1f1b", "one_direction"])
def test_pipelines_tell_times_and_flops(kind: str) -> None:
    asked = {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True, "profile_step": 2, "detailed": False}}
    text = run_ranks(told, 2, kind, **asked)[0]
    assert text.count("Profile Summary at step 2:") == 1
    assert "fwd flops per GPU:" in text
    if kind == "1f1b":
        (line,) = (line for line in text.splitlines() if "time (ms) | fwd: " in line)
        assert all(f"| {name}: " in line for name in ("bwd", "step"))


def hooks(**keys: Any) -> tuple[int, str]:
    """How many hooks each forward of a stage runs, and what a step prints."""
    import paceline

    config = {**ds_config(), "paceline": {"pipeline": {"stages": 1}}, **keys}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine, *_ = paceline.initialize(model=model_config(), config=config)
        engine.train_batch(iter(step_batches(0)[:4]))
    return len(engine.module._forward_pre_hooks) + len(engine.module._forward_hooks), out.getvalue()


def test_forwards_run_hooks_of_deepspeed_only_if_asked() -> None:
    assert run_ranks(hooks, 1)[0][0] == 0
    ((number, text),) = run_ranks(hooks, 1, memory_breakdown=True)
    assert number == 2
    assert "Engine before forward" in text
    assert without_effect({"memory_breakdown": True}) == []  # it is not said to do nothing


@pytest.mark.parametrize("asked", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
def test_without_a_pipeline(asked: dict[str, Any]) -> None:
    (text,) = run_ranks(told, 1, "plain", **asked)
    assert ("Profile Summary at step" in text) == ("flops_profiler" in asked)
    assert "time (ms) | fwd: " in text


def with_a_scheduler(of: str) -> list[float]:
    """Rates of a pipeline whose scheduler is an object over the optimizer that is given, or over another one."""
    from torch.optim.lr_scheduler import StepLR

    import paceline
    from paceline.runtime.initialize import start_distributed

    start_distributed()
    model = paceline.CausalLMPipeline(model_config(), num_stages=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer if of == "own" else other, 1, gamma=0.5)
    config = ds_config(2)
    del config["optimizer"]
    engine, *_ = paceline.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=scheduler)
    rates = []
    for step in range(3):
        engine.train_batch(iter(step_batches(step)[:4]))
        rates += engine.get_lr()
    return rates


def test_a_scheduler_over_the_given_optimizer_acts() -> None:
    assert run_ranks(with_a_scheduler, 2, "own")[0] == [0.5, 0.25, 0.125]


def test_a_scheduler_over_another_optimizer_is_refused() -> None:
    with pytest.raises(RankError, match="over another optimizer"):
        run_ranks(with_a_scheduler, 2, "other")
