"""Gradients accumulated in buckets, and reduced to their owners during the last backward pass of a step.

A backward may be split, into that of the inputs and that of the weights: gradients of weights that are left for later
are complete with the last of the second kind, all others with the last of the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial

import torch
from torch import Tensor, nn

from .buckets import Buffers, DomainBucket
from .direct_exchange import ReductionThread
from .parameter_layout import ParameterLayout
from .step_options import StepOptions
from .task_queue import Times


class Completes(Flag):
    """Gradients of a stage that are complete, for this step, with one of its backwards, or with a part of one."""

    NOTHING = 0
    WITH_INPUTS = auto()
    """Those that come with the gradients of inputs."""
    LEFT = auto()
    """Those that a split backward leaves for later."""
    ALL = WITH_INPUTS | LEFT


@dataclass(eq=False)
class Taken:
    """Complete gradients of one bucket, which belong to an update.

    Args:
        memory: of the gradients, and of the new values once the owners have stepped; to be given back to ``buffers``.
        values: place of the new values: the beginning of ``memory``, if they fit there.
        views: gradients by number of the parameter.
        touched: parameters that a backward of this rank has reached.
    """

    buffers: Buffers
    memory: Tensor
    values: Tensor
    views: dict[int, Tensor]
    touched: set[int]


class GradientBuckets:
    """Collects the gradients of all parameters: in buckets, or where autograd puts them if nobody else needs them.

    In the first step it is yet to be seen whose gradients come in several parts, and in the first with split backwards,
    whose are left for later: nothing is reduced early.
    """

    def __init__(self, layout: ParameterLayout, times: Callable[[], Times], options: StepOptions) -> None:
        self._layout, self._times, self._has_peers = layout, times, layout.num_ranks > 1
        self._reduces_early = options.overlap and self._has_peers and not layout.is_asynchronous
        self._communication_dtype = options.communication_dtype
        self._scale_is_dynamic = bool(options.loss_scaler is not None and options.loss_scaler.dynamic)
        self._touched = [False] * len(layout.parameters)
        self._fired: set[int] = set()
        self._left: set[int] = set()
        """Parameters of which a split backward has left gradients for later, or a part of them."""
        self._stages: dict[int, int] = {}
        """Stage that a parameter's gradients come from; several may lie on a rank."""
        self._completes, self._stage, self._is_of_weights = Completes.NOTHING, 0, False
        self._has_stepped = self._has_split = self._splits = False
        self._next = 0  # bucket that is reduced next: the same order on all ranks
        self.buffers: list[Buffers] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        for part in layout.buckets if layout.has_memory else ():
            holds_values = part.shard or layout.is_asynchronous
            buffers = Buffers(part, layout.parameters, layout.gradient_dtype, holds_values=holds_values)
            self.buffers.append(buffers)
            for index in part.bucket.parameters:
                collect = partial(_collect, weakref.ref(self), index)
                parameter = layout.parameters[index]
                is_trained = parameter.requires_grad  # one that is frozen for now may be trained again
                self.hooks.append(parameter.requires_grad_().register_post_accumulate_grad_hook(collect))
                parameter.requires_grad_(is_trained)
        self._buffers_of = {index: buffers for buffers in self.buffers for index in buffers.views}
        # Messages need memory to receive into: they wait for their turn, the backward does not.
        takes_turns = not layout.is_asynchronous and any(buffers.takes_turns for buffers in self.buffers)
        self._thread = ReductionThread() if takes_turns else None

    @contextmanager
    def backward(
        self, completes: Completes = Completes.ALL, *, stage: int = 0, is_of_weights: bool = False
    ) -> Iterator[None]:
        """Around one backward of a stage, or a part of one. Buckets are reduced as their gradients are complete.

        Args:
            is_of_weights: this is the second part of a split backward.
        """
        self._fired.clear()
        self._splits |= is_of_weights
        is_known = self._has_split if self._splits or completes is Completes.WITH_INPUTS else self._has_stepped
        self._completes = completes if self._reduces_early and is_known else Completes.NOTHING
        self._stage, self._is_of_weights = stage, is_of_weights
        try:
            yield
        finally:
            self._completes = Completes.NOTHING

    @torch.no_grad()
    def collect(self, index: int, parameter: nn.Parameter) -> None:
        """Take in a parameter's gradient of one micro-batch, which autograd has finished."""
        buffers, gradient = self._buffers_of[index], parameter.grad
        if gradient is None:  # autograd calls also where a compiled layer has none for a parameter of its own
            return
        assert not buffers.is_reduced, f"{self._layout.names[index]}: a gradient after the reduction"
        if buffers.is_lent:
            if self._scale_is_dynamic and buffers.num_lent:
                raise ValueError(
                    "a gradient came before the update of the step before was applied, and the loss scale is dynamic: "
                    'gradients of one step would have different scales; set fp16.loss_scale, or use "bf16".'
                )
            buffers.renew()
        if index in self._fired:  # twice in one backward, as where a layer checkpoints itself: none is known to be last
            buffers.waits = True
        self._fired.add(index)
        if self._stages.setdefault(index, self._stage) != self._stage:
            buffers.waits = True
        if self._is_of_weights:
            self._left.add(index)
        view = buffers.views[index]
        if gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
            if self._touched[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            # From now on autograd adds into the bucket itself, where it can.
            parameter.grad = view if view.dtype == parameter.dtype else None
        self._touched[index] = True
        if (Completes.LEFT if index in self._left else Completes.WITH_INPUTS) in self._completes:
            buffers.unfinished -= 1
            while self._next < len(self.buffers) and self.buffers[self._next].is_finished:
                self._reduce(self.buffers[self._next])

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The accumulated gradient of a parameter that is here; zeros where no backward reached it.

        It counts as reached then, unless it is frozen for now: the step is to leave that alone.
        """
        index = self._layout.index_of[parameter]
        if not self.buffers:
            if parameter.grad is None and not parameter.requires_grad:
                return torch.zeros_like(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        buffers = self._buffers_of[index]
        if buffers.is_lent:
            buffers.renew()
        if not self._touched[index]:
            buffers.views[index].zero_()
            self._touched[index] = parameter.requires_grad
        return buffers.views[index]

    def start_reduction(self) -> None:
        """Begin the reduction of what the last backward has not begun. Collective over the group."""
        while self._has_peers and self._next < len(self.buffers):
            self._reduce(self.buffers[self._next])

    def _reduce(self, buffers: Buffers) -> None:
        self._next += 1
        for earlier in self.buffers[: self._next]:  # what was sent in another dtype is a copy: do not keep it long
            if earlier.works and all(reduction.is_there() for reduction in earlier.works):
                earlier.finish_reduction()
        for index, view in buffers.views.items():
            if not self._touched[index]:
                view.zero_()
        buffers.start_reduction(self._communication_dtype, self._thread)

    def reduced(self) -> tuple[Sequence[Tensor | None], Sequence[bool]]:
        """Gradients by number of the parameter, reduced, and which of them this rank's backward has reached.

        Collective over the group.
        """
        if self._has_peers:
            num_bytes = sum(buffers.gradients.nbytes for buffers in self.buffers if buffers.works)
            with self._times().transfer("gradients", num_bytes):
                self.start_reduction()
                for buffers in self.buffers:
                    buffers.finish_reduction()
        self._has_stepped, self._has_split, self._splits = True, self._has_split or self._splits, False
        if not self.buffers:
            gradients = [parameter.grad for parameter in self._layout.parameters]
            return gradients, [gradient is not None for gradient in gradients]
        return [self._buffers_of[index].views[index] for index in range(len(self._touched))], self._touched

    def take(self, buffers: Buffers) -> Taken:
        """Take the gradients of a bucket away, which are complete; coming ones go to other memory."""
        if buffers.is_lent:
            buffers.renew()
        touched = {index for index in buffers.views if self._touched[index]}
        for index in buffers.views:
            self._touched[index] = False
            self._layout.parameters[index].grad = None
        memory, values = buffers.lend(), buffers.values
        assert values is not None
        has_room = memory.element_size() >= values.element_size()
        place = memory.view(values.dtype)[: values.numel()] if has_room else torch.empty_like(values)
        return Taken(buffers, memory, place, buffers.views, touched)

    def publish_values(self) -> None:
        """Bring the owners' values to all. Collective over the group."""
        if self._layout.is_sharded:
            held = ((buffers.part, buffers.values) for buffers in self.buffers)
            publish([(part, values) for part, values in held if values is not None], self._times())

    def zero(self) -> None:
        """Forget all gradients that are not taken; the buckets' memory stays."""
        for parameter in self._layout.parameters:
            parameter.grad = None
        self._touched = [False] * len(self._touched)
        self._next = 0
        for buffers in self.buffers:
            buffers.reset()

    def num_bytes(self) -> int:
        """Bytes of gradients on this rank."""
        if self.buffers:
            return sum(buffers.gradient_bytes() for buffers in self.buffers)
        return sum(parameter.nbytes for parameter in self._layout.parameters)

    def coming_bytes(self) -> int:
        """Bytes that the gradients of a step will take and do not take yet: those without memory of their own."""
        coming = (p for p in self._layout.parameters if p.requires_grad and p.grad is None)
        return 0 if self.buffers else sum(parameter.nbytes for parameter in coming)

    def release(self, *, keep_values: bool = False) -> None:
        """Take the hooks off and forget gradients; unless ``keep_values``, parameters have memory of their own then."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self._thread is not None:
            self._thread.stop()
        self.zero()
        for buffers in self.buffers if not keep_values else ():
            buffers.move_values_out()
        self.buffers.clear()
        self._buffers_of.clear()


def publish(values: Iterable[tuple[DomainBucket, Tensor]], times: Times) -> None:
    """Bring the owners' part of ``values`` of each bucket to all. Collective over their domains."""
    sharded = [(part, memory) for part, memory in values if part.shard]
    with times.transfer("values", sum(memory.nbytes for _, memory in sharded)):
        for work in [work for part, memory in sharded for work in part.start_publishing(memory)]:
            work.wait()


def _collect(buckets: weakref.ref[GradientBuckets], index: int, parameter: nn.Parameter) -> None:
    """Called by autograd. Tensors hold their hooks where the garbage collector does not look: no engine behind these
    would ever be freed."""
    found = buckets()
    if found is not None:  # or the model outlives its engine
        found.collect(index, parameter)
