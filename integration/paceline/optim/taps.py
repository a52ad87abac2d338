"""Factors of the weight gradients of linear layers within compiled graphs.

A graph is traced once and runs for all layers that are alike, so nothing of one layer's can be called from within its
backward. The factors come out of it as gradients instead (:class:`.linear_products.Tap`), and reach the layers here, in
the node of autograd that made the placeholders. What becomes of them is as in layers that are not compiled: they are
left for later, or multiplied at once in the layer's own way, as natural gradients are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .linear_layers import OwnLinear
from .linear_products import Tap, dtype_of_products, full_precision


@contextmanager
def tapped(layers: Sequence[OwnLinear], like: Tensor) -> Iterator[None]:
    """Around the forward of a compiled graph: have the factors of these layers come out of its backward.

    A layer whose rows are others, such as one of an expert, or that is called a second time, ends the graph and runs
    between two: as without.

    Args:
        layers: linear layers of the graph that need their factors.
        like: the graph's hidden states [..., D], which have as many rows as each layer's input.
    """
    if not layers:
        yield
        return
    rows = like.numel() // like.shape[-1]
    leaves: list[Tensor | None] = []
    for layer in layers:
        assert layer.deferral is not None or layer.sees_factors
        if layer.deferral is not None and layer.is_deferred:
            leaves += [layer.deferral.anchor, None]
        else:
            leaves += [layer.weight, layer.bias]
    placeholders = _Taps.apply(layers, rows, *leaves)
    try:
        for index, layer in enumerate(layers):
            bias = layer.bias
            pair = placeholders[2 * index : 2 * index + 2]
            vars(layer)["tap"] = Tap(_constant(layer.weight), None if bias is None else _constant(bias), *pair)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("tap", None)


def _constant(parameter: nn.Parameter) -> nn.Parameter:
    """The same memory without a gradient: a parameter, too, whose sizes a graph has as numbers for all lengths."""
    return nn.Parameter(parameter, requires_grad=False)


class _Taps(torch.autograd.Function):
    """Makes the placeholders of layers, and gets their factors as gradients.

    The layers' own parameters are its inputs, where their gradients are computed at once.
    """

    @staticmethod
    def forward(ctx: Any, layers: Sequence[OwnLinear], rows: int, *leaves: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.deferrals = [(layer, layer.deferral if layer.is_deferred else None) for layer in layers]
        found = []
        for layer in layers:
            weight = layer.weight
            dim_out, dim_in = reversed(weight.shape) if layer.is_transposed else weight.shape
            dtype = dtype_of_products(weight)
            for dim in (dim_in, dim_out):  # one number of memory each
                found.append(torch.empty_strided((rows, dim), (0, 0), dtype=dtype, device=weight.device))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *factors: Tensor | None) -> Any:
        found: list[Tensor | None] = [None, None]
        for index, (layer, deferral) in enumerate(ctx.deferrals):
            inputs, outputs = factors[2 * index : 2 * index + 2]
            dw = db = None
            if inputs is not None and outputs is not None:
                if deferral is not None:
                    deferral.leave(layer, inputs, outputs)
                else:
                    with full_precision(outputs):
                        dw, db = layer.gradients(inputs, outputs)
                    dw = None if dw is None else dw.to(layer.weight.dtype)
            found += [dw, db]
        return tuple(found)
