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
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config.natural_gradient_keys import SIMPLE, NaturalGradientConfig
from ..hf.activations import EXPERTS
from ..hf.own_class import Own, become
from .linear_layers import OwnLinear, is_linear
from .linear_products import full_precision
from .natural_gradient import AffineNaturalGradient, OnlineNaturalGradient, SimpleAffineNaturalGradient, sample

MAX_ROWS = 1024
"""Rows of a micro-batch that are learned from, unless the config says otherwise."""

MINIBATCHES_HISTORY = 10.0
"""Micro-batches that an estimate reaches back, unless the config says otherwise: language models have many rows each,
and counted by the row all but the last micro-batch would be forgotten."""


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

    def adopt(self, module: nn.Module, frozen: Container[str] = ()) -> None:
        """Give all chosen layers of ``module`` natural gradients; forget those that are no longer there.

        Args:
            frozen: names of weights that may be trained again, though they are not now; others are then left out.
        """
        chosen = re.compile(self.options.layers or "").search
        known, names = self.layers, set()
        for path, layer in module.named_modules():
            if not is_linear(layer):
                continue
            name = self._name_of(f"{path}.weight")
            if not (layer.weight.requires_grad or name in frozen) or not chosen(name.rpartition(".")[0]):
                continue
            names.add(name)
            become(layer, NaturalLinear).take(self, name)
        for path, parameter in module.named_parameters():
            name = self._name_of(path)
            is_trained = parameter.requires_grad or name in frozen
            if is_stack_of_experts(path, parameter) and is_trained and chosen(name):
                names.add(name)
                become(called_with(module, path), NaturalExperts).take(self, name, parameter)
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


class NaturalLinear(OwnLinear):
    """An ``nn.Linear``, or a ``Conv1D`` of Hugging Face's, whose weight gets natural gradients."""

    natural: NaturalGradients
    weight_name: str
    sees_factors = True

    def take(self, natural: NaturalGradients, name: str) -> None:
        self.natural, self.weight_name = natural, name

    def gradients(self, inputs: Tensor, outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        has_bias = self.bias is not None
        if not len(inputs):
            return torch.zeros_like(self.weight), outputs.sum(0) if has_bias else None
        natural = self.natural
        unit = natural.unit(len(inputs))
        if natural.is_simple:
            simple = SimpleAffineNaturalGradient(has_bias, natural.options.alpha)
            dw, db = simple.gradients(inputs, outputs, unit)
        else:
            known = natural.of(self.weight_name, inputs.shape[-1], outputs.shape[-1], has_bias)
            dw, db = known.gradients(inputs, outputs, unit, natural.max_rows)
        return dw.t() if self.is_transposed else dw, db


class NaturalExperts(Own):
    """A module with stacked experts, which get natural gradients."""

    natural: NaturalGradients

    natural_hooks: dict[str, Any]
    """By the name of the parameter."""
    num_rows = 1
    """That the experts were given last."""

    def take(self, natural: NaturalGradients, name: str, parameter: nn.Parameter) -> None:
        hooks = vars(self).setdefault("natural_hooks", {})
        if name in hooks:  # of another engine, or of a parameter that has been elsewhere
            hooks[name].remove()
        self.natural = natural
        is_trained = parameter.requires_grad  # one that is frozen for now may be trained again
        hooks[name] = parameter.requires_grad_().register_hook(_ExpertHook(self, name))
        parameter.requires_grad_(is_trained)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = next(iter((*args, *kwargs.values())))
        self.num_rows = max(1, rows.numel() // rows.shape[-1])
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class _ExpertHook:
    """Divides the gradient of stacked experts."""

    def __init__(self, layer: NaturalExperts, name: str) -> None:
        self._layer, self._name = layer, name

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor:
        num_held = len(getattr(self._layer, "own_experts", gradient))
        if num_held == len(gradient):
            return self._divided(gradient)
        # Other ranks have more of the layer's experts: the rest of the stack is empty, and nothing is learned from it.
        found = torch.zeros_like(gradient)
        if num_held:
            found[:num_held] = self._divided(gradient[:num_held])
        return found

    def _divided(self, gradient: Tensor) -> Tensor:
        natural = self._layer.natural
        dim_out, dim_in = gradient.shape[1:]
        wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        unit = natural.unit(self._layer.num_rows)
        with full_precision(gradient):
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


def called_with(module: nn.Module, path: str) -> nn.Module:
    """The module whose forward uses a parameter."""
    owner, _, _ = path.rpartition(".")
    found = module.get_submodule(owner)
    is_container = isinstance(found, (nn.ParameterDict, nn.ParameterList))
    return module.get_submodule(owner.rpartition(".")[0]) if is_container else found


def is_stack_of_experts(path: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter, by its name, has the weights of several experts: [E, D_out, D_in], or transposed."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return len(shape) == 3 and EXPERTS in path.split(".")
