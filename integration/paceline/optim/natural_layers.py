"""Natural gradients in a model: what backward gives its linear layers and experts as gradients of their weights.

Everything after that (accumulation, reduction, clipping, ZeRO, the optimizer) sees ordinary gradients, and what a layer
passes down to those below is untouched. Embeddings, norms and other parameters keep their gradients.

* ``nn.Linear`` and Hugging Face's ``Conv1D``: rows of inputs and of derivatives of the outputs, as in Kaldi
  (:class:`~paceline.optim.natural_gradient.AffineNaturalGradient`).
* Experts that are stacked in one tensor (E, D_out, D_in), whose rows no layer of ours sees: the rows of their gradient
  and of its transpose, all experts' together, as Kaldi does it for convolutions.

Ranks with different data learn different estimates, and each divides its own share of a gradient by its own: nothing is
exchanged, and the sum is a natural gradient of the mean of their estimates to first order.

Layers stay what they are, with a forward of ours: a copy of a model, and one that was pickled, has ordinary ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..config.natural_gradient_keys import SIMPLE, NaturalGradientConfig
from .natural_gradient import AffineNaturalGradient, OnlineNaturalGradient, SimpleAffineNaturalGradient, sample

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
        self.is_simple = options.method == SIMPLE
        self.names: list[str] = []
        """Of the weights that are here."""

    def adopt(self, module: nn.Module) -> None:
        """Give all chosen layers of ``module`` natural gradients; forget those that are no longer there."""
        chosen = re.compile(self.options.layers or "").search
        known, names = self.layers, set()
        for path, layer in module.named_modules():
            if not _is_linear(layer) or not layer.weight.requires_grad:
                continue
            name = self._name_of(f"{path}.weight")
            if not chosen(name.rpartition(".")[0]):
                continue
            names.add(name)
            become(layer, NaturalLinear).take(self, name)
        for path, parameter in module.named_parameters():
            name = self._name_of(path)
            if _are_experts(path, parameter) and parameter.requires_grad and chosen(name):
                names.add(name)
                become(_called_with(module, path), NaturalExperts).take(self, name, parameter)
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

    def updates(self) -> tuple[int, int]:
        """``(at the floor, in all)``: how often estimates have been updated, and how often without an effect.

        At the floor an estimate is a multiple of the identity, so that the gradient stays as it is: the rows were too
        small to be seen. Waits for the device.
        """
        parts = [part for layer in self.layers.values() for part in (layer.inputs, layer.outputs)]
        floored = [part.learned.num_floored.sum() for part in parts if part.learned is not None]
        total = int(torch.stack(floored).sum()) if floored else 0
        return total, sum(part.num_updates for part in parts)

    def state_dict(self) -> dict[str, Any]:
        """By the name of the weight."""
        return {name: layer.state_dict() for name, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Estimates of weights that are here; the others of ``state`` are left alone, and those it lacks begin anew."""
        self.layers.clear()
        if self.is_simple:
            return
        for name in self.names:
            if name in state:
                dim_in, dim_out = state[name]["dims"]
                self.of(name, dim_in, dim_out, state[name]["bias"]).load_state_dict(state[name])


class _NaturalFunction(torch.autograd.Function):
    """y = x W' + b, whose backward gives W and b natural gradients.

    What is saved is the parameter itself: of a transposed or cast one ZeRO 3 could not let go of the memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NaturalLinear) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        weight = weight.t() if layer.is_transposed else weight
        if torch.is_autocast_enabled(x.device.type):
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        with _full_precision(dy):
            wide = weight.to(dy.dtype)
            dx = dy @ (wide.t() if layer.is_transposed else wide) if ctx.needs_input_grad[0] else None
            x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            if not len(x):
                return dx, torch.zeros_like(weight), dy.sum(0) if ctx.has_bias else None, None
            natural = layer.natural
            unit = natural.unit(len(x))
            if natural.is_simple:
                dw, db = SimpleAffineNaturalGradient(ctx.has_bias, natural.options.alpha).gradients(x, dy, unit)
            else:
                known = natural.of(layer.weight_name, x.shape[-1], dy.shape[-1], ctx.has_bias)
                dw, db = known.gradients(x, dy, unit, natural.max_rows)
        return dx, (dw.t() if layer.is_transposed else dw).to(weight.dtype), db, None


class _Ours:
    """Comes before the class of a module, which is then of both (:func:`become`)."""

    plain: type[nn.Module]
    """That class."""
    natural: NaturalGradients

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of copies and files: as the module was. The engine, which ``natural`` leads to, stays out."""
        state = {name: value for name, value in vars(self).items() if name not in _OWN}
        return object.__new__, (self.plain,), state


