"""Asynchronous pipelines without a pipeline: one process that uses, for every action, the weights that a stream says.

A :class:`~paceline.schedules.stream.Stream` says how many updates the weights have had that each forward and each
backward of a run uses. The :class:`Emulator` keeps the weights after every update, takes each micro-batch through all
stages with those of its forwards and back with those of its backwards, and adds its gradient to its step's. Nothing is
stashed for a backward: it reads the activations that its forward has left, and the newer weights.

What an engine computes is the same but for the order of summation. Gradients are summed here over the micro-batches
of a direction in their order, as a device does it, and then over directions, replicas and the stages that hold a tied
weight. So an engine with one replica, up to two directions, untied weights and no clipping has no other choice, and
agrees in every bit; in other cases it agrees to rounding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.hf.stage import CausalLMStage, Cut, recompute_layers
from paceline.hf.weights import load_stage
from paceline.runtime.micro_batches import MicroBatch, count_label_tokens, read_micro_batch
from paceline.schedules.stream import Stream

MakeOptimizer = Callable[[list[nn.Parameter]], Any]
"""Makes what has a ``step()``, such as one of ``torch.optim``, over these parameters."""


class Versions(NamedTuple):
    """Updates that the weights have had which a micro-batch uses in a stage."""

    forward: int
    backward: int


def versions_of(stream: Stream, num_steps: int, flushes: Collection[int] = ()) -> dict[tuple[int, int, int], Versions]:
    """By (step, micro-batch, stage), what ``stream`` says of a run of ``num_steps`` steps.

    Asserts that every micro-batch of every step goes through every stage once, and back once.
    """
    found: dict[str, dict[tuple[int, int, int], int]] = {"F": {}, "B": {}}
    for rank, row in enumerate(stream.versions(num_steps, flushes)):
        held = sorted(
            (direction, stage)
            for direction, route in enumerate(stream.routes)
            for stage, holder in enumerate(route)
            if holder == rank
        )
        for kind, step, micro_batch, chunk, version in row:
            direction, stage = held[chunk]
            assert direction == micro_batch % len(stream.routes), "a micro-batch in another direction than its own"
            assert (step, micro_batch, stage) not in found[kind], "a micro-batch counted twice"
            found[kind][step, micro_batch, stage] = version
    everything = {
        (step, micro_batch, stage)
        for step in range(num_steps)
        for micro_batch in range(stream.num_micro_batches)
        for stage in range(len(stream.routes[0]))
    }
    assert found["F"].keys() == found["B"].keys() == everything, "a micro-batch not counted"
    return {key: Versions(found["F"][key], found["B"][key]) for key in everything}


def cut(
    config: Any,
    num_stages: int,
    *,
    boundaries: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> list[CausalLMStage]:
    """All stages of a model with random weights, in this process.

    Args:
        boundaries: decoder layers where the stages begin, and the number of layers; by default equally many a stage.
        recompute: activations of each layer in the backward, which then uses that one's weights for them too.
    """
    layers = config.num_hidden_layers
    boundaries = boundaries or [stage * layers // num_stages for stage in range(num_stages + 1)]
    stages = []
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        part = Cut(start, stop, stage == 0, stage == num_stages - 1)
        stages.append(load_stage(None, config, part, dtype=dtype))
        stages[-1].train()
        if recompute:
            recompute_layers(stages[-1].model)
    return stages


class Emulator:
    """A run of ``num_steps`` steps, one call of :meth:`step` each.

    Args:
        stream: whose weights are used.
        stages: modules in order, each with ``forward(stream, side, routing)`` as of :class:`CausalLMStage`, the last
            one with its ``loss`` too. A parameter of the same name in two stages is one, and tied.
        make_optimizer: is given masters, which are fp32 where the stages are bf16 or fp16.
        num_steps: of the run, after which it is drained.
        flushes: steps after which it is drained too.
        clipping: norm that a step's gradient is scaled to at most; 0 for none.
        replicas: data-parallel ones, all of which run ``stream``.
    """

    def __init__(
        self,
        stream: Stream,
        stages: Sequence[Any],
        make_optimizer: MakeOptimizer,
        num_steps: int,
        *,
        flushes: Collection[int] = (),
        clipping: float = 0.0,
        replicas: int = 1,
    ) -> None:
        assert len(stages) == len(stream.routes[0]), "a module for each stage of a direction"
        self.stream, self.stages = stream, stages
        self.num_steps, self.clipping, self.replicas = num_steps, clipping, replicas
        self.steps_taken = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        """Of each step, before clipping."""
        self._versions = versions_of(stream, num_steps, flushes)
        self._parameters = [dict(stage.named_parameters()) for stage in stages]
        self._masters: dict[str, nn.Parameter] = {}
        for parameters in self._parameters:
            for name, parameter in parameters.items():
                value = parameter.detach().clone()
                master = self._masters.setdefault(name, nn.Parameter(value if _is_wide(value) else value.float()))
                assert torch.equal(master.to(value.dtype), value), f"{name} is tied, but differs"
        self._optimizer = make_optimizer(list(self._masters.values()))
        # No action of a step uses older weights than those from before the oldest step that is under way.
        self._history = deque([self._values()], maxlen=stream.most_lag + 1)
        self._in_place: list[int] = [0] * len(stages)

    @property
    def state(self) -> dict[str, Tensor]:
        """Values of all parameters after all updates so far, by name."""
        return {name: value.clone() for name, value in self._history[-1].items()}

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """All of a step: forwards, backwards and, in the end, its update. Returns the loss of the step.

        Args:
            batches: those of the first replica, then those of the next one.
        """
        size = self.stream.num_micro_batches
        assert len(batches) == size * self.replicas, f"{len(batches)} micro-batches for {self.replicas} times {size}"
        loaded = [read_micro_batch(batch) for batch in batches]
        label_tokens = max(sum(count_label_tokens(batch.labels) for batch in loaded), 1)
        total = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        loss = 0.0
        for replica in range(self.replicas):
            for direction in range(len(self.stream.routes)):
                for number in range(direction, size, len(self.stream.routes)):
                    loss += self._micro_batch(number, loaded[replica * size + number], label_tokens, len(loaded))
                self._collect(total)
        self._update(total)
        self.losses.append(loss)
        return loss

    def _micro_batch(self, number: int, batch: MicroBatch, label_tokens: int, num_losses: int) -> float:
        """Forward and backward; the gradient is added to that of the stages' parameters."""
        versions = [self._versions[self.steps_taken, number, stage] for stage in range(len(self.stages))]
        inputs: list[tuple[Tensor, Tensor | None]] = []
        outputs: list[tuple[Tensor, Tensor | None]] = []
        stream, routing = batch.input_ids, None
        for stage, module in enumerate(self.stages):
            self._put(stage, versions[stage].forward)
            if stage:  # what passes from stage to stage are values, not graphs
                stream = stream.detach().requires_grad_()
                routing = None if routing is None else routing.detach().requires_grad_()
            inputs.append((stream, routing))
            stream, routing = module(stream, batch.side, routing)
            outputs.append((stream, routing))
        loss = self.stages[-1].loss(stream, batch.labels, routing, label_tokens, router_share=1 / num_losses)
        outputs[-1] = (loss, None)
        gradients: list[Tensor | None] = [None, None]
        for stage in reversed(range(len(self.stages))):
            self._put(stage, versions[stage].backward)
            made = [(t, g) for t, g in zip(outputs[stage], gradients, strict=True) if t is not None]
            pairs = [(tensor, gradient) for tensor, gradient in made if tensor.requires_grad]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            gradients = [None if t is None else t.grad for t in inputs[stage]]
        return loss.item()

    def _put(self, stage: int, version: int) -> None:
        """Give a stage the weights after ``version`` updates, also to the backwards of graphs that it has made."""
        if self._in_place[stage] == version:
            return
        updates_ago = self.steps_taken - version
        assert updates_ago >= 0, f"weights after {version} updates in step {self.steps_taken}, which makes the next one"
        values = self._history[-1 - updates_ago]
        parameters = self._parameters[stage]
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(parameters.values())):
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
        self._in_place[stage] = version

    def _collect(self, total: Mapping[str, Tensor]) -> None:
        for parameters in self._parameters:
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    total[name].add_(parameter.grad)
                    parameter.grad = None

    def _update(self, total: Mapping[str, Tensor]) -> None:
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in total.values()))
        factor = min(1.0, self.clipping / (norm + 1e-6)) if self.clipping else 1.0
        for name, master in self._masters.items():
            master.grad = total[name].mul_(factor)
        self._optimizer.step()
        self.norms.append(norm)
        self.steps_taken += 1
        self._history.append(self._values())

    def _values(self) -> dict[str, Tensor]:
        """Copies of the masters in the dtypes of the stages."""
        dtypes = {name: p.dtype for parameters in self._parameters for name, p in parameters.items()}
        return {name: master.detach().to(dtypes[name], copy=True) for name, master in self._masters.items()}


def _is_wide(value: Tensor) -> bool:
    return value.dtype in (torch.float32, torch.float64)


class PlainRun(NamedTuple):
    """Losses and norms by step, and the parameters in the end."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def accumulate(
    config: Any,
    steps: Sequence[Sequence[Mapping[str, Tensor]]],
    make_optimizer: MakeOptimizer,
    *,
    clipping: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> PlainRun:
    """The unsplit Hugging Face model with its own forward, gradients accumulated over each step's micro-batches."""
    model = load_stage(None, config, Cut.whole(config.num_hidden_layers), dtype=dtype).model.train()
    optimizer = make_optimizer(list(model.parameters()))
    losses, norms = [], []
    for batches in steps:
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    state = {f"model.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    return PlainRun(losses, norms, state)
