"""Experts that are stacked in one tensor, whose weight gradients may come later than those of the inputs.

transformers keeps the experts of a layer in tensors [E, D_out, D_in] (transposed in some families), and multiplies with
them in one of several ways: all experts in one grouped product, or one after another. While such a module computes, a
product with one of its tensors is taken apart: autograd sees the product with a constant, which gives the gradient of
the input as ever, and behind it something that keeps the other factor. What is multiplied in another way keeps its
gradient in the backward of the inputs.

Legend: E experts, N rows (a token for one of its experts), D_in and D_out of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..hf.activations import factor_bytes
from ..hf.own_class import Own, become
from .linear_layers import Deferral, Partial, deferrable
from .linear_products import full_precision
from .natural_layers import NaturalExperts, called_with, is_stack_of_experts

_GROUPED: tuple[Any, ...] = tuple(
    found for owner in (F, torch) for name in ("grouped_mm", "_grouped_mm") if (found := getattr(owner, name, None))
)
_MATMUL: tuple[Any, ...] = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class GroupedProduct(NamedTuple):
    """Factors of the gradients of all experts of a tensor.

    Shapes: ``inputs`` [N, D_in] and ``outputs`` [N, D_out], sorted by expert; ``ends`` [E].
    """

    parameter: nn.Parameter
    inputs: Tensor
    outputs: Tensor
    ends: Tensor
    is_transposed: bool
    """Whether the parameter is [E, D_in, D_out]."""

    def gradients(self, partial: Partial) -> Iterator[tuple[nn.Parameter, Tensor]]:
        left, right = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        yield self.parameter, _GROUPED[0](left.t(), right, offs=self.ends)


class ExpertProduct(NamedTuple):
    """Factors of the gradient of one expert of a tensor.

    Shapes: ``inputs`` [N, D_in], ``outputs`` [N, D_out].
    """

    parameter: nn.Parameter
    inputs: Tensor
    outputs: Tensor
    expert: Tensor | int
    is_transposed: bool

    def gradients(self, partial: Partial) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.parameter not in partial:
            partial[self.parameter] = torch.zeros_like(self.parameter)
        left, right = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        partial[self.parameter][self.expert] += left.t() @ right
        return iter(())


class OwnExperts(Own):
    """A module with stacked experts, of which the gradients may come later."""

    deferral: Deferral | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether the gradients of a forward that runs now are left for later."""
        return self.deferral is not None and self.deferral.is_on and torch.is_grad_enabled()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_deferred:
            return self._forward_apart(*args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # products are taken apart as they are called
    def _forward_apart(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        assert self.deferral is not None
        stacks = [p for name, p in module.named_parameters() if p.requires_grad and p.dim() == 3]
        with _Apart(stacks, self.deferral):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def defer_experts(module: nn.Module, deferral: Deferral) -> None:
    """Give all stacked experts of ``module`` that are trained the means to be deferred.

    Those with natural gradients divide by what the module saw last: theirs stay with the gradients of the inputs.
    """
    for path, parameter in module.named_parameters():
        if is_stack_of_experts(path, parameter) and parameter.requires_grad:
            owner = called_with(module, path)
            if not isinstance(owner, NaturalExperts):
                become(owner, OwnExperts).deferral = deferral


def most_deferred_bytes(module: nn.Module, heads: Iterable[nn.Module] = (), *, tokens: int, rows: int) -> float:
    """Bytes that a backward of the inputs leaves for later at most, known before any was split.

    The input of every layer counts, also where several have the same one.

    Args:
        heads: as of :meth:`~paceline.optim.linear_layers.Deferral.adopt`.
        tokens: of a micro-batch.
        rows: those that the experts here get of them, counted once for each expert.
    """
    linear = [(tokens, layer.weight) for layer in deferrable(module, heads)[0]]
    named = module.named_parameters()
    stacks = [(rows, p) for path, p in named if is_stack_of_experts(path, p) and p.requires_grad]
    return factor_bytes([*linear, *stacks])


class _Stack(NamedTuple):
    """A tensor made of a parameter: transposed, or one expert of it."""

    made: Tensor
    parameter: nn.Parameter
    expert: Tensor | int | None
    is_transposed: bool


class _Apart(TorchFunctionMode):
    """Takes products with stacked parameters apart."""

    def __init__(self, parameters: list[nn.Parameter], deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral
        # Kept, so that no other tensor has the same id.
        self._known = {id(p): _Stack(p, p, None, True) for p in parameters}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if len(args) < 2:
            return func(*args, **options)
        if func is Tensor.__getitem__ or func is Tensor.transpose:
            made, source = func(*args, **options), self._known.get(id(args[0]))
            if source is not None and source.made is source.parameter:
                if func is Tensor.transpose:
                    if {axis % 3 for axis in args[1:]} == {1, 2}:
                        self._know(_Stack(made, source.parameter, None, False))
                elif isinstance(args[1], int) or (isinstance(args[1], Tensor) and args[1].dim() == 0):
                    self._know(_Stack(made, source.parameter, args[1], True))
            return made
        stack = self._known.get(id(args[1]))
        if stack is not None:
            rows: Tensor = args[0]
            if func in _GROUPED and stack.expert is None and rows.dim() == 2:
                ends = options.get("offs", args[2] if len(args) > 2 else None)
                if ends is not None and options.get("bias") is None:
                    computed = func(rows, stack.made.detach(), *args[2:], **options)
                    return self._leave(computed, rows, stack, ends)
            is_linear, is_product = func is F.linear, func in _MATMUL
            if stack.expert is not None and rows.dim() == 2 and (is_linear or is_product):
                computed = func(rows, stack.made.detach(), *args[2:], **options)
                return self._leave(computed, rows, stack._replace(is_transposed=is_product), None)
        return func(*args, **options)

    def _know(self, stack: _Stack) -> None:
        self._known[id(stack.made)] = stack

    def _leave(self, computed: Tensor, rows: Tensor, stack: _Stack, ends: Tensor | None) -> Tensor:
        deferral = self._deferral
        with torch._C.DisableTorchFunction():
            found: Tensor = _Leave.apply(computed, deferral.anchor, rows, ends, stack, deferral)
        return found


class _Leave(torch.autograd.Function):
    """Keeps the factors of a product's weight gradient; the product itself goes through."""

    @staticmethod
    def forward(
        ctx: Any, computed: Tensor, anchor: Tensor, rows: Tensor, ends: Tensor | None, stack: _Stack, deferral: Deferral
    ) -> Tensor:
        ctx.mark_dirty(computed)
        ctx.save_for_backward(rows, ends)
        ctx.stack, ctx.deferral = stack._replace(made=stack.parameter), deferral
        return computed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor) -> Any:
        rows, ends = ctx.saved_tensors
        stack: _Stack = ctx.stack
        # Autocast multiplies in the type of the weight's copy, which is that of what came out.
        inputs = rows.detach().to(outputs.dtype)
        with full_precision(outputs):
            if ends is None:
                assert stack.expert is not None
                product: Any = ExpertProduct(stack.parameter, inputs, outputs, stack.expert, stack.is_transposed)
            else:
                product = GroupedProduct(stack.parameter, inputs, outputs, ends, stack.is_transposed)
            ctx.deferral.add(product)
        return outputs, None, None, None, None, None
