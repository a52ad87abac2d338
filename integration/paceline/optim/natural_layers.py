"""Natural gradients in a model: what backward gives its linear layers and experts as gradients of their weights.

Everything after that (accumulation, reduction, clipping, ZeRO, the optimizer) sees ordinary gradients, and what a layer
passes down to those below is untouched. Embeddings, norms and other parameters keep their gradients.

* ``nn.Linear`` and Hugging Face's ``Conv1D``: rows of inputs and of derivatives of the outputs, as in Kaldi
  (:class:`~paceline.optim.natural_gradient.AffineNaturalGradient`).
* Experts that are stacked in one tensor (E, D_out, D_in), whose rows no layer of ours sees: the rows of their gradient
  and of its transpose, all experts' together, as Kaldi does it for convolutions.

Ranks with different data learn different estimates, and each divides its own share of a gradient by its own: nothing is
exchanged, and the sum is a natural gradient of the mean of their estimates to first order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..config.natural_gradient import NaturalGradientConfig
from .natural_gradient import AffineNaturalGradient, OnlineNaturalGradient

MAX_ROWS = 1024
"""Rows of a micro-batch that are learned from, unless the config says otherwise."""

MINIBATCHES_HISTORY = 10.0
"""Micro-batches that an estimate reaches back, unless the config says otherwise: language models have many rows each,
and counted by the row all but the last micro-batch would be forgotten."""

_EXPERTS = "experts"


class NaturalGradients:
    """The natural gradients of a module's layers, made when backward first reaches them.

    Args:
        options: which layers, and how.
        unit: given the rows of a micro-batch: times a gradient it is that of a loss *summed* over the rows. Undoes the
            mean over tokens and the loss scale, without which gradients would be too small to learn from.
        name_of: names under which parameters are saved, from those in the module.
    """

    def __init__(
        self, options: NaturalGradientConfig, unit: Callable[[int], float], name_of: Callable[[str], str] = str
    ) -> None:
        self.options, self.unit, self._name_of = options, unit, name_of
        self.layers: dict[str, AffineNaturalGradient] = {}
        """By the name of the weight."""
        self.names: list[str] = []
        """Of the weights that are here."""
        self._num_rows = 1

    def adopt(self, module: nn.Module) -> None:
        """Give all chosen layers of ``module`` natural gradients; forget those that are no longer there."""
        chosen = re.compile(self.options.layers or "").search
        known, names = self.layers, set()
        for path, layer in module.named_modules():
            if not isinstance(layer, (nn.Linear, Conv1D)) or not layer.weight.requires_grad:
                continue
            name = self._name_of(f"{path}.weight")
            if not chosen(name.rpartition(".")[0]) or not _computes_as_usual(layer):
                continue
            names.add(name)
            layer.__class__ = NaturalLinear if isinstance(layer, nn.Linear) else NaturalConv1D
            layer.natural = self
            layer.weight_name = name
        for path, parameter in module.named_parameters():
            name = self._name_of(path)
            if _are_experts(path, parameter) and parameter.requires_grad and chosen(name):
                names.add(name)
                if getattr(parameter, "_natural_hook", None) is None:
                    hook = parameter.register_hook(_ExpertHook(self, name))
                    parameter._natural_hook = hook  # type: ignore[attr-defined]
        self.names = sorted(names)
        self.layers = {name: known[name] for name in self.names if name in known}

    def of(self, name: str, dim_in: int, dim_out: int, bias: bool) -> AffineNaturalGradient:
        """What is known of a weight."""
        found = self.layers.get(name)
        if found is None:
            options = self.options
            history = options.num_minibatches_history
            if history is None:
                history = MINIBATCHES_HISTORY if options.num_samples_history is None else 0.0
            found = self.layers[name] = AffineNaturalGradient(
                dim_in,
                dim_out,
                bias,
                rank_in=options.rank_in and min(options.rank_in, (dim_in + 1) // 2),
                rank_out=options.rank_out and min(options.rank_out, (dim_out + 1) // 2),
                alpha=options.alpha,
                num_samples_history=options.num_samples_history or 2000.0,
                num_minibatches_history=history,
                update_period=options.update_period,
            )
        return found

    @property
    def max_rows(self) -> int:
        return self.options.max_rows or MAX_ROWS

    def unit_of(self, num_rows: int | None) -> float:
        """Of a micro-batch of so many rows; None: of as many as the last one had."""
        self._num_rows = num_rows or self._num_rows
        return self.unit(self._num_rows)

    def updates(self) -> tuple[int, int]:
        """``(at the floor, in all)``: how often estimates have been updated, and how often without an effect.

        At the floor an estimate is a multiple of the identity, so that the gradient stays as it is: the rows were too
        small to be seen. Waits for the device.
        """
        parts = [part for layer in self.layers.values() for part in (layer.inputs, layer.outputs)]
        floored = [part.num_floored for part in parts if part.num_floored is not None]
        return int(sum(int(number) for number in floored)), sum(part.num_updates for part in parts)

    def state_dict(self) -> dict[str, Any]:
        """By the name of the weight."""
        return {name: layer.state_dict() for name, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Estimates of weights that are here; the others of ``state`` are left alone, and those it lacks begin anew."""
        self.layers.clear()
        for name in self.names:
            if name in state:
                dim_in, dim_out = state[name]["dims"]
                self.of(name, dim_in, dim_out, state[name]["bias"]).load_state_dict(state[name])


