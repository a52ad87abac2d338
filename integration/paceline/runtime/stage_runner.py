"""Compute one stage that a rank holds: load, forward and backward of a micro-batch, and what neighbours get of it.

The numbers are those of DeepSpeed's own methods, which keep one loss for all micro-batches, copy what they receive, and
go through the hooks of an engine that has no pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor

from ..comm.formats import Parcel
from ..comm.shapes import Meta, Value, meta_of
from ..hf.early_recomputation import Checkpoints
from ..optim.gradient_buckets import Completes
from ..optim.linear_layers import Deferred
from .early_room import Extent
from .reach import Reach


class Live:
    """A micro-batch in one of a rank's stages, from its first operation to its last: all that is kept of it."""

    __slots__ = ("checkpoints", "gradients", "incoming", "inputs", "label_tokens", "labels", "outgoing", "outputs")

    def __init__(self) -> None:
        self.inputs: Any = None
        self.labels: Any = None
        self.label_tokens = 0
        """Of the whole step that it is of, where losses are shares of a step's."""
        self.outputs: Any = None
        self.gradients: Any = None
        """Gradients of the outputs, from the stage behind."""
        self.incoming: Parcel | None = None
        """Encoded activations from the stage before, until the forward begins."""
        self.outgoing: Parcel | None = None
        """What the last computation has encoded, until it is sent."""
        self.checkpoints: Checkpoints | None = None
        """Activations that may be computed again before the backward."""


@dataclass
class LossBook:
    """Losses of the step that runs, on the rank that computes them."""

    of_forwards: list[Any] = field(default_factory=list)
    total: Any = None
    additional: OrderedDict[str, Any] | None = None
    """Further losses that a ``PipelineModule`` reports, by name."""
    outputs: Any = None
    """Logits of the last micro-batch of an evaluation that wants them."""


class Surroundings(Protocol):
    """The engine's part in a computation."""

    def load(self) -> AbstractContextManager[Any]:
        """Around what brings a micro-batch to the device: timers."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around a forward: autocast, a profile of its operations."""

    def backward(self, completes: Completes, *, stage: int, is_of_weights: bool = False) -> AbstractContextManager[Any]:
        """Around a backward, or a part of one: timers, and the reduction of gradients that it completes."""

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale."""


class StageRunner(ABC):
    """One stage of the model on this rank.

    Args:
        stage: number of it.
        reach: which stages backwards reach.
        around: what the engine does around a computation.
    """

    def __init__(self, stage: int, num_stages: int, *, reach: Reach, around: Surroundings) -> None:
        self.stage, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self._reach, self._around = reach, around

    @property
    def runs_backward(self) -> bool:
        """Something trains on this stage or before it."""
        return self._reach.runs_backward(self.stage)

    @property
    def sends_gradients(self) -> bool:
        """Something trains before this stage."""
        return self._reach.sends_gradients(self.stage)

    def _graph(self) -> AbstractContextManager[Any]:
        """Around a forward: if no backward will come, autograd keeps nothing."""
        return nullcontext() if self.runs_backward else torch.no_grad()

    @abstractmethod
    def load(self, live: Live, number: int) -> None:
        """Inputs on the first stage, labels on the last, of the micro-batch of that number."""

    @abstractmethod
    def forward(self, live: Live, number: int) -> None:
        """From inputs to outputs, on the last stage to the loss."""

    @abstractmethod
    def backward(self, live: Live, number: int, completes: Completes = Completes.NOTHING) -> None:
        """From the outputs' gradients to those of the inputs; parameters add up theirs.

        Args:
            completes: gradients of this stage that no other backward of the step adds to.
        """

    def backward_weight(self, deferred: Deferred, completes: Completes = Completes.NOTHING) -> None:
        """Add up the gradients of weights that a backward of the inputs has left."""
        with self._around.backward(completes, stage=self.stage, is_of_weights=True):
            deferred.run()

    def most_deferred_bytes(self) -> float | None:
        """Bytes that a backward of the inputs would leave for later at most, for any micro-batch of the step; None: as
        many as are kept before, or nobody knows."""
        return None

    def may_keep(self) -> bool:
        """Whether there are activations that are computed again, and may be kept instead."""
        return False

    def checkpoints(self, *, counts: bool, keeps: int = 0) -> Checkpoints | None:
        """Those of a micro-batch; None: there are none.

        Args:
            counts: count their bytes in the backward.
            keeps: the first layers, so many, keep them instead.
        """
        return None

    def extent(self, number: int | None = None) -> Extent | None:
        """Size of a micro-batch; without a number, of the largest of the step."""
        return None

    # -- the boundary

    @abstractmethod
    def activation_key(self, number: int) -> Hashable:
        """Micro-batches with the same key have activations of the same shapes on every edge."""

    @abstractmethod
    def leaving(self, live: Live) -> Value:
        """Tensors for the next stage."""

    @abstractmethod
    def arrived(self, live: Live, number: int, value: Value) -> None:
        """Take the stage before's outputs as inputs."""

    @abstractmethod
    def gradient_meta(self, live: Live) -> Meta:
        """Shapes of the gradients that the next stage will send."""

    @abstractmethod
    def leaving_gradients(self, live: Live) -> Value:
        """Gradients of the inputs, for the stage before."""


