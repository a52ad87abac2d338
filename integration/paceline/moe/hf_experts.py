"""Hugging Face's own experts on several ranks: in a pipeline stage, whose router and shared experts stay as they are.

transformers keeps the experts of a layer stacked (``gate_up_proj [E, 2 F, H]``, ``down_proj [E, H, F]``, biases) in one
module, which is called with the tokens, their experts and the weights of these. A rank keeps the rows of its slots;
tokens go to the ranks that have their experts, are computed there by that same module (so activation, clamp and bias
are the family's own, and so is the implementation that the model is configured with), come back, and are weighted and
added up here in the order in which that implementation does it. No number depends on where an expert lies: its rows
come in the order of the ranks that sent them.

Legend: E experts of the model, P own slots of a rank, T tokens of this rank, K experts that a token goes to, H hidden
size, F width of an expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..planning.experts import Placement
from ..state.named import SPREAD
from .dispatch import Exchange, take_rows
from .layer import EVEN, ExpertLayer, SlotPart, SlotWeights
from .replica_sync import Replicas

try:
    from transformers.integrations.moe import _grouped_linear
except ImportError:  # of other versions
    _grouped_linear = None

INTERFACE = ("has_gate", "has_bias", "is_transposed")
"""Attributes of a module whose experts follow transformers' ``use_experts_implementation``."""

