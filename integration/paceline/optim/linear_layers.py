"""Linear layers whose weight gradients Paceline computes itself: in another way, or later than those of the inputs.

In a split backward (Zero Bubble Pipeline Parallelism, arXiv 2401.10241) autograd runs first and gives the gradients of
a stage's inputs, which the stage before waits for; the products that give the weights' gradients, about a third of the
work, are left for a moment in which the rank would idle. They are the same products, added up in the same order: every
bit is as in a whole backward.

``nn.Linear`` and Hugging Face's ``Conv1D`` are deferred, the factors of LoRA among them, and stacked experts
(:mod:`.stacked_experts`). All other parameters (norms, embeddings) have their gradients with those of the inputs.

The head is one of these layers. What it keeps, the gradient of the logits among it, is in proportion to its products
as with any other layer, and not more than the logits that a micro-batch keeps before; it takes part unless it keeps
much more than all others together.

Layers stay what they are, with a forward of ours: a copy of a model, and one that was pickled, has ordinary ones.
Within compiled graphs they are tapped (:mod:`.taps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..hf.own_class import Own, become
from .linear_products import Tap, TappedFunction, as_autocast, full_precision, input_gradient, linear

MOST_OF_HEAD = 4
"""What a head may leave for later, in multiples of what the other layers leave. Where it leaves more, the last stage
has little else to compute: it is the slowest by far, and nothing is won by what it does last."""

Partial: TypeAlias = dict[nn.Parameter, Tensor]
"""Sums of parts of gradients."""


class _Product(NamedTuple):
    """Factors of a layer's weight gradient: rows of its input and of its output's gradient.

    Shapes: ``inputs`` [rows, D_in], ``outputs`` [rows, D_out].
    """

    layer: OwnLinear
    inputs: Tensor
    outputs: Tensor

    def gradients(self, partial: Partial) -> Iterator[tuple[nn.Parameter, Tensor]]:
        layer = self.layer
        found = zip((layer.weight, layer.bias), layer.gradients(self.inputs, self.outputs), strict=True)
        for parameter, gradient in found:
            if parameter is not None and gradient is not None:
                yield parameter, gradient


class Product(Protocol):
    """Factors of gradients of weights, which are multiplied later."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def outputs(self) -> Tensor: ...

    def gradients(self, partial: Partial) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Multiply.

        Args:
            partial: gets what is a part of a gradient only, of which there are others.

        Yields:
            parameters and their whole gradients.
        """


class Deferred:
    """Gradients of weights that one backward has left for later."""

    def __init__(self) -> None:
        self._products: list[Product] = []

    def __len__(self) -> int:
        return len(self._products)

    @property
    def num_bytes(self) -> int:
        """Memory of what is left, each storage once."""
        kept = (tensor.untyped_storage() for p in self._products for tensor in (p.inputs, p.outputs))
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def add(self, product: Product) -> None:
        self._products.append(product)

    def run(self) -> None:
        """Compute the gradients, and add them to those that the parameters have, hooks included."""
        products, self._products = self._products, []
        products.reverse()
        partial: Partial = {}
        while products:  # each is let go as soon as it is used
            for parameter, gradient in products.pop().gradients(partial):
                _accumulate(parameter, gradient)
        for parameter, gradient in partial.items():
            _accumulate(parameter, gradient)


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.requires_grad:
        # From a parameter itself autograd does what it does at the end of a backward, and no more. The engine is called
        # without the checks of torch.autograd.backward: those take longer than a small product.
        Variable._execution_engine.run_backward(
            (parameter,),
            (gradient.to(parameter.dtype),),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


class Deferral:
    """Has a rank's linear layers leave the gradients of their weights for later, where a schedule splits backwards.

    Attributes:
        is_on: whether micro-batches whose forward runs now have split backwards. It stays as it is until their
            backwards have run.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.anchor = torch.empty(0, requires_grad=True)
        """Stands for the weights in graphs, in which they themselves have no part: nobody may take them for finished
        when a backward of the inputs is."""
        self._open: Deferred | None = None

    def adopt(self, module: nn.Module, heads: Iterable[nn.Module] = (), *, embeds: bool = False) -> None:
        """Give all linear layers of ``module`` that are trained the means to be deferred.

        Args:
            heads: output layers, as wide as the vocabulary. Those that would keep too much are not deferred.
            embeds: whether the weights of embeddings are used as such here. A head that is tied to one is not deferred
                then: the sum of both gradients would depend on when each of them comes.
        """
        found, kept = deferrable(module, heads, embeds=embeds)
        for layer in found:
            become(layer, OwnLinear).deferral = self
        for layer in kept:
            if isinstance(layer, OwnLinear):  # the stage was another one
                layer.deferral = None

    @contextmanager
    def collecting(self) -> Iterator[Deferred]:
        """Around a backward of the inputs: what it leaves for later."""
        deferred = self._open = Deferred()
        try:
            yield deferred
        finally:
            self._open = None

    def leave(self, layer: OwnLinear, inputs: Tensor, outputs: Tensor) -> None:
        """Leave the gradients of a linear layer for later.

        Args:
            inputs: rows of its input [rows, D_in].
            outputs: gradients of its output [rows, D_out].
        """
        self.add(_Product(layer, inputs, outputs))

    def add(self, product: Product) -> None:
        """Leave a product for later; in a backward that nobody splits it is computed at once."""
        deferred = Deferred() if self._open is None else self._open
        deferred.add(product)
        if self._open is None:
            deferred.run()


