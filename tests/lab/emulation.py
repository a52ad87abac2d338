"""What emulated training computes: layers that sleep for as long as an accelerator would compute.

The core is idle meanwhile, as it is with a real accelerator, so that more ranks than cores can share a machine. Of the
tensors that travel, only the first few values mean something: the weights act on those, and so does the loss, which
therefore tells whether schedules compute the same thing without costing the time of a real layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

WIDTH = 8
"""Values that the layers compute with."""

LEARNING_RATE = 0.05


AWAKE_S = 0.0005
"""Before the end of a computation: an accelerator is not late by what a sleeping process takes to wake up."""


@dataclass(frozen=True)
class Emulation:
    """A pipeline to be emulated.

    Args:
        forward_s, backward_s: of one micro-batch, one value a rank.
        message_bytes: of an activation, and of its gradient (float32).
        num_micro_batches: of a step.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_bytes: int
    num_micro_batches: int

    def __post_init__(self) -> None:
        if len(self.forward_s) != len(self.backward_s):
            raise ValueError(
                f"{len(self.forward_s)} forward and {len(self.backward_s)} backward times: give one of each a rank"
            )
        if self.message_bytes < 4 * WIDTH or self.message_bytes % 4:
            raise ValueError(f"message_bytes is {self.message_bytes}: it must be a multiple of 4, at least {4 * WIDTH}")

    @classmethod
    def of(
        cls,
        num_ranks: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        message_bytes: int,
        num_micro_batches: int,
    ) -> Emulation:
        """As a command line gives it: one time for all ranks, or one a rank.

        Raises:
            ValueError: another number of times.
        """
        for times in (forward_s, backward_s):
            if len(times) not in (1, num_ranks):
                raise ValueError(f"{len(times)} times for {num_ranks} ranks: give one, or one a rank")
        each = [tuple(times) * (num_ranks // len(times)) for times in (forward_s, backward_s)]
        return cls(*each, message_bytes, num_micro_batches)

    @property
    def bound_s(self) -> float:
        """What a step takes at least: a network that costs nothing, steps that begin when the one before has ended."""
        each = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        return sum(each) + (self.num_micro_batches - 1) * max(each)

    @property
    def num_ranks(self) -> int:
        return len(self.forward_s)

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

    def layer(self, rank: int, share: int = 1) -> EmulatedLayer:
        """One of the ``share`` layers that ``rank`` has."""
        return EmulatedLayer(self.forward_s[rank] / share, self.backward_s[rank] / share)


class EmulatedLayer(nn.Module):
    """Takes ``forward_s`` and ``backward_s`` seconds; multiplies the first values by a weight."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, hidden: Tensor) -> Tensor:
        return _Sleep.apply(hidden, self.weight, self.forward_s, self.backward_s)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        begin = time.perf_counter() - _loss.taken("forward")
        ctx.save_for_backward(hidden[:, :WIDTH].clone(), weight)
        ctx.backward_s = backward_s
        output = hidden.clone()
        output[:, :WIDTH] *= weight
        _sleep_until(begin + forward_s)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        begin = time.perf_counter() - _loss.taken("backward")
        hidden, weight = ctx.saved_tensors
        of_weight = (gradient[:, :WIDTH] * hidden).sum(0)
        of_hidden = gradient.clone()
        of_hidden[:, :WIDTH] *= weight
        _sleep_until(begin + ctx.backward_s)
        return of_hidden, of_weight, None, None


class _LossTime:
    """What the loss took, until the last layer takes as much less: the two together are the stage's computation."""

    def __init__(self) -> None:
        self._seconds = {"forward": 0.0, "backward": 0.0}

    def add(self, kind: str, begin: float) -> None:
        self._seconds[kind] += time.perf_counter() - begin

    def taken(self, kind: str) -> float:
        seconds, self._seconds[kind] = self._seconds[kind], 0.0
        return seconds


_loss = _LossTime()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, label: Tensor) -> Tensor:
        begin = time.perf_counter()
        difference = output[:, :WIDTH] - label
        ctx.save_for_backward(difference)
        ctx.shape = output.shape
        value = difference.square().mean()
        _loss.add("forward", begin)
        return value

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        begin = time.perf_counter()
        (difference,) = ctx.saved_tensors
        of_output = difference.new_zeros(ctx.shape)
        of_output[:, :WIDTH] = difference * (gradient * (2 / difference.numel()))
        _loss.add("backward", begin)
        return of_output, None


def loss(output: Tensor, label: Tensor) -> Tensor:
    """Mean squared difference of what means something."""
    return _Loss.apply(output, label)


def _sleep_until(moment: float) -> None:
    if (seconds := moment - time.perf_counter() - AWAKE_S) > 0:
        time.sleep(seconds)
    while time.perf_counter() < moment:
        time.sleep(0)
