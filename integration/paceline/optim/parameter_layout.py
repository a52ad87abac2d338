"""The parameters of a stage by number and name, and the rank that owns each of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config.optimizers import ELEMENTWISE, class_name
from ..planning.gradient_costs import LEAST_BUCKET
from .buckets import Domain, lay_out
from .step_options import DEFAULTS, StepOptions

Asks = Callable[[nn.Parameter], bool]


class ParameterLayout:
    """Numbers the parameters that train, in the model's order, and deals their rows to owners.

    Args:
        basic: the optimizer that has them. Where it is not elementwise, every parameter has one owner.
        names: of the model's parameters, in the order of its forward.
        counts: whether a parameter counts in the norm here, or on another rank.
        apart: whether a parameter's gradient is complete only after the last backward (a tied weight).

    Raises:
        ValueError: parameters of these dtypes cannot be trained together.
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        options: StepOptions = DEFAULTS,
        *,
        counts: Asks = lambda parameter: True,
        apart: Asks = lambda parameter: False,
    ) -> None:
        self.group_of = {names[p]: number for number, group in enumerate(basic.param_groups) for p in group["params"]}
        """Number of the group that a parameter is in, by name."""
        trained = {parameter for group in basic.param_groups for parameter in group["params"]}
        self.parameters: list[nn.Parameter] = [p for p in names if p in trained]  # ranks' groups may differ in order
        self.names = [names[parameter] for parameter in self.parameters]
        self.index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        self.counts = [counts(parameter) for parameter in self.parameters]
        domain = Domain.of(options.group)
        self.num_ranks, self.is_asynchronous = domain.size, options.is_asynchronous
        self.is_sharded = options.shard and domain.size > 1
        """Whether ranks hold different rows of a parameter (ZeRO 1, more than one rank)."""
        # Buckets follow the model's order, in which backward runs, not that of the optimizer's groups.
        self.buckets = lay_out(
            range(len(self.parameters)),
            [tuple(parameter.shape) for parameter in self.parameters],
            [options.domain(parameter) or domain for parameter in self.parameters],
            [_layer_of(name) for name in self.names],
            waiting={index for index, parameter in enumerate(self.parameters) if apart(parameter)},
            bucket_numel=options.bucket_numel,
            least_numel=LEAST_BUCKET,
            cut=class_name(basic) in ELEMENTWISE,
            shard=self.is_sharded,
        )
        self.num_owners = {
            self.names[index]: part.domain.size if part.shard else 1
            for part in self.buckets
            for index in part.bucket.parameters
        }
        """Ranks among which the rows of a parameter are dealt, by name."""
        dtypes = {parameter.dtype for parameter in self.parameters}
        self.gradient_dtype = options.gradient_dtype(dtypes, is_sharded=self.is_sharded)
        needs_memory = self.is_asynchronous or domain.size > 1 or bool(dtypes - {self.gradient_dtype})
        self.has_memory = bool(self.parameters) and needs_memory
        """Whether buckets have memory; otherwise gradients stay where autograd puts them."""
        self.device = self.parameters[0].device if self.parameters else options.device or torch.device("cpu")
        """Sums over ranks are taken on it."""

    def name_of(self, parameter: nn.Parameter) -> str:
        return self.names[self.index_of[parameter]]

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has this parameter of the model."""
        return parameter in self.index_of

    def owners(self, name: str) -> list[tuple[int, int, int]]:
        """``(rank in its group, first row, end)`` of each part of the parameter; in rank order."""
        return [
            (owner, rows.start, rows.stop)
            for part in self.buckets
            for owner, owned in enumerate(part.bucket.parts)
            for rows in owned
            if self.names[rows.index] == name
        ]

    def group_over(self, name: str) -> Any:
        """The ranks over which a parameter's rows are spread; None if this rank has all of them."""
        index = self.names.index(name)
        part = next(part for part in self.buckets if index in part.bucket.parameters)
        return part.domain.group if part.shard else None


def rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows of ``tensor``; one without dimensions is one row."""
    return tensor[start:stop] if tensor.dim() else tensor


def _layer_of(name: str) -> str:
    """The beginning of the names of a layer's parameters: ``"model.layers.3"``; of others, the module's name."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdigit()), len(words) - 2)
    return ".".join(words[: number + 1])
