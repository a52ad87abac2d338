"""Decoder layers whose kernels ``torch.compile`` fuses, one graph for all layers that are alike.

Each layer is compiled alone. What it keeps for a micro-batch's backward belongs to that micro-batch, as without, so
forwards and backwards may come in any schedule's order; and what moves, measures or recomputes single layers finds them
as they were. Linear layers that leave the gradients of their weights for later, or compute them in another way, get the
factors out of the graph. Stacked experts that leave theirs run uncompiled, between two graphs.

Where layers may be cut in halves, each half is compiled alone, also of a layer that a stage has whole: a half has the
same kernels, and so the same numbers and times, wherever the other one is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Protocol

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.deprecation import deprecate_kwarg

from ..config.run_plan import RunPlan
from ..hf.layer_profile import CompileLayers
from ..hf.own_class import Own, become, plain_class
from ..hf.stage import HalfLayer, PassThrough, take_out_half
from ..optim.linear_layers import OwnLinear
from ..optim.taps import tapped

logger = logging.getLogger("paceline")

MOST_GRAPHS = 64
"""Graphs of one class of layers. Beyond so many, torch runs them uncompiled."""


class Forward(Protocol):
    """The forward of a class of layers."""

    def __call__(self, layer: nn.Module, /, *args: object, **kwargs: object) -> object: ...


class CompiledLayer(Own):
    """A decoder layer with a compiled forward."""

    compiled: Forward
    parts: tuple[nn.Module, ...]
    """The layer and all modules in it."""
    pieces: tuple[nn.Module, ...] = ()
    """Both halves of the layer, if it runs in halves: modules that share its children, each compiled."""

    def forward(self, *args: object, **kwargs: object) -> object:
        assert isinstance(self, nn.Module)
        if self.pieces:
            for piece in self.pieces:
                piece.training = self.training
            return self._forward_in_halves(*args, **kwargs)
        _set_up_torch()
        if not torch.is_grad_enabled():
            return self.compiled(self, *args, **kwargs)
        layers = [part for part in self.parts if isinstance(part, OwnLinear) and part.needs_factors]
        hidden_states = next(iter((*args, *kwargs.values())))
        assert isinstance(hidden_states, torch.Tensor)
        with tapped(layers, hidden_states):
            return self.compiled(self, *args, **kwargs)

    def _forward_in_halves(self, *args: object, **kwargs: object) -> object:
        """What the layer returns: the second half's hidden states, and beside them what either half knows."""
        first, second = self.pieces
        between = first(*args, **kwargs)
        stream = between[0] if isinstance(between, tuple) else between
        if args:
            args = (stream, *args[1:])
        else:
            kwargs[next(iter(kwargs))] = stream
        out = second(*args, **kwargs)
        if not isinstance(out, tuple):
            return out
        return (
            out[0],
            *(late if late is not None else early for early, late in zip(between[1:], out[1:], strict=True)),
        )


class CompiledForwards:
    """Compiled forwards of classes of layers.

    Args:
        compiled: ``torch.compile`` with its arguments.
    """

    def __init__(self, compiled: Callable[[Forward], Forward]) -> None:
        self._compiled = compiled
        self._of: dict[type[nn.Module], Forward] = {}

    def adopt(self, layers: Iterable[nn.Module], *, in_halves: bool = False) -> None:
        """Let these layers run compiled; placeholders stay as they are. To be called again when modules of a layer
        were replaced.

        Args:
            in_halves: layers may be cut between attention and MLP.
        """
        for layer in layers:
            if "forward" in vars(layer):
                logger.warning("a %s has a forward of its own, and is not compiled", type(layer).__name__)
            elif not isinstance(layer, PassThrough):
                self._adopt(layer)
                has_both = in_halves and all(map(partial(_holds, layer), range(2)))
                vars(layer)["pieces"] = tuple(self._piece(layer, half) for half in range(2)) if has_both else ()

    def _adopt(self, layer: nn.Module) -> None:
        kind = plain_class(layer)
        if kind not in self._of:
            self._of[kind] = self._compiled(_single(kind.forward))
        become(layer, CompiledLayer).compiled = self._of[kind]
        vars(layer)["parts"] = tuple(layer.modules())

    def _piece(self, layer: nn.Module, half: int) -> nn.Module:
        """The first (0) or second (1) half of a layer as a layer: it has placeholders for the other half's modules."""
        piece = copy.copy(layer)  # of its plain class, and without attributes of ours
        vars(piece).update(vars(nn.Module()), gradient_checkpointing=False)  # the layer has the hooks, and recomputes
        piece._modules = dict(layer._modules)
        take_out_half(piece, 1 - half)
        self._adopt(piece)
        return piece


def run_of_half(layer: nn.Module, half: int) -> nn.Module | None:
    """The module that runs when the first (0) or second (1) half of a compiled layer does; None where no module is
    called that is this half alone: the layer is not compiled."""
    if not isinstance(layer, CompiledLayer):
        return None
    return layer.pieces[half] if layer.pieces else layer


def _holds(layer: nn.Module, half: int) -> bool:
    """Whether a stage has this half of a layer."""
    return any(not isinstance(child, PassThrough) for child in HalfLayer(layer, half).children())


def compiled_forwards(*args: object, **kwargs: object) -> CompiledForwards:
    """By ``torch.compile`` with these arguments."""
    _set_up_torch()
    # Of several graphs for an input the one made first, not the one that ran last: a layer that is recomputed runs what
    # its forward ran, whatever the lengths of micro-batches between have had made.
    if (set_lru := getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)) is not None:
        set_lru(False)
    return CompiledForwards(partial(torch.compile, *args, **kwargs))


def _set_up_torch() -> None:
    """Settings that torch 2.13 keeps for each thread by itself.

    A GPU's backward, which recomputes layers, runs in a thread of torch's own.
    """
    settings = torch._dynamo.config
    is_set_up = not (settings.skip_nnmodule_hook_guards or settings.force_nn_module_property_static_shapes)
    if is_set_up and settings.recompile_limit >= MOST_GRAPHS:
        return  # to set them anew costs more than to look
    # Counted by code, and layers of a model differ: in kinds of attention, masks, frozen weights.
    settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
    # Or a graph that was made without a hook, such as the one that collects a router's logits, runs without it.
    settings.skip_nnmodule_hook_guards = False
    # Or there is a graph for each length: taps, whose placeholders have as many rows, are attributes of linear layers.
    settings.force_nn_module_property_static_shapes = False


def compile_layers_of(plan: RunPlan) -> CompileLayers | None:
    """How layers are compiled that are measured before there is a pipeline; None where they run as they are."""
    return None if plan.compile is None else compiled_forwards(**plan.compile.arguments).adopt


def _single(forward: Forward) -> Forward:
    """Without transformers' wrappers around it, whose code all classes share: torch counts graphs by code, up to a
    limit. What they do is done by that of the compiled layer's class, which is around this one; names of arguments that
    transformers has given up are not translated."""
    while getattr(forward, "__code__", None) in _WRAPPERS:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def _wrappers() -> Iterator[CodeType]:
    def forward(self: object, current: object = None) -> None: ...

    renaming = deprecate_kwarg("former", "99", new_name="current")(forward)
    probe: object = type("Probe", (GradientCheckpointingLayer,), {"forward": renaming}).__dict__["forward"]
    while isinstance(probe, FunctionType) and hasattr(probe, "__wrapped__"):
        yield probe.__code__
        probe = probe.__wrapped__


_WRAPPERS = frozenset(_wrappers())
