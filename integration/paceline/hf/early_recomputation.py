"""Compute the activations of layers again before their backward asks for them.

torch's checkpoints (without reentrant autograd) compute a layer again when a backward looks up the first tensor of it.
Here each of them has one tensor more, an empty one, whose look-up does the same at any time; what is computed stays for
the backward (:class:`torch.utils.checkpoint.GraphExecGroup`). A forward that is repeated begins with the states of the
generators that the first one had, so the numbers are the same in every bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import GraphExecGroup, checkpoint

from ..measure.recorder import SavedBytes

_ANCHOR = torch.empty(0, requires_grad=True)


class _Now(threading.local):
    """State of a thread: whose forward it runs, and whether that is a repeated one."""

    checkpoints: Checkpoints | None = None
    repeats = False


_NOW = _Now()


class _Handle(torch.autograd.Function):
    """A node whose only saved tensor is empty."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(0))
        return torch.empty(0)


class _Counter:
    """Bytes of the layers that backwards have computed again."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        self.num_bytes = 0.0
        self._stage, self._device = stage, device

    @contextmanager
    def counting(self) -> Iterator[None]:
        saved = _SavedAgain(self._stage, self._device)
        try:
            with saved:
                yield
        finally:  # torch ends it with an exception
            self.num_bytes += saved.num_bytes


class _SavedAgain(SavedBytes):
    """Counts what a checkpoint is about to keep."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        super().__init__(stage, device)
        keep, give = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: keep(self._pack(tensor)), give)


class Checkpoints:
    """Layers of one stage whose activations for one micro-batch are computed again, in the order of the forward.

    Args:
        device: of the stage.
        counted: the stage, if the bytes are to be counted that its layers keep when its backward has computed them.
        keeps: the first layers that are not computed again: they keep their activations.
    """

    def __init__(self, device: torch.device, counted: nn.Module | None = None, *, keeps: int = 0) -> None:
        self._keeps = keeps
        self.num_layers = 0
        """Layers that have run, with those that keep their activations."""
        # Apart from this object: what is computed again refers to it, and this object to what is computed again.
        self._counter = None if counted is None else _Counter(counted, device)
        self._handles: list[Node] = []
        self._group: GraphExecGroup | None = None
        self._begun: Node | None = None

    @property
    def num_bytes(self) -> float | None:
        """Bytes that all of them keep together once they are computed again; None: nobody counts."""
        return None if self._counter is None else self._counter.num_bytes

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around the forward of the stage."""
        _NOW.checkpoints = self
        try:
            yield
        finally:
            _NOW.checkpoints = None

    @property
    def is_waiting(self) -> bool:
        """Whether there are layers to be computed again."""
        return bool(self._handles)

    def recompute(self) -> None:
        """Compute all of them again, the last one first."""
        handles, self._handles = self._handles, []
        self._group = GraphExecGroup()
        with self._group, _repeating():
            while handles:
                _ = handles.pop().saved_tensors  # type: ignore[attr-defined]

    def around_backward(self) -> AbstractContextManager[object]:
        """Around the backward of the stage, which finds what is computed, and computes what is not."""
        return nullcontext() if self._group is None else self._group

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of one layer."""
        self.num_layers += 1
        if self.num_layers <= self._keeps:
            return function(*args, **kwargs)
        counter = self._counter

        def with_handle(*args: Any, **kwargs: Any) -> Any:
            handle = _Handle.apply(_ANCHOR)
            if _NOW.checkpoints is not None:
                _NOW.checkpoints._begun = handle.grad_fn
            elif counter is not None:  # it is computed again
                with counter.counting():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        out = checkpoint(with_handle, *args, use_reentrant=False, **kwargs)
        begun, self._begun = self._begun, None
        if begun is not None and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(out)):
            self._handles.append(begun)
        return out


def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose activations are computed again; in transformers ``_gradient_checkpointing_func``."""
    if _NOW.checkpoints is None:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    return _NOW.checkpoints.run(function, *args, **kwargs)


def recompute_early(model: nn.Module) -> None:
    """Make it possible in all layers that are checkpointed as transformers does it, without options of one's own.

    No checkpoint stays a reentrant one: that gives no gradients where a layer's inputs ask for none, as they do behind
    stages that train nothing.
    """
    for part in model.modules():
        function = getattr(part, "_gradient_checkpointing_func", None)
        if not isinstance(function, partial):
            continue
        options = {**function.keywords, "use_reentrant": False}
        if function.func is checkpoint and len(options) == 1:
            part._gradient_checkpointing_func = checkpointed  # type: ignore[assignment]
        elif function.keywords.get("use_reentrant", function.func is checkpoint):
            part._gradient_checkpointing_func = partial(function.func, *function.args, **options)  # type: ignore[assignment]


@contextmanager
def _repeating() -> Iterator[None]:
    before, _NOW.repeats = _NOW.repeats, True
    try:
        yield
    finally:
        _NOW.repeats = before


def is_repeated() -> bool:
    """Whether the forward that runs now is that of a layer that is computed again."""
    return _NOW.repeats or torch._C._current_graph_task_id() != -1