class OwnLinear(Own):
    """An ``nn.Linear``, or a ``Conv1D`` of Hugging Face's, that computes the gradients of its parameters itself."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    deferral: Deferral | None = None
    sees_factors = False
    """Whether the factors of each gradient are of use by themselves, also where nothing is deferred."""
    tap: Tap | None = None
    """While a compiled graph with the layer in it runs: how the factors come out of it."""

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is [D_in, D_out]."""
        return isinstance(self, Conv1D)

    @property
    def is_deferred(self) -> bool:
        """Whether the gradients of a forward that runs now are left for later."""
        return self.deferral is not None and self.deferral.is_on and self.weight.requires_grad

    @property
    def needs_factors(self) -> bool:
        """Whether a backward has to give the factors of the gradients, not only the gradients."""
        return self.weight.requires_grad and (self.sees_factors or self.is_deferred)

    def gradients(self, inputs: Tensor, outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight and bias, as autograd computes them; None of what is not trained.

        Args:
            inputs: rows of the input [rows, D_in].
            outputs: gradients of the output [rows, D_out].
        """
        weight, bias = self.weight, self.bias
        dw = db = None
        if weight.requires_grad:
            dw = inputs.t() @ outputs if self.is_transposed else outputs.t() @ inputs
        if bias is not None and bias.requires_grad:
            db = outputs.sum(0)
        return dw, db

    def forward(self, x: Tensor) -> Tensor:
        tap = self.tap
        if tap is not None:
            self.tap = None  # gradients of a second product would be added to the factors of the first
            rounded = as_autocast(x)
            if rounded.dtype == tap.inputs.dtype and rounded.numel() == tap.inputs.numel():
                found: Tensor = TappedFunction.apply(rounded, *tap, self.is_transposed)
                return found
        if not self.needs_factors:
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        x, weight, bias, deferral = as_autocast(x), self.weight, self.bias, self.deferral
        if deferral is None or not deferral.is_on:
            out: Tensor = _LinearFunction.apply(x, weight, bias, self, None)
        else:
            out = _LinearFunction.apply(
                x, weight.detach(), bias if bias is None else bias.detach(), self, deferral.anchor
            )
        return out


class _LinearFunction(torch.autograd.Function):
    """y = x W' + b, whose backward leaves the gradients of W and b to the layer.

    What is saved is the parameter itself: of a transposed or cast one ZeRO 3 could not let go of the memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: OwnLinear, anchor: Tensor | None
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.deferral = layer, None if anchor is None else layer.deferral
        return linear(x, weight, bias, is_transposed=layer.is_transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer: OwnLinear = ctx.layer
        rows, dx = dy.reshape(-1, dy.shape[-1]), None
        with full_precision(dy):
            if ctx.needs_input_grad[0]:
                dx = input_gradient(rows, weight, is_transposed=layer.is_transposed).view(x.shape)
            # Detached, since what is left for later would else keep the graph that made it.
            inputs = x.detach().reshape(-1, x.shape[-1])
            if ctx.deferral is not None:
                ctx.deferral.leave(layer, inputs, rows)
                return dx, None, None, None, None
            dw, db = layer.gradients(inputs, rows)
        return dx, None if dw is None else dw.to(weight.dtype), db, None, None


def deferrable(
    module: nn.Module, heads: Iterable[nn.Module] = (), *, embeds: bool = False
) -> tuple[list[Any], list[Any]]:
    """The linear layers of ``module`` that are trained: those that can be deferred, and the others.

    Args:
        heads, embeds: as of :meth:`Deferral.adopt`.
    """
    layers: list[Any] = [layer for layer in module.modules() if is_linear(layer) and layer.weight.requires_grad]
    weights = {parameter for head in heads for parameter in head.parameters()}
    others = sum(sum(layer.weight.shape) for layer in layers if layer.weight not in weights)
    tied = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)} if embeds else set()
    found: list[Any] = []
    kept: list[Any] = []
    for layer in layers:
        weight = layer.weight
        is_kept = weight in tied or (weight in weights and sum(weight.shape) > MOST_OF_HEAD * others)
        (kept if is_kept else found).append(layer)
    return found, kept


def is_linear(layer: Any) -> bool:
    """Whether a layer is a linear one, and not one of somebody else's, whose forward is another."""
    if isinstance(layer, OwnLinear):
        return True
    return getattr(type(layer), "forward", None) in (nn.Linear.forward, Conv1D.forward) and "forward" not in vars(layer)
