"""Any ``PipelineModule`` trains under our engine as under DeepSpeed's own: same losses, same weights."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn

from support.jobs import ds_config, model_config
from support.ranks import run_ranks

VOCABULARY, WIDTH, LAYERS, MICRO_BATCHES = 20, 8, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Again(nn.Module):
    """A layer once more, from the second step on: recomputed, its weights then have two backwards a micro-batch."""

    is_on = False

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if self.is_on else x * 1


def by_weight(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


def embed(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def train(engine: Any, steps: int, micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    losses = []
    for step in range(steps):
        Again.is_on = step > 0
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (2, micro_batches, 2, 5), generator=generator)
        batches = list(zip(*ids, strict=True))[replica::replicas]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def both(stages: int, zero: int, interval: int, micro_batches: int) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    import paceline

    deepspeed.init_distributed()
    results = []
    for initialize in (deepspeed.initialize, paceline.initialize):
        torch.manual_seed(0)
        block = Block()
        module = PipelineModule(
            layers=[
                TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=embed),
                block,
                Again(block),
                *(LayerSpec(Block) for _ in range(LAYERS - 2)),
                TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=by_weight),
            ],
            num_stages=stages,
            loss_fn=loss_of,
            partition_method="uniform",
            seed_layers=True,
        )
        config = ds_config(
            train_batch_size=2 * micro_batches,
            gradient_accumulation_steps=micro_batches * stages // int(os.environ["WORLD_SIZE"]),
            zero_optimization={"stage": zero},
            pipeline={"activation_checkpoint_interval": interval},
            optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        )
        parameters = [p for p in module.parameters() if p.requires_grad]
        engine, *_ = initialize(model=module, model_parameters=parameters, config=config)
        results.append((type(engine).__name__, *train(engine, 4, micro_batches)))
    return results


CASES = {
    (1, 1): [(0, 1, MICRO_BATCHES)],
    (2, 1): [(1, 0, MICRO_BATCHES)],
    (3, 1): [(0, 1, MICRO_BATCHES)],
    (2, 2): [(0, 0, MICRO_BATCHES), (1, 1, MICRO_BATCHES), (1, 1, 2)],
}
"""By stages and replicas: a ZeRO stage, whether activations are checkpointed, and the micro-batches of all replicas."""


@pytest.mark.parametrize(("stages", "replicas"), CASES)
def test_any_pipeline_module(stages: int, replicas: int) -> None:
    """Tied layers, and DeepSpeed's own (reentrant) activation checkpointing, which finishes gradients several times."""
    for case in CASES[stages, replicas]:
        for (stock, *wanted), (ours, *found) in run_ranks(both, stages * replicas, stages, *case):
            assert (stock, ours) == ("PipelineEngine", "PacelineEngine")
            assert found[0] == pytest.approx(wanted[0], rel=1e-6)
            for name, tensor in wanted[1].items():
                torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def additional_losses() -> list[Any]:
    """Losses of two steps, where the module's class has additional ones, and where its object was given them."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import paceline

    class Reporting(PipelineModule):  # type: ignore[misc]
        def get_additional_losses(self) -> Any:
            return {"size": self.loss_fn.last}

    class Loss(nn.MSELoss):
        last = torch.zeros(())

        def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.last = outputs.detach().square().mean()
            return super().forward(outputs, labels)

    deepspeed.init_distributed()
    results: list[Any] = []
    for kind in (Reporting, PipelineModule):
        for initialize in (deepspeed.initialize, paceline.initialize):
            torch.manual_seed(0)
            layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
            module = kind(layers=layers, num_stages=2, loss_fn=Loss(), seed_layers=True)
            if kind is PipelineModule:
                module.get_additional_losses = lambda loss=module.loss_fn: {"size": loss.last}
            parameters = list(module.parameters())
            optimizer = {"type": "SGD", "params": {"lr": 1e-2}}
            config = ds_config(optimizer=optimizer, zero_allow_untested_optimizer=True)
            engine, *_ = initialize(model=module, model_parameters=parameters, config=config)
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                batches = [tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(4)]
                loss = engine.train_batch(iter(batches)).item()
                found = engine.agg_additional_losses
                results.append((loss, found and {name: value.item() for name, value in found.items()}))
    return results


def test_additional_losses_are_reported_as_by_deepspeed() -> None:
    for found in run_ranks(additional_losses, 2):
        assert all(losses["size"] > 0 for _, losses in found)
        for stock, ours in ((0, 2), (1, 3), (4, 6), (5, 7)):
            assert found[ours][0] == pytest.approx(found[stock][0], rel=1e-6)
            assert found[ours][1] == pytest.approx(found[stock][1], rel=1e-6)


HUGGING_FACE_ONLY: dict[str, tuple[dict[str, Any], str]] = {
    "unequal replicas": (
        {"unequal_replicas": {}},
        "unequal_replicas is there and .* shares are for Hugging",
    ),
    "recompute": ({"recompute": 1}, "recompute is 1 and .* DeepSpeed recomputes all"),
    "half_layers": ({"half_layers": True}, "half_layers is true and .* are cut where they are listed"),
    "head_slices": ({"head_slices": 4}, "head_slices is 4 and .* is cut where it is listed"),
    "compile": ({"compile": True}, "compile is there and .* decoder layers of Hugging Face models"),
    "no flush": ({"schedule": "one_direction"}, "one_direction.* are for Hugging Face models"),
    "compile()": ({}, r"compile\(\) and .* decoder layers of Hugging Face models"),
}


def refusals() -> dict[str, str]:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import paceline

    deepspeed.init_distributed()
    told = {}
    for name, (keys, _) in HUGGING_FACE_ONLY.items():
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
        module = PipelineModule(layers=layers, num_stages=1, loss_fn=nn.MSELoss())
        try:
            engine, *_ = paceline.initialize(model=module, config=ds_config(paceline={"pipeline": keys}))
            engine.compile()
        except ValueError as error:
            told[name] = str(error)
    return told


def other_stages() -> str:
    from deepspeed.pipe import LayerSpec, PipelineModule

    import paceline

    paceline.runtime.initialize.start_distributed()
    module = PipelineModule(layers=[LayerSpec(nn.Linear, WIDTH, WIDTH)] * 2, num_stages=1, loss_fn=nn.MSELoss())
    with pytest.raises(ValueError, match=r"stages is 2") as told:
        paceline.initialize(model=module, config=ds_config(2))
    return str(told.value)


def test_what_is_for_hugging_face_models_is_refused_for_others() -> None:
    (told,) = run_ranks(refusals, 1)
    for name, (_, message) in HUGGING_FACE_ONLY.items():
        assert re.search(message, told[name]), told[name]
        assert "the model is a PipelineModule" in told[name]


def test_stages_that_a_module_does_not_have_are_refused() -> None:
    (told,) = run_ranks(other_stages, 1)
    assert re.search(r"stages is 2 and the PipelineModule has 1: leave .* out, or make it with num_stages=2\.$", told)


PLANNED = {"stages": "plan", "half_layers": "plan", "head_slices": "plan"}


def planned_in_vain() -> list[str]:
    """Warnings of a module of one's own, and of a given CausalLMPipeline."""
    import logging

    from deepspeed.pipe import LayerSpec, PipelineModule

    import paceline

    paceline.runtime.initialize.start_distributed()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH)] * 2
    adaptive = {"type": "adaptive", "chunks": "plan"}
    for model, keys in (
        (PipelineModule(layers=layers, num_stages=1, loss_fn=nn.MSELoss()), PLANNED | {"schedule": adaptive}),
        (paceline.CausalLMPipeline(model_config(), num_stages=1), PLANNED),
    ):
        paceline.initialize(model=model, config=ds_config(paceline={"pipeline": keys}))
    return [line for line in told if "has no effect" in line]


def test_a_plan_for_a_pipeline_that_is_built_is_said_to_have_no_effect() -> None:
    (told,) = run_ranks(planned_in_vain, 1)
    own, given = "the PipelineModule is built", "the CausalLMPipeline is built"
    keys = [*PLANNED, "schedule.chunks"]
    wanted = [(key, own) for key in keys] + [(key, given) for key in PLANNED]
    assert len(told) == len(wanted)
    for line, (key, why) in zip(told, wanted, strict=True):
        assert line.startswith(f'paceline.pipeline.{key} is "plan", which has no effect: {why}; give the model itself')
