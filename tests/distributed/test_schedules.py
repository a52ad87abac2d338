"""No number depends on the schedule: every one gives the weights that DeepSpeed's own engine gives, bit by bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from support import jobs
from support.jobs import ds_config
from support.ranks import run_ranks
from support.small_layers import (
    MICRO_BATCHES,
    batches,
    layers,
    loss_of,
)

STEPS = 3
SCHEDULES: list[Any] = [
    None,
    "gpipe",
    {"type": "kfkb", "k": 4},
    {"type": "eager", "slack": 1.0},
    {"type": "eager", "warmup": [5, 3, 0]},
]


def train(
    initialize: Any, schedule: Any, *, kind: str = "tied", lengths: tuple[int, ...] = (5,), **options: Any
) -> Any:
    """Losses of three steps, of an evaluation, and the weights after it, of one rank."""
    from deepspeed.pipe import PipelineModule

    module = PipelineModule(
        layers=layers(kind),
        num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=loss_of,
        partition_method="uniform",
        seed_layers=True,
        dynamic_shape=len(lengths) > 1,
        activation_checkpoint_interval=options.pop("interval", 0),
    )
    section = {} if schedule is None else {"paceline": {"pipeline": {"schedule": schedule}}}
    config = ds_config(
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=MICRO_BATCHES,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **options,
        **section,
    )
    parameters = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = initialize(model=module, model_parameters=parameters, config=config)
    losses = [engine.train_batch(iter(batches(step, list(lengths)))).item() for step in range(STEPS)]
    losses.append(engine.eval_batch(iter(batches(99, list(lengths)))).item())
    if hasattr(engine, "schedule"):
        engine.destroy()
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def all_schedules(stages: int, order: str | None, options: dict[str, Any]) -> list[Any]:
    import deepspeed

    import paceline
    from paceline.runtime.engine import PacelineEngine

    deepspeed.init_distributed()
    PacelineEngine.transport_order = order
    fitting = [s for s in SCHEDULES if not isinstance(s, dict) or len(s.get("warmup", range(stages))) == stages]
    return [
        train(deepspeed.initialize, None, **options),
        *(train(paceline.initialize, schedule, **options) for schedule in fitting),
    ]


@pytest.mark.parametrize(
    ("stages", "order", "options"),
    [
        (3, None, {}),
        (2, None, {"interval": 1}),
        (3, "paired", {"kind": "pairs", "lengths": (5, 3, 5, 8), "zero_optimization": {"stage": 1}}),
    ],
)
def test_every_schedule_gives_the_weights_of_deepspeed(stages: int, order: str | None, options: dict[str, Any]) -> None:
    for wanted, *found in run_ranks(all_schedules, stages, stages, order, options):
        for losses, weights in found:
            assert losses == wanted[0]
            for name, tensor in wanted[1].items():
                assert torch.equal(weights[name], tensor), name


def causal_lm(stages: int, order: str | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    from paceline.runtime.engine import PacelineEngine

    PacelineEngine.transport_order = order
    schedules = ["1f1b", {"type": "kfkb", "k": 3}, {"type": "eager", "slack": 1.0}]
    return [jobs.train(stages, steps=3, schedule=schedule, **options) for schedule in schedules]


@pytest.mark.parametrize(
    ("stages", "replicas", "order", "options"),
    [
        (2, 2, None, {"kind": "padded", "zero": 1, "more": {"bf16": {"enabled": True}}}),
        (3, 1, "paired", {"kind": "ragged", "zero": 1, "family": "mixtral", "checkpointing": True}),
    ],
)
def test_a_language_model_does_not_depend_on_the_schedule(
    stages: int, replicas: int, order: str | None, options: dict[str, Any]
) -> None:
    """Lengths that vary, padding, tied weights, ZeRO 1, bf16, checkpointing, experts: bit by bit those of 1F1B."""
    for wanted, *others in run_ranks(causal_lm, stages * replicas, stages, order, options):
        for found in others:
            assert found["losses"] == wanted["losses"]
            assert found["evaluation"] == wanted["evaluation"]
            for name, tensor in wanted["state"].items():
                assert torch.equal(found["state"][name], tensor), name