class NaturalLinear(_Ours):
    """An ``nn.Linear``, or a ``Conv1D`` of Hugging Face's, whose weight gets natural gradients."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_name: str
    is_transposed: bool
    """Whether the weight is (D_in, D_out)."""

    def take(self, natural: NaturalGradients, name: str) -> None:
        self.natural, self.weight_name = natural, name
        self.is_transposed = isinstance(self, Conv1D)

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.requires_grad:
            own: Tensor = super().forward(x)  # type: ignore[misc]
            return own
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        out: Tensor = _NaturalFunction.apply(x, self.weight, self.bias, self)
        return out


class NaturalExperts(_Ours):
    """A module with stacked experts, which get natural gradients."""

    natural_hooks: dict[str, Any]
    """By the name of the parameter."""
    num_rows = 1
    """That the experts were given last."""

    def take(self, natural: NaturalGradients, name: str, parameter: nn.Parameter) -> None:
        hooks = vars(self).setdefault("natural_hooks", {})
        if name in hooks:  # of another engine, or of a parameter that has been elsewhere
            hooks[name].remove()
        self.natural = natural
        hooks[name] = parameter.register_hook(_ExpertHook(self, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = next(iter((*args, *kwargs.values())))
        self.num_rows = max(1, rows.numel() // rows.shape[-1])
        return super().forward(*args, **kwargs)  # type: ignore[misc]


_OWN = ("natural", "weight_name", "is_transposed", "natural_hooks", "num_rows")


def become(module: Any, kind: Any) -> Any:
    """``module``, which is a ``kind`` from now on, and what it was."""
    if not isinstance(module, kind):
        plain: Any = type(module)
        module.__class__ = _both(kind, plain)
    return module


@cache
def _both(kind: Any, plain: Any) -> Any:
    names = ("__module__", "__qualname__", "__doc__")
    return type(plain.__name__, (kind, plain), {"plain": plain, **{name: getattr(plain, name) for name in names}})


class _ExpertHook:
    """Divides the gradient of stacked experts."""

    def __init__(self, layer: NaturalExperts, name: str) -> None:
        self._layer, self._name = layer, name

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor:
        natural = self._layer.natural
        dim_out, dim_in = gradient.shape[1:]
        wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        unit = natural.unit(self._layer.num_rows)
        with _full_precision(gradient):
            if natural.is_simple:
                return _simply_divided(wide, unit, natural.options.alpha).to(gradient.dtype)
            known = natural.of(self._name, dim_in, dim_out, False)
            wide = _divide(known.inputs, wide, unit, natural.max_rows)
            wide = _divide(known.outputs, wide.mT, unit, natural.max_rows).mT
        return wide.to(gradient.dtype)


def _divide(part: OnlineNaturalGradient, gradient: Tensor, unit: float, max_rows: int) -> Tensor:
    """Its rows (E, N, D), divided by what is known of all experts' rows together."""
    if gradient.shape[-1] == 1:
        return gradient
    rows = gradient.reshape(-1, gradient.shape[-1])
    division = part.observe(sample(rows, max_rows), unit=unit, num_rows=len(rows))
    return division.right(gradient) * division.scale.to(gradient.dtype)


def _simply_divided(gradient: Tensor, unit: float, alpha: float) -> Tensor:
    """A gradient (E, D_out, D_in): its rows by all experts' other rows, then those of its transpose."""
    simple = SimpleAffineNaturalGradient(bias=False, alpha=alpha)
    for _ in range(2):
        rows = gradient.reshape(-1, gradient.shape[-1])
        gradient = simple.divided(rows, unit).view(gradient.shape).mT
    return gradient


def _full_precision(like: Tensor) -> torch.autocast:
    """A backward may be called where autocast is on, which would round what is learned."""
    return torch.autocast(like.device.type, enabled=False)


def _is_linear(layer: Any) -> bool:
    """And not one of somebody else's, whose forward is another."""
    if isinstance(layer, NaturalLinear):
        return True
    return getattr(type(layer), "forward", None) in (nn.Linear.forward, Conv1D.forward) and "forward" not in vars(layer)


def _called_with(module: nn.Module, path: str) -> nn.Module:
    """The module whose forward uses a parameter."""
    owner, _, _ = path.rpartition(".")
    found = module.get_submodule(owner)
    is_container = isinstance(found, (nn.ParameterDict, nn.ParameterList))
    return module.get_submodule(owner.rpartition(".")[0]) if is_container else found


def _are_experts(path: str, parameter: nn.Parameter) -> bool:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return len(shape) == 3 and _EXPERTS in path.split(".")
