"""What emulated training computes: layers that sleep for as long as an accelerator would compute.

The core is idle meanwhile, as it is with a real accelerator, so that more ranks than cores can share a machine. Of the
tensors that travel, only the first few values mean something: the weights act on those, and so does the loss, which
therefore tells whether schedules compute the same thing without costing the time of a real layer.

A layer sleeps for the gradient of its input and for that of its weight apart: each when that gradient is computed. Who
splits backwards, by whichever means, therefore moves the second sleep to where it computes gradients of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.device import DEVICE
from lab.kept import KEEPING

WIDTH = 8
"""Values that the layers compute with."""

LEARNING_RATE = 0.05

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": LEARNING_RATE},
    "Adam": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True},  # DeepSpeed's own would be compiled
}


class SpeedChange(NamedTuple):
    """From ``step`` on, the device of ``rank`` has ``speed``."""

    step: int
    rank: int
    speed: float


@dataclass(frozen=True)
class Emulation:
    """A pipeline to be emulated.

    Args:
        forward_s, backward_s: of one micro-batch on a device of speed 1, one value a layer.
        message_bytes: of an activation, and of its gradient (float32).
        num_micro_batches: of a step.
        speeds: of the ranks' devices. Empty: a rank a layer, all of speed 1.
        speed_changes: devices that get slower or faster while training goes on; steps count from the first warm-up.
        noise: each computation takes its time times a number drawn between 1 - noise and 1 + noise.
        layer_bytes: of parameters that every layer has besides its weight, and that it computes nothing with.
        is_frozen: whether those are not trained.
        optimizer: one of :data:`OPTIMIZERS`.
        weight_s: the part of each layer's ``backward_s`` in which the gradient of its weight is computed. Empty: half.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_bytes: int
    num_micro_batches: int
    speeds: tuple[float, ...] = ()
    speed_changes: tuple[SpeedChange, ...] = ()
    noise: float = 0.0
    layer_bytes: int = 0
    is_frozen: bool = False
    optimizer: str = "SGD"
    weight_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.speeds:
            object.__setattr__(self, "speeds", (1.0,) * len(self.forward_s))
        if len(self.forward_s) != len(self.backward_s):
            raise ValueError(
                f"{len(self.forward_s)} forward and {len(self.backward_s)} backward times: give one of each a layer"
            )
        if not self.weight_s:
            object.__setattr__(self, "weight_s", tuple(seconds / 2 for seconds in self.backward_s))
        if len(self.weight_s) != len(self.backward_s) or any(
            not 0 <= part <= whole for part, whole in zip(self.weight_s, self.backward_s, strict=True)
        ):
            raise ValueError(f"weight_s is {self.weight_s}: give a part of each of the backwards, {self.backward_s}")
        if self.message_bytes < 4 * WIDTH or self.message_bytes % 4:
            raise ValueError(f"message_bytes is {self.message_bytes}: it must be a multiple of 4, at least {4 * WIDTH}")
        if len(self.forward_s) < self.num_ranks:
            raise ValueError(f"{len(self.forward_s)} layers for {self.num_ranks} ranks: give each rank at least one")
        for rank, speed in [*enumerate(self.speeds), *((change.rank, change.speed) for change in self.speed_changes)]:
            if not (0 <= rank < self.num_ranks and speed > 0):
                raise ValueError(
                    f"speed {speed} of rank {rank}: it must be positive, of one of {self.num_ranks} ranks from 0"
                )
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise is {self.noise}: it must be at least 0 and less than 1")
        if self.layer_bytes < 0 or self.layer_bytes % 4:
            raise ValueError(f"layer_bytes is {self.layer_bytes}: it must be a multiple of 4, at least 0")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer}: choose from {', '.join(OPTIMIZERS)}")

    @classmethod
    def of(
        cls,
        num_ranks: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        message_bytes: int,
        num_micro_batches: int,
        *,
        num_layers: int | None = None,
        speeds: Sequence[float] = (1.0,),
        weight_s: Sequence[float] = (),
        **more: Any,
    ) -> Emulation:
        """As a command line gives it: one time for all layers, or one a layer; one speed for all ranks, or one a rank.

        Args:
            num_layers: as many as ranks by default.
            more: of the other fields, those that are not at their default.

        Raises:
            ValueError: another number of times or speeds.
        """
        num_layers = num_ranks if num_layers is None else num_layers
        forwards, backwards = (_each(times, num_layers, "times", "layer") for times in (forward_s, backward_s))
        each_speed = _each(speeds, num_ranks, "speeds", "rank")
        weights = _each(weight_s, num_layers, "times", "layer") if weight_s else ()
        return cls(forwards, backwards, message_bytes, num_micro_batches, each_speed, weight_s=weights, **more)

    @property
    def bound_s(self) -> float:
        """What a step takes where every rank has as many layers: the fill, the drain and the slowest stage's compute.

        No step takes less if the last stage is (one of) the slowest.
        """
        boundaries = [rank * self.num_layers // self.num_ranks for rank in range(self.num_ranks + 1)]
        each = [f + b for f, b in zip(*self.stage_s(boundaries), strict=True)]
        return sum(each) + (self.num_micro_batches - 1) * max(each)

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    @property
    def num_ranks(self) -> int:
        return len(self.speeds)

    def speeds_at(self, step: int) -> tuple[float, ...]:
        """Of the ranks' devices in a step."""
        speeds = list(self.speeds)
        for change in sorted(self.speed_changes):
            if change.step <= step:
                speeds[change.rank] = change.speed
        return tuple(speeds)

    def stage_s(
        self, boundaries: Sequence[int], speeds: Sequence[float] | None = None
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of a micro-batch's forward and of its backward on every stage.

        Args:
            boundaries: of the stages over the layers, one more than there are ranks.
            speeds: of the ranks' devices. Default: those at the beginning.
        """
        forward, backward = (
            tuple(
                sum(times[boundaries[rank] : boundaries[rank + 1]]) / speed
                for rank, speed in enumerate(speeds or self.speeds)
            )
            for times in (self.forward_s, self.backward_s)
        )
        return forward, backward

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs [1, message_bytes / 4] and labels [1, WIDTH] of the micro-batches; every step has the same."""
        chance = torch.Generator().manual_seed(0)
        made = []
        for _ in range(self.num_micro_batches):
            inputs = torch.zeros(1, self.message_bytes // 4)
            inputs[:, :WIDTH] = torch.randn(1, WIDTH, generator=chance)
            made.append((inputs, torch.randn(1, WIDTH, generator=chance)))
        return made

    def layer_arguments(self, index: int, share: int = 1) -> tuple[int, float, float, float, int, bool]:
        """Of :class:`EmulatedLayer`, for one of the ``share`` equal parts of a layer."""
        forward_s, backward_s, weight_s = (t[index] / share for t in (self.forward_s, self.backward_s, self.weight_s))
        ballast_bytes = self.layer_bytes // 4 // share * 4
        return index, forward_s, backward_s - weight_s, weight_s, ballast_bytes, self.is_frozen

    def layer(self, index: int, share: int = 1) -> EmulatedLayer:
        """A layer, or one of its ``share`` equal parts."""
        return EmulatedLayer(*self.layer_arguments(index, share))


def _each(values: Sequence[float], number: int, what: str, of: str) -> tuple[float, ...]:
    if len(values) not in (1, number):
        raise ValueError(f"{len(values)} {what} for {number} {of}s: give one, or one a {of}")
    return tuple(values) * (number // len(values))


class EmulatedLayer(nn.Module):
    """Multiplies the first values by a weight, and takes as many seconds of a device of speed 1 as it is told.

    It takes the time of the process that runs it, wherever it was built.

    Args:
        index: of the layer in the model.
        input_s, weight_s: of the backward, for the gradient of the input and for that of the weight.
        ballast_bytes: of parameters that nothing is computed with.
        is_frozen: whether those are not trained.
    """

    def __init__(
        self,
        index: int,
        forward_s: float,
        input_s: float,
        weight_s: float,
        ballast_bytes: int = 0,
        is_frozen: bool = False,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.linear.weight)
        # A hook of the gradient, which runs whenever it is computed: with the input's or later, by whichever engine.
        self.linear.weight.register_hook(partial(_take_weight_s, index, weight_s))
        ballast = torch.zeros(ballast_bytes // 4)
        self.ballast = nn.Parameter(ballast, requires_grad=not is_frozen) if ballast_bytes else None
        self.work = _Work(index, forward_s, input_s)
        # The first layer of a model computes a gradient of its input too: of what an embedding gives it.
        self.anchor = torch.zeros(1, requires_grad=True)
        self._last_step = -1

    def forward(self, hidden: Tensor) -> Tensor:
        first, rest = _Enter.apply(hidden, self.anchor, self.work)
        output: Tensor = _Leave.apply(rest, self.linear(first), self.ballast, self)
        return output

    def is_first_of_step(self) -> bool:
        """Whether this is the first backward of the step that the process is in."""
        is_first = self._last_step != DEVICE.step
        self._last_step = DEVICE.step
        return is_first


class _Work(NamedTuple):
    index: int
    forward_s: float
    input_s: float


def _take_weight_s(index: int, weight_s: float, gradient: Tensor) -> None:
    with DEVICE.computation("weight", -index, weight_s):
        pass


class _Enter(torch.autograd.Function):
    """The input as two tensors: the values that the layer computes with, and a copy of all."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
        DEVICE.begin("forward")
        first, rest = hidden[:, :WIDTH].clone(), hidden.clone()
        ctx.work, ctx.kept = work, KEEPING.begin(first)
        return first, rest

    @staticmethod
    def backward(ctx: Any, of_first: Tensor, of_rest: Tensor) -> tuple[Tensor, None, None]:
        with DEVICE.computation("backward", -ctx.work.index, ctx.work.input_s):
            of_hidden = of_rest.clone()
            of_hidden[:, :WIDTH] = of_first
        return of_hidden, None, None


class _Leave(torch.autograd.Function):
    """Puts the values that the layer has computed before the others, in place."""

    @staticmethod
    def forward(ctx: Any, rest: Tensor, first: Tensor, ballast: Tensor | None, layer: EmulatedLayer) -> Tensor:
        with DEVICE.computation("forward", layer.work.index, layer.work.forward_s):
            ctx.mark_dirty(rest)
            ctx.layer = layer
            rest[:, :WIDTH] = first
        return rest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        DEVICE.begin("backward")
        of_ballast = None
        # Zeros once a step: those of the other micro-batches would only be added up, at a real cost.
        trains = ctx.layer.ballast is not None and ctx.layer.ballast.requires_grad
        if trains and ctx.layer.is_first_of_step():
            of_ballast = gradient.new_zeros(1).expand_as(ctx.layer.ballast)
        return gradient, gradient[:, :WIDTH].clone(), of_ballast, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, label: Tensor) -> Tensor:
        with DEVICE.part_of_next("forward"):
            difference = output[:, :WIDTH] - label
            ctx.save_for_backward(difference)
            ctx.shape = output.shape
            return difference.square().mean()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        with DEVICE.part_of_next("backward"):
            (difference,) = ctx.saved_tensors
            of_output = difference.new_zeros(ctx.shape)
            of_output[:, :WIDTH] = difference * (gradient * (2 / difference.numel()))
            return of_output, None


def loss(output: Tensor, label: Tensor) -> Tensor:
    """Mean squared difference of what means something. Its time is part of the last layer's."""
    return _Loss.apply(output, label)
