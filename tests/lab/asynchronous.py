"""Pipelines without a flush in a lab: the real engine with a Hugging Face model, and emulated compute.

Each forward and each backward of a stage lasts as long as the emulation says, everything included that really is
computed in it. That is little, since all ranks of a lab may compute at the same moment on two cores: the model is a
Llama whose decoder layers, and whose norm, only scale the hidden states. Messages have the emulation's size. Gradients
and new values travel as well, but of few parameters: what an update costs with more of them is not measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from lab.device import DEVICE
from lab.emulation import LEARNING_RATE, Emulation
from paceline.runtime.stage_runner import StageRunner
from paceline.schedules import directions
from paceline.schedules.asynchronous import MULTIDIRECTION, ONE_DIRECTION

LENGTH = 128
"""Tokens of a micro-batch."""

VOCABULARY = 16

SETTLING_STEPS = 2
"""After so many from its start, all ranks of a run compute in the rhythm of the steady state."""

SCHEDULES: Mapping[str, dict[str, Any]] = {
    "multidirection": {"type": MULTIDIRECTION},
    "multidirection-clipped": {"type": MULTIDIRECTION},
    "multidirection-flush": {"type": MULTIDIRECTION, "staleness": 0},
    "one_direction": {"type": ONE_DIRECTION},
    "one_direction-clipped": {"type": ONE_DIRECTION},
}
"""Sections ``schedule`` by the name of a contestant. Those that are clipped need the norm of all ranks' gradients."""


class Scale(nn.Module):
    """Stands for a layer. What else a layer is given, it leaves alone.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states * self.weight


def emulate(runner: StageRunner, emulation: Emulation) -> None:
    """Have a stage compute on the emulated device of this process."""
    forward, backward = runner.forward, runner.backward

    def slow_forward(*args: Any) -> None:
        with DEVICE.computation("forward", 0, emulation.forward_s[runner.stage]):
            forward(*args)

    def slow_backward(*args: Any) -> None:
        with DEVICE.computation("backward", 0, emulation.backward_s[runner.stage]):
            backward(*args)

    runner.forward, runner.backward = slow_forward, slow_backward  # type: ignore[method-assign]


class AsynchronousStep:
    """A contestant whose steps do not bring the ranks together: its loss is not looked at before the end of a round.

    Args:
        name: of :data:`SCHEDULES`.

    Raises:
        ValueError: the emulation has what this contestant has not.
    """

    def __init__(self, name: str, emulation: Emulation) -> None:

        import paceline
        from paceline.runtime.module import CausalLMPipeline

        schedule = SCHEDULES[name]
        routes = directions.routes(emulation.num_ranks) if schedule["type"] == MULTIDIRECTION else None
        model = _model(name, emulation)
        pipeline = CausalLMPipeline(model, num_stages=emulation.num_ranks, partition="uniform", routes=routes)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": emulation.num_micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
            "gradient_clipping": 1.0 if name.endswith("-clipped") else 0.0,
            "steps_per_print": None,
            "paceline": {"pipeline": {"stages": emulation.num_ranks, "schedule": schedule}},
        }
        self.engine, *_ = paceline.initialize(model=pipeline, config=config)
        for held in self.engine.held:
            emulate(held.runner, emulation)
        self.is_flushed = schedule.get("staleness") == 0
        self._data = cycle(_batches(emulation.num_micro_batches))
        self._losses: list[Tensor] = []

    def __call__(self) -> dict[str, Any]:
        loss = self.engine.train_batch(self._data)
        said = {"schedule": self.engine.schedule.name, "boundaries": [*map(int, self.engine.module.parts)]}
        if self.is_flushed:
            return {**said, "loss": loss.item()}
        self._losses.append(loss)
        return said

    def flush(self) -> list[float]:
        """End what has begun; losses of the steps since the last time."""
        self.engine.flush()
        losses, self._losses = [loss.item() for loss in self._losses], []
        return losses


def _model(name: str, emulation: Emulation) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, rest = divmod(emulation.message_bytes, 4 * LENGTH)
    if rest:
        raise ValueError(f"{name} with messages of {emulation.message_bytes} bytes: take a multiple of {4 * LENGTH}")
    if emulation.num_layers != emulation.num_ranks or emulation.layer_bytes:
        raise ValueError(
            f"{name} with {emulation.num_layers} layers of {emulation.layer_bytes} bytes on {emulation.num_ranks} "
            "ranks: it can have a layer a rank only, and no other parameters than its own"
        )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=1,
            num_hidden_layers=emulation.num_layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=2,
            max_position_embeddings=LENGTH,
        )
    )
    model.model.layers = nn.ModuleList(Scale(width) for _ in range(emulation.num_layers))
    model.model.norm = Scale(width)
    return model


def _batches(count: int) -> list[dict[str, Tensor]]:
    """Of a step; every step has the same."""
    chance = torch.Generator().manual_seed(0)
    made = (torch.randint(VOCABULARY, (1, LENGTH), generator=chance) for _ in range(count))
    return [{"input_ids": tokens, "labels": tokens} for tokens in made]