class _NaturalFunction(torch.autograd.Function):
    """y = x W' + b, whose backward gives W and b natural gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NaturalLinear | NaturalConv1D) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return dx, None, None, None
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if not len(x):
            return dx, torch.zeros_like(weight), dy.new_zeros(dy.shape[-1]) if ctx.has_bias else None, None
        natural = ctx.layer.natural
        known = natural.of(ctx.layer.weight_name, x.shape[-1], dy.shape[-1], ctx.has_bias)
        dw, db = known.gradients(x, dy, natural.unit_of(len(x)), natural.max_rows)
        return dx, dw.to(weight.dtype), db, None


def _natural_linear(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    bias = layer.bias
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = _NaturalFunction.apply(x, weight, bias, layer)
    return out


class NaturalLinear(nn.Linear):
    """An ``nn.Linear`` whose weight gets natural gradients. Layers are turned into it by :class:`NaturalGradients`."""

    natural: NaturalGradients
    weight_name: str

    def forward(self, x: Tensor) -> Tensor:
        return _natural_linear(self, x, self.weight)


class NaturalConv1D(Conv1D):
    """The same of Hugging Face's ``Conv1D`` (GPT-2), whose weight is (D_in, D_out)."""

    natural: NaturalGradients
    weight_name: str

    def forward(self, x: Tensor) -> Tensor:
        return _natural_linear(self, x, self.weight.t())


class _ExpertHook:
    """Divides the gradient of stacked experts."""

    def __init__(self, natural: NaturalGradients, name: str) -> None:
        self._natural, self._name = natural, name

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor:
        dim_out, dim_in = gradient.shape[1:]
        known = self._natural.of(self._name, dim_in, dim_out, False)
        wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        unit = self._natural.unit_of(None)
        for part, is_in in ((known.inputs, True), (known.outputs, False)):
            wide = self._divide(part, wide if is_in else wide.mT, unit)
            wide = wide if is_in else wide.mT
        return wide.to(gradient.dtype)

    def _divide(self, part: OnlineNaturalGradient, gradient: Tensor, unit: float) -> Tensor:
        """Its rows (E, N, D), divided by what is known of all experts' rows together."""
        if gradient.shape[-1] == 1:
            return gradient
        rows = gradient.reshape(-1, gradient.shape[-1])
        step = max(1, len(rows) // self._natural.max_rows)
        division = part.observe(rows[::step], unit=unit, num_rows=len(rows))
        return division.right(gradient) * division.scale.to(gradient.dtype)


def _computes_as_usual(layer: nn.Module) -> bool:
    """Not a class of somebody else's, whose forward is another."""
    forward = type(layer).forward
    return forward in (nn.Linear.forward, Conv1D.forward, NaturalLinear.forward, NaturalConv1D.forward)


def _are_experts(path: str, parameter: nn.Parameter) -> bool:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return len(shape) == 3 and _EXPERTS in path.split(".")