class PlainRunner(StageRunner):
    """The stage of any :class:`deepspeed.pipe.PipelineModule`.

    Args:
        module: all that this rank holds.
        chunk: the stage itself, a part of it, as its layers lie now.
        batch: of a number: a micro-batch as ``(inputs, labels)``, each a tensor or several.
        losses: where the last stage puts them.
        wants: while an evaluation runs, ``(losses, outputs)``: what it asks for.
        num_micro_batches: by which a loss is divided, so that gradients are those of the mean.
        shapes_version: changes when the shapes of activations do.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        *,
        reach: Reach,
        around: Surroundings,
        module: PipelineModule,
        chunk: Callable[[], PipelineModule],
        device: torch.device,
        batch: Callable[[int], Any],
        losses: LossBook,
        wants: Callable[[], tuple[bool, bool]],
        num_micro_batches: Callable[[], int],
        shapes_version: Callable[[], int],
    ) -> None:
        super().__init__(stage, num_stages, reach=reach, around=around)
        self._module, self._chunk, self._device = module, chunk, device
        self._batch, self._losses = batch, losses
        self._wants, self._num_micro_batches = wants, num_micro_batches
        self._shapes_version = shapes_version

    def load(self, live: Live, number: int) -> None:
        with self._around.load():
            self._load(live, self._batch(number))

    def _load(self, live: Live, batch: Any) -> None:
        if self.is_first:
            # Recomputation that runs a backward inside of a backward needs an input that requires a gradient.
            interval, checkpoint = self._module.activation_checkpoint_interval, self._module.activation_checkpoint_func
            wants_gradient = interval > 0 and checkpoint is not ds_checkpointing.non_reentrant_checkpoint
            live.inputs = _each(batch[0], lambda tensor: self._input(tensor, wants_gradient))
        if self.is_last:
            live.labels = _each(batch[1], lambda tensor: tensor.to(self._device).detach())

    def _input(self, tensor: Tensor, wants_gradient: bool) -> Tensor:
        own = tensor.clone().detach().to(self._device)
        return own.requires_grad_(wants_gradient and own.is_floating_point())

    def forward(self, live: Live, number: int) -> None:
        inputs = _each(live.inputs, _writable)
        with self._graph(), self._around.forward():
            outputs = self._chunk()(inputs)
        if not self._module.training:
            ds_checkpointing.reset()
        live.outputs = self._loss(live, outputs) if self.is_last else outputs

    def _loss(self, live: Live, outputs: Any) -> Any:
        wants_loss, wants_outputs = self._wants()
        loss = outputs
        if wants_loss and self._module.loss_fn is not None:
            loss = self._module.loss_fn(outputs, live.labels)
        losses = self._losses
        if wants_outputs:
            losses.outputs = outputs
        losses.of_forwards.append(_detached(loss))
        if not torch.is_grad_enabled():
            return None
        losses.total = _added(losses.total, loss)
        additional = self._module.get_additional_losses()
        if additional is not None:
            totals = losses.additional or OrderedDict()
            for name, value in additional.items():
                totals[name] = _added(totals.get(name), value)
            losses.additional = totals
        return loss

    def backward(self, live: Live, number: int, completes: Completes = Completes.NOTHING) -> None:
        outputs, live.outputs = live.outputs, None
        # From each tensor of a tuple in turn, as DeepSpeed does, and with reentrant checkpointing (its own) several
        # times through a weight: a gradient is then not finished when it first arrives.
        once = self.is_last or not isinstance(outputs, tuple)
        if not once or self._module.activation_checkpoint_interval > 0:
            completes = Completes.NOTHING
        with self._around.backward(completes, stage=self.stage):
            if self.is_last:
                self._around.scaled(outputs / self._num_micro_batches()).backward()
            elif isinstance(outputs, tuple):
                pairs = list(zip((t for t in outputs if t.is_floating_point()), live.gradients, strict=True))
                pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
                for index, (tensor, gradient) in enumerate(pairs):
                    tensor.backward(gradient=gradient, retain_graph=index < len(pairs) - 1)
            elif outputs.requires_grad:  # not where all that it depends on is frozen for now
                outputs.backward(gradient=live.gradients)
        live.gradients = None

    def activation_key(self, number: int) -> Hashable:
        return self._shapes_version()

    def leaving(self, live: Live) -> Value:
        value: Value = live.outputs
        return value

    def arrived(self, live: Live, number: int, value: Value) -> None:
        needs = torch.is_grad_enabled() and self.sends_gradients
        for tensor in value if isinstance(value, tuple) else (value,):
            tensor.requires_grad_(needs and tensor.is_floating_point())
        live.inputs = value

    def gradient_meta(self, live: Live) -> Meta:
        outputs = live.outputs
        if isinstance(outputs, tuple):
            return meta_of(tuple(tensor for tensor in outputs if tensor.is_floating_point()))
        return meta_of(outputs)

    def leaving_gradients(self, live: Live) -> Value:
        if not isinstance(live.inputs, tuple):
            return gradient_of(live.inputs)
        return tuple(gradient_of(tensor) for tensor in live.inputs if tensor.is_floating_point())


def _writable(tensor: Tensor) -> Tensor:
    """The same memory, which a layer may write to although it is an input whose gradient is asked for; no copy."""
    # Autograd does not take what this gives for a view, so that it is no part of the leaf.
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor.requires_grad else tensor


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of an input that came from another stage; zeros where the loss does not depend on it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _each(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """``act`` on a tensor, or on each of several, which become a tuple; anything else stays as it is."""
    if isinstance(value, (tuple, list)):
        return tuple(act(tensor) for tensor in value)
    return act(value) if isinstance(value, Tensor) else value


def _detached(loss: Any) -> Any:
    return loss.detach() if isinstance(loss, Tensor) else [part.detach() for part in loss]


def _added(total: Any, loss: Any) -> Any:
    """The running sum of losses, each a tensor or several."""
    if isinstance(loss, Tensor):
        return loss.detach().clone() if total is None else total + loss.detach()
    return [_added(None if total is None else total[index], part) for index, part in enumerate(loss)]
