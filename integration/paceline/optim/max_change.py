"""How far parameters may move in one update: each layer by itself, and all of them together.

A layer is a module that has parameters of its own, weight and bias together; experts that are stacked in the tensors of
one module are one layer.

Source: Povey, Zhang, Khudanpur, arXiv 1410.7455; the order and the limits are those of Kaldi's ``nnet3``.

Legend: C number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NORM_CHUNK = 1 << 16
"""Elements that are squared in float64 at a time on a CPU: they stay in its cache."""


def max_change_factors(norms: Tensor, limits: Tensor, total_limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """``(factors, norm)``: what each layer's change is multiplied by, and the norm of all changes after that.

    A layer's change is scaled down to its limit; then, if the norm of all is still larger than ``total_limit``,
    everything is scaled down to that.

    Args:
        norms: of the layers' changes, learning rate included, weight and bias together, of shape (C,).
        limits: of each, of shape (C,); 0 for none.
        total_limit: 0 for none.

    Returns:
        Both on the device of ``norms``, in float64. ``norm`` is not finite where a change is not: then the update is to
        be left out, which no factor does.
    """
    norms, limits = norms.double(), limits.double().to(norms.device)
    factors = torch.where((limits > 0) & (norms > limits), limits / norms, 1.0)
    changes = torch.where(norms.isfinite(), factors * norms, norms)
    norm = torch.linalg.vector_norm(changes)
    if total_limit > 0:
        factors = factors * torch.where(norm > total_limit, total_limit / norm, 1.0)
        norm = torch.where(norm.isfinite(), norm.clamp_max(total_limit), norm)
    return factors, norm


@dataclass(frozen=True)
class Limits:
    """How far each layer, and all together, may move in one update: Euclidean norms, 0 for any distance.

    Args:
        layer: of every layer but the heads.
        head: of the output layer.
        total: of all layers together, after the limits of each.
        heads: names of the output layer's module; with tied embeddings that of the embedding, whose parameter it is.

    Raises:
        ValueError: a limit is negative or not finite.

    >>> limits = Limits(0.75, 1.5, 2.0, heads=frozenset({"lm_head"}))
    >>> limits.of(Limits.layer_of("lm_head.weight")), limits.of("model.layers.0.mlp.up_proj")
    (1.5, 0.75)
    """

    layer: float = 0.75
    head: float = 1.5
    total: float = 2.0
    heads: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not all(math.isfinite(limit) and limit >= 0 for limit in (self.layer, self.head, self.total)):
            raise ValueError(f"{self}: each limit must be a finite norm of at least 0; write 0 for any distance.")

    @staticmethod
    def layer_of(name: str) -> str:
        """The layer that the parameter ``name`` belongs to: the module that has it."""
        return name.rpartition(".")[0]

    def of(self, layer: str) -> float:
        """The limit of ``layer`` by itself."""
        return self.head if layer in self.heads else self.layer

    def concerns(self, layer: str) -> bool:
        """Whether anything limits the change of ``layer``."""
        return self.total > 0 or self.of(layer) > 0

    @property
    def is_none(self) -> bool:
        """Whether everything may move any distance."""
        return not (self.total or self.layer or (self.head and self.heads))


@dataclass(frozen=True)
class Part:
    """What a step changes on this rank of one parameter.

    Args:
        values: what the optimizer steps, in place.
        counted: those of its rows whose change counts on this rank; None if it counts on another.
    """

    layer: str
    values: Tensor
    counted: slice | None

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Of ``tensor``, that has the shape of ``values``, what counts here; of a scalar, all."""
        assert self.counted is not None, self.layer
        return tensor[self.counted] if tensor.dim() else tensor


@dataclass(frozen=True)
class Outcome:
    """What became of the change of a step.

    Args:
        norm: of all changes that have a limit, as they are now; not finite if the step was taken back.
        num_limited: layers that would have gone farther than their own limit.
        is_smaller: whether any change was made smaller.
    """

    norm: float
    num_limited: int
    is_smaller: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)

    @property
    def report(self) -> dict[str, float]:
        """``norm`` and ``num_limited``."""
        return {"norm": self.norm, "num_limited": self.num_limited}


class Changes:
    """What one step changes. Made before it; the sum over all ranks of :meth:`squares` after it goes to :meth:`limit`.

    What has a limit is held twice meanwhile.

    Args:
        layers: all that there are on any rank, in the same order on all.
        parts: what this rank steps.
    """

    @torch.no_grad()
    def __init__(self, limits: Limits, layers: Sequence[str], parts: Iterable[Part]) -> None:
        self._limits, self._layers = limits, layers
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._parts = [part for part in parts if limits.concerns(part.layer)]
        self._before = [part.values.detach().clone() for part in self._parts]

    @torch.no_grad()
    def squares(self, device: torch.device) -> Tensor:
        """Sums of squares of what counts on this rank, of shape (C,), in float64, on ``device``."""
        counted: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._layers]
        for part, before in zip(self._parts, self._before, strict=True):
            if part.counted is not None:
                counted[self._index[part.layer]].append((part.rows_of(part.values.detach()), part.rows_of(before)))
        none = torch.zeros((), dtype=torch.float64, device=device)
        # A layer at a time: the differences are in memory until they are squared.
        sums = [sum_of_squares([new - old for new, old in own], device) if own else none for own in counted]
        return torch.stack(sums) if sums else none.new_zeros(0)

    @torch.no_grad()
    def limit(
        self, squares: Tensor, limited: Callable[[Tensor, Tensor], None] = lambda values, change: None
    ) -> Outcome:
        """Make the changes as small as the limits say, or undo them if one is not finite. The host waits here.

        A change within its limits stays as it is, in every bit.

        Args:
            squares: the sum of all ranks' :meth:`squares`, the same on all of them.
            limited: called with the values of each part whose change is made smaller, and that change.
        """
        norms = squares.cpu().sqrt()  # all ranks compute the same factors, whatever their devices
        limits = torch.tensor([self._limits.of(layer) for layer in self._layers], dtype=torch.float64)
        factors, norm = max_change_factors(norms, limits, self._limits.total)
        outcome = Outcome(float(norm), int(((limits > 0) & (norms > limits)).sum()), bool((factors < 1).any()))
        own = factors.tolist()
        for part, before in zip(self._parts, self._before, strict=True):
            factor = own[self._index[part.layer]]
            if not outcome.is_finite:
                part.values.copy_(before)
            elif factor < 1:
                change = part.values.sub_(before).mul_(factor)
                limited(part.values, change)
                part.values.add_(before)
        self._before.clear()
        self._parts.clear()
        return outcome


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """In float64: a scalar tensor on ``device``."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        for norm in torch._foreach_norm(tensors, dtype=torch.float64) if tensors else ():
            total += norm.square()
        return total
    for tensor in tensors:
        for chunk in tensor.reshape(-1).split(NORM_CHUNK):
            wide = chunk.double()
            total += torch.dot(wide, wide)
    return total