IN_TURN = (None, "eager")
"""Implementations that add up a token's experts one after another, by number; others do it in the router's order."""


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` whose experts can lie on several ranks, by name; it may be on the meta device."""
    return {name: module for name, module in model.named_modules() if _are_stacked(module)}


def _are_stacked(module: nn.Module) -> bool:
    num_experts = getattr(module, "num_experts", None)
    if num_experts is None or not all(hasattr(module, name) for name in INTERFACE):
        return False
    own = list(module.parameters(recurse=False))
    return len(own) == len(list(module.parameters())) and all(p.dim() and p.shape[0] == num_experts for p in own)


def check_experts(model: nn.Module, size: int) -> None:
    """Raise ValueError if the experts of ``model`` cannot lie on ``size`` ranks; it may be on the meta device."""
    found = experts_of(model)
    name = f"{type(model).__name__} (model type {getattr(model.config, 'model_type', None)!r})"
    asked = f"expert_parallel.autoep_size is {size}"
    remedy = "leave expert_parallel out, or choose another model."
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts" and path not in found:
            raise ValueError(
                f"{asked}: {path} of {name} is a {type(module).__name__}, which does not keep its experts as "
                f"transformers' experts interface does, and they cannot lie on several ranks; {remedy}"
            )
    if not found:
        raise ValueError(f"{asked}: {name} has no experts that can lie on several ranks; {remedy}")
    for path, module in found.items():
        if module.num_experts < size:
            raise ValueError(
                f"{asked}: it must not exceed the number of experts, and {path} has {module.num_experts}; choose fewer "
                "ranks."
            )


def share_of(experts: Any, size: int) -> int:
    """Parameters of one layer's experts that each of ``size`` ranks has room for."""
    each = sum(parameter.numel() for parameter in experts.parameters()) // experts.num_experts
    return int(each * -(-experts.num_experts // size))


def take_share(model: nn.Module, rank: int, size: int) -> dict[str, HFExpertLayer]:
    """Keep, in place, rank ``rank``'s of ``size`` shares of the experts of each layer, equal up to one expert.

    Names of parameters stay, their first dimension shrinks to that of the largest share: what a smaller one has too
    much is 0. Before it can be used each layer wants :meth:`begin`.

    Returns:
        the layers by name, in the model's order.
    """
    found: dict[str, HFExpertLayer] = {}
    for name, module in experts_of(model).items():
        own = Placement.contiguous(module.num_experts, size).own_experts(rank)
        for parameter in module.parameters():
            # A copy, so that the memory of the others is free.
            share = parameter.data.new_zeros(-(-module.num_experts // size), *parameter.shape[1:])
            share[: len(own)] = parameter.data[own[0] : own[-1] + 1]
            parameter.data = share
            setattr(parameter, SPREAD, True)
        family: Any = type(module)
        module.__class__ = _spread(family)
        assert isinstance(module, HFExpertLayer)
        found[name] = module
    return found


@cache
def _spread(experts: Any) -> Any:
    """The class of a family's experts that lie on several ranks."""
    return type(f"Spread{experts.__name__}", (HFExpertLayer, experts), {"family": experts})


class HFExpertLayer(ExpertLayer):
    """Comes before the class of a family's ``experts`` module (:func:`take_share`)."""

    family: Any
    """That class."""
    _computing: tuple[nn.Module, ...] = ()

    def begin(
        self,
        name: str,
        group: Any,
        *,
        num_replicas: int = 0,
        splitting: str = EVEN,
        is_last_backward: Callable[[], bool] = lambda: True,
    ) -> None:
        """When the share lies on its device.

        Args:
            group: the ranks with the other shares.
            num_replicas: see :meth:`ExpertLayer.set_up`, as for ``splitting``.
            is_last_backward: see :class:`~paceline.moe.replica_sync.Replicas`.
        """
        self.set_up(name, self.num_experts, group, num_replicas=num_replicas, splitting=splitting)
        if num_replicas:
            self.replicas = Replicas(self._weights(), group, num_replicas, is_last_backward)
            self.replicas.take_on(self.placement)
        # In a tuple: not to be registered as parts of this module, whose parameters they share.
        self._computing = self._local(self.num_slots), self._local(num_replicas)

    def _local(self, num_experts: int) -> nn.Module:
        """The family's module with so many experts; it shares this one's parameters."""
        module: Any = copy.copy(self)
        module.__class__ = _by_rows(self.family)
        module.num_experts = num_experts
        return module

    def _weights(self) -> list[nn.Parameter]:
        return list(self.parameters(recurse=False))  # type: ignore[attr-defined]

    def train(self, mode: bool = True) -> Any:
        for module in self._computing:
            module.training = mode
        return super().train(mode)  # type: ignore[misc]

    def parts(self, slot: int) -> list[SlotPart]:
        found = []
        for name, weight in self.named_parameters(recurse=False):  # type: ignore[attr-defined]
            numel = weight.numel() // self.num_slots
            found.append(SlotPart(name, weight, slot * numel, numel))
        return found

    @torch.compiler.disable  # it counts, and talks to other ranks
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]``, the experts ``[T, K]`` of each token and their weights ``[T, K]``; returns ``[T, H]``."""
        top_k = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1, top_k)
        flat = chosen.reshape(-1)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        exchange = self.route(chosen, counts)
        rows = self.through_experts(take_rows(hidden_states, chosen, exchange), exchange, self._compute)
        return self._combine(rows, exchange.order, chosen, top_k_weights.reshape(-1)).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, exchange: Exchange, weights: SlotWeights) -> Tensor:
        """As :meth:`ExpertLayer.through_experts` wants it."""
        counts = exchange.counts
        num_sources, width = counts.shape
        slots = torch.arange(width, device=rows.device).repeat(num_sources)
        slots = slots.repeat_interleave(counts.reshape(-1), output_size=rows.shape[0])
        order = torch.argsort(slots, stable=True)
        rows, slots = rows.index_select(0, order), slots[order]
        own, copied = self._computing
        if not weights:
            computed = _through(own, rows, slots)
        else:
            own_weights, copied_weights = weights
            edge = sum(exchange.by_slot[: self.num_slots])
            parts = [
                _through(own, rows[:edge], slots[:edge], own_weights),
                _through(copied, rows[edge:], slots[edge:] - self.num_slots, copied_weights),
            ]
            computed = torch.cat(parts)
        return computed.index_select(0, _inverse(order))

    def _combine(self, rows: Tensor, order: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What came back ``[T K, H]``, weighted and added up by token."""
        num_tokens, top_k = chosen.shape
        dtype = rows.dtype
        rows = rows * weights[order].unsqueeze(-1)
        if self.config._experts_implementation not in IN_TURN:  # type: ignore[attr-defined]
            return rows[_inverse(order)].view(num_tokens, top_k, rows.shape[-1]).sum(dim=1)
        rows = rows.to(dtype)[_inverse(order)].view(num_tokens, top_k, rows.shape[-1])
        ranked = torch.argsort(chosen, dim=1)
        tokens = torch.arange(num_tokens, device=chosen.device)
        total = rows[tokens, ranked[:, 0]]
        for k in range(1, top_k):
            total = total + rows[tokens, ranked[:, k]]
        return total


class _ByRows:
    """Comes before the class of a family's ``experts`` module: each row ``[H]`` through one expert, unweighted."""

    config: Any
    num_experts: int
    has_bias: bool
    has_gate: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, rows: Tensor, slots: Tensor) -> Tensor:
        """``rows`` are sorted by the slots ``[N]`` of their experts."""
        if self.config._experts_implementation != "grouped_mm" or _grouped_linear is None:
            computed: Tensor = super().forward(rows, slots.unsqueeze(-1), rows.new_ones(rows.shape[0], 1))  # type: ignore[misc]
            return computed
        # transformers would sort the rows once more, and rows of an expert change places then.
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=slots.device)
        ends = counts.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32)).cumsum(0, dtype=torch.int32)

        def linear(rows: Tensor, name: str) -> Tensor:
            bias = getattr(self, f"{name}_bias")[slots] if self.has_bias else None
            weight = getattr(self, name)
            found: Tensor = _grouped_linear(rows, weight, offs=ends, bias=bias, is_transposed=self.is_transposed)
            return found

        rows_of = linear(rows, "gate_up_proj" if self.has_gate else "up_proj")
        rows_of = linear(self._apply_gate(rows_of) if self.has_gate else self.act_fn(rows_of), "down_proj")
        return self.post_expert_norm(rows_of) if getattr(self, "has_post_expert_norm", False) else rows_of


@cache
def _by_rows(family: Any) -> Any:
    return type(f"{family.__name__}ByRows", (_ByRows, family), {})


def _through(experts: nn.Module, rows: Tensor, slots: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
    num_rows = rows.shape[0]
    if num_rows == 0:
        # Not every implementation takes nothing; and what was sent hangs on the result, so that backward goes there.
        rows, slots = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), slots.new_zeros(1)
    if weights is None:
        computed = experts.forward(rows, slots)  # hooks of the layer are for the layer
    else:
        names = [name for name, _ in experts.named_parameters(recurse=False)]
        computed = functional_call(experts, dict(zip(names, weights, strict=True)), (rows, slots))
    return computed[:num_rows]


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse
