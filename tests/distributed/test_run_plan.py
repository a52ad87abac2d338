"""Every engine of ours has the plan that it was made by, and the section is read once for it."""

from __future__ import annotations

from typing import Any
from unittest import mock

from support.jobs import ds_config, model_config
from support.ranks import run_ranks

NATURAL = {"natural_gradient": {"update_period": 2}}


def plan_of(kind: str) -> tuple[dict[str, Any], int]:
    """On one rank: facts of the engine's plan, and how often the section was read."""
    import deepspeed
    import torch

    import paceline
    from paceline.config import PacelineConfig, resolve
    from paceline.patches.repairs import repair_deepspeed
    from paceline.runtime.module import CausalLMPipeline

    repair_deepspeed()
    deepspeed.init_distributed("gloo")
    config = ds_config(2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    config["paceline"]["pipeline"]["schedule"] = "kfkb"
    plain = {**config, "paceline": NATURAL}
    model: Any = model_config()
    initialize: Any = paceline.initialize
    if kind == "built pipeline":
        model = CausalLMPipeline(model, num_stages=2, partition="uniform")
    elif kind == "plan":
        model = CausalLMPipeline(model, num_stages=2, partition="uniform")
        room = {"num_layers": 4, "num_items": 6, "state_bytes": None, "device_bytes": None}
        config = resolve(config, world_size=2, **room)
    elif kind == "layers":
        layers = [torch.nn.Linear(4, 4) for _ in range(4)]
        model = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss())
    elif kind in ("plain", "deepspeed.initialize"):
        model, config = torch.nn.Linear(4, 4), plain
        initialize = deepspeed.initialize if kind == "deepspeed.initialize" else initialize
    with mock.patch.object(PacelineConfig, "of", wraps=PacelineConfig.of) as read:
        parameters = list(model.parameters()) if isinstance(model, torch.nn.Linear) else None
        engine, *_ = initialize(model=model, model_parameters=parameters, config=config)
    plan = engine.plan
    facts = {
        "shape": (plan.stages, plan.data_parallel),
        "sizes": (plan.micro_batch_size, plan.micro_batches, plan.train_batch_size),
        "agrees": (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
        "schedule": plan.schedule.type,
        "method": plan.partition_choice.method,
        "natural": plan.natural_gradient is not None,
    }
    engine.destroy()
    return facts, read.call_count


def found(kind: str, num_ranks: int = 2) -> tuple[dict[str, Any], int]:
    first, *others = run_ranks(plan_of, num_ranks, kind)
    assert all(other == first for other in others)
    facts, times = first
    micro_batch_size, micro_batches, train = facts["sizes"]
    assert facts.pop("agrees") == (micro_batch_size, micro_batches)
    assert train == micro_batch_size * micro_batches * facts["shape"][1]
    return facts, times


def test_a_model_that_becomes_a_pipeline() -> None:
    facts, times = found("model")
    assert (facts["shape"], facts["schedule"], facts["method"]) == ((2, 1), "kfkb", "work")
    assert times == 1


def test_a_pipeline_that_is_built() -> None:
    facts, times = found("built pipeline")
    assert (facts["shape"], facts["schedule"], facts["method"]) == ((2, 1), "kfkb", "work")
    assert times == 1


def test_a_plan_is_taken_as_it_is() -> None:
    facts, times = found("plan")
    assert (facts["shape"], facts["schedule"]) == ((2, 1), "kfkb")
    assert times == 0


def test_layers_stay_as_they_were_built() -> None:
    facts, times = found("layers")
    assert (facts["shape"], facts["schedule"], facts["method"]) == ((2, 1), "kfkb", None)
    assert times == 1


def test_a_model_without_a_pipeline() -> None:
    for kind in ("plain", "deepspeed.initialize"):
        facts, times = found(kind)
        assert (facts["shape"], facts["schedule"], facts["natural"]) == ((1, 2), "1f1b", True)
        assert times == 1
