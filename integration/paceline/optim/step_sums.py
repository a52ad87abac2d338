"""Sums over ranks in a step: the norm of all gradients, each counted once, and how far each layer has moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .max_change import Changes, Limits, Outcome, Part, sum_of_squares
from .owned_rows import OwnedRows
from .parameter_layout import ParameterLayout, rows_of
from .step_outcome import norm_of
from .task_queue import Times


class RankSums:
    """Sums over the ranks that hold the same parameters, and over those that hold one model.

    Args:
        group: the ranks with the same parameters; None for one.
        model_group: the ranks that together hold one model; None for one.
    """

    def __init__(self, times: Callable[[], Times], group: Any = None, model_group: Any = None) -> None:
        self._times, self._groups = times, (group, model_group)

    def add(self, report: Tensor, of_model: Tensor) -> None:
        """Sum ``report`` over the same parameters, and then ``of_model``, a part of it, over the model; in place."""
        with self._times().transfer("norm", report.nbytes):
            for group, tensor in zip(self._groups, (report, of_model), strict=True):
                if group is not None and dist.get_world_size(group) > 1:
                    dist.all_reduce(tensor, group=group)

    def union(self, own: set[str]) -> list[str]:
        """Names of all ranks of the model, in an order that they agree on."""
        group = self._groups[1]
        if group is None or dist.get_world_size(group) == 1:
            return sorted(own)
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, sorted(own), group=group)
        return sorted({name for names in found for name in names})


@dataclass
class Passenger:
    """A number that goes along when the ranks of a model sum up their gradients' norm, so that it needs no message.

    Args:
        own: this rank's part of it, when a step's gradients are surveyed.

    Attributes:
        total: the sum of the last step. Ranks with the same parameters count one by one.
    """

    own: Callable[[], Tensor | float] = float
    total: float = 0.0


class GradientNorm:
    """Surveys the gradients of a step, and clips them.

    Args:
        max_norm: gradients are scaled to this norm at most; 0 for no clipping.
        passenger: goes along.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        sums: RankSums,
        times: Callable[[], Times],
        max_norm: float = 0.0,
        passenger: Passenger | None = None,
    ) -> None:
        self._layout, self._sums, self._times, self._max_norm = layout, sums, times, max_norm
        self._passenger = Passenger() if passenger is None else passenger

    def survey(self, gradients: Sequence[Tensor | None], touched: Sequence[bool]) -> tuple[float, list[bool]]:
        """Sum of squares of all gradients, each once, and which parameters any rank's backward has reached.

        The one place of a step where the host waits for the device; where changes have limits, it does so for them too.

        Args:
            gradients: reduced, by number of the parameter.
            touched: which of them this rank's backward has reached.
        """
        own, layout, device = [], self._layout, self._layout.device
        is_reduced = layout.num_ranks > 1
        for rows in (rows for part in layout.buckets for rows in part.own):
            gradient = gradients[rows.index]
            if layout.counts[rows.index] and gradient is not None and (is_reduced or touched[rows.index]):
                own.append(rows_of(gradient, rows.start, rows.stop) if is_reduced else gradient)
        report = torch.zeros(2 + len(touched), dtype=torch.float64)
        report[2:] = torch.tensor(touched, dtype=torch.float64)
        if device.type != "cpu":
            report = report.to(device, non_blocking=True)
        with self._times().compute():
            report[0] = sum_of_squares(own, device)
        report[1] = self._passenger.own()
        self._sums.add(report, report[:2])
        squares, self._passenger.total, *reached = report.tolist()
        return squares, [count > 0 for count in reached]

    def factor(self, squares: float, scale: float) -> float:
        """Factor that takes ``scale`` out of gradients and clips them."""
        factor = 1.0 / scale
        if self._max_norm > 0:
            factor *= min(1.0, self._max_norm / (norm_of(squares, scale) + 1e-6))
        return factor


class ShardedMaxChange:
    """Limits what a step changes of masters, each layer whole, wherever its rows are; they are held twice meanwhile.

    Args:
        limits: as they are now; None: everything may move any distance.
    """

    def __init__(self, limits: Callable[[], Limits | None], sums: RankSums, times: Callable[[], Times]) -> None:
        self._limits, self._sums, self._times = limits, sums, times
        self._layers: list[str] = []

    def begin(self, layout: ParameterLayout, rows: OwnedRows) -> Changes | None:
        """Note the masters before a step, if changes have limits. Collective the first time."""
        limits = self._limits()
        if limits is None:
            return None
        # Layers of the whole model: they may go to other stages later.
        self._layers = self._layers or self._sums.union({Limits.layer_of(name) for name in layout.names})
        counted = {
            position: slice(start - rows.owned[position].start, stop - rows.owned[position].start)
            for position, start, stop in rows.shares()
            if layout.counts[rows.indices[position]]
        }
        parts = [
            Part(Limits.layer_of(owned.name), owned.master, counted.get(position))
            for position, owned in enumerate(rows.owned)
        ]
        with self._times().compute():
            return Changes(limits, self._layers, parts)

    def limit(
        self,
        changes: Changes,
        device: torch.device,
        limited: Callable[[Tensor, Tensor], None] = lambda values, change: None,
    ) -> Outcome:
        """Limit the changes since :meth:`begin`, or undo them if one is not finite. Collective.

        Every rank knows every layer's norm: those of a weight on two stages do the same, to the bit.

        Args:
            limited: see :meth:`~paceline.optim.max_change.Changes.limit`.
        """
        with self._times().compute():
            squares = changes.squares(device)
        self._sums.add(squares, squares)
        with self._times().compute():
            return changes.limit(squares, limited)
