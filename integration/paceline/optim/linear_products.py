"""The product of a linear layer and its gradients, as autograd functions compute them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
    """y = x W' + b.

    Args:
        x: [..., D_in], as autocast has it.
        weight: [D_out, D_in], or transposed.
    """
    weight = weight.t() if is_transposed else weight
    if torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def input_gradient(dy: Tensor, weight: Tensor, *, is_transposed: bool) -> Tensor:
    """Gradient of the rows of the input.

    Args:
        dy: gradients of the rows of the output [rows, D_out].
        weight: [D_out, D_in], or transposed.
    """
    wide = weight.to(dy.dtype)
    return dy @ (wide.t() if is_transposed else wide)


def as_autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast multiplies in, if it is on."""
    dtype = dtype_of_products(x)
    return x if dtype == x.dtype else x.to(dtype)


def dtype_of_products(x: Tensor) -> torch.dtype:
    """Dtype that ``x`` is multiplied in."""
    device = x.device.type
    is_rounded = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_rounded else x.dtype


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """A backward may be called where autocast is on, which would round what is computed."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class Tap(NamedTuple):
    """Inputs of a compiled graph through which the factors of a linear layer's weight gradient come out of it.

    A compiled backward is one graph, and all that comes out of it are gradients of the graph's inputs. ``inputs`` and
    ``outputs`` are inputs that nothing reads; their gradients are the factors (:class:`TappedFunction`). The weight is
    one without a gradient.

    Shapes: ``weight`` [D_out, D_in] or transposed, ``bias`` [D_out], ``inputs`` [rows, D_in], ``outputs``
    [rows, D_out].
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    outputs: Tensor


class TappedFunction(torch.autograd.Function):
    """y = x W' + b, whose backward gives the rows of x and of y's gradient as the gradients of a tap's placeholders."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, outputs: Tensor, is_transposed: bool
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.is_transposed = is_transposed
        return linear(x, weight, bias, is_transposed=is_transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        with full_precision(dy):
            dx = input_gradient(rows, weight, is_transposed=ctx.is_transposed).view(x.shape)
        # Detached, as in layers that are not compiled: torch runs a graph's code uncompiled where there are too many.
        return dx, None, None, x.detach().reshape(-1, x.shape[-1]), rows, None
