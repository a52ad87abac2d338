"""Rows of parameters that this rank steps: their masters, and the way of gradients to them and of values back."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layout import Rows
from .parameter_layout import ParameterLayout, rows_of
from .step_options import master_dtype

Kept = MutableMapping[tuple[str, int, int], nn.Parameter]
"""Masters by name, first row and end."""


@dataclass
class Owned:
    """Rows of one parameter that this rank steps.

    Args:
        parameter: the model's own, whole.
        start: first row of ``master`` in it.
        master: what the optimizer steps, a leaf of rows ``start`` to ``start + len(master) - 1``; fp32 even where the
            model is not. Where the model is fp32 it shares the model's memory, unless updates are asynchronous.
    """

    name: str
    parameter: nn.Parameter
    start: int
    master: nn.Parameter

    @property
    def stop(self) -> int:
        """One past its last row; a parameter without dimensions is one row."""
        return self.start + (len(self.master) if self.master.dim() else 1)


class OwnedRows:
    """Makes masters of this rank's rows, which take the place of the parameters in the groups of ``basic``.

    Args:
        basic: the optimizer that steps them.
        kept: masters of before, which are taken out where they fit.
    """

    @torch.no_grad()
    def __init__(self, layout: ParameterLayout, basic: torch.optim.Optimizer, kept: Kept | None = None) -> None:
        self._layout, self._basic = layout, basic
        self.owned: list[Owned] = []
        mine: dict[int, list[Rows | None]] = {}  # None: the whole parameter, which every rank steps
        for part in layout.buckets:
            for index in part.bucket.parameters:
                mine[index] = [] if part.shard else [None]
            for own in part.own if part.shard else ():
                mine[own.index].append(own)
        for group in basic.param_groups:
            first = len(self.owned)
            for parameter in group["params"]:
                index = layout.index_of[parameter]
                state = _as_of_master(basic.state.pop(parameter, {}), parameter)  # some optimizers make it at once
                for rows in mine[index]:
                    if rows is None:
                        self._own(index, 0, parameter, state, kept)
                    else:
                        piece = rows_of(parameter.detach(), rows.start, rows.stop)
                        self._own(index, rows.start, piece, _state_of_rows(state, parameter, rows), kept)
            group["params"] = [owned.master for owned in self.owned[first:]]
        self.indices = [layout.index_of[owned.parameter] for owned in self.owned]
        """Number of the parameter of each that is owned."""

    def _own(self, index: int, start: int, values: Tensor, state: dict[str, Any], kept: Kept | None) -> None:
        name, stop = self._layout.names[index], start + (len(values) if values.dim() else 1)
        master = kept.pop((name, start, stop), None) if kept else None
        if master is None:
            master = _master(values, copy=self._layout.is_asynchronous)
        self.owned.append(Owned(name, self._layout.parameters[index], start, master))
        if state:
            self._basic.state[master] = state

    def kept(self) -> Kept:
        """Masters with memory of their own, for the rows of another layout. Others are the model's values."""
        return {
            (owned.name, owned.start, owned.stop): owned.master for owned in self.owned if self.has_own_master(owned)
        }

    def has_own_master(self, owned: Owned) -> bool:
        """Whether the master has memory of its own; otherwise it is the value's."""
        return self._layout.is_asynchronous or owned.master.dtype != owned.parameter.dtype

    def shares(self) -> Iterator[tuple[int, int, int]]:
        """``(position in owned, first row, end)`` of what this rank answers for.

        Disjoint over the ranks that hold a parameter, and complete. Rows count from the parameter's own first row. With
        ZeRO 1 it is all that the rank has; with ZeRO 0 every rank has everything and answers for a part.
        """
        position = {(owned.name, owned.start): place for place, owned in enumerate(self.owned)}
        for part in self._layout.buckets:
            for rows in part.own:
                name = self._layout.names[rows.index]
                yield position[name, rows.start if part.shard else 0], rows.start, rows.stop

    def hand_over(self, gradients: Sequence[Tensor | None], touched: Sequence[bool], factor: float) -> None:
        """Give the masters their rows of ``gradients``, which are by number of the parameter, times ``factor``."""
        given = []
        for owned, index in zip(self.owned, self.indices, strict=True):
            gradient = gradients[index]
            if not touched[index]:
                owned.master.grad = None
                continue
            assert gradient is not None, owned.name
            owned.master.grad = rows_of(gradient, owned.start, owned.stop).to(owned.master.dtype)
            given.append(owned.master.grad)
        if factor != 1.0 and given:
            torch._foreach_mul_(given, factor)

    def forget_gradients(self) -> None:
        for owned in self.owned:
            owned.master.grad = None

    def write_values(self) -> None:
        """Bring the masters' values into this rank's parameters."""
        for owned in self.owned:
            place = rows_of(owned.parameter.detach(), owned.start, owned.stop)
            if place.data_ptr() != owned.master.data_ptr():
                place.copy_(owned.master)

    def num_bytes(self) -> int:
        """Bytes of masters of their own and of the optimizer's states."""
        states = [
            value
            for state in list(self._basic.state.values())  # a step in a thread may add to it meanwhile
            for value in list(state.values())
            if torch.is_tensor(value)
        ]
        masters = [owned.master for owned in self.owned if self.has_own_master(owned)]
        return sum(tensor.nbytes for tensor in (*states, *masters))

    def release(self) -> None:
        """Forget masters, which may be views of buckets, and states."""
        self.owned.clear()
        self._basic.state.clear()
        for group in self._basic.param_groups:
            group["params"] = []


def _as_of_master(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """State that was made like the parameter, in the dtype that it would have if it were made like the master."""

    def wide(value: Any) -> Any:
        is_like = torch.is_tensor(value) and value.dtype == parameter.dtype and value.shape == parameter.shape
        return value.to(master_dtype(value.dtype)) if is_like else value

    return {key: wide(value) for key, value in state.items()}


def _state_of_rows(state: dict[str, Any], parameter: nn.Parameter, rows: Rows) -> dict[str, Any]:
    def part(value: Any) -> Any:
        is_cut = torch.is_tensor(value) and value.dim() > 0 and value.shape == parameter.shape
        return value[rows.start : rows.stop].clone() if is_cut else value

    return {key: part(value) for key, value in state.items()}


def _master(values: Tensor, copy: bool) -> nn.Parameter:
    """A leaf to be stepped: the memory of ``values`` itself if that is exact enough, else, or with ``copy``, a copy."""
    if not copy and values.dtype == master_dtype(values.dtype):
        return values if isinstance(values, nn.Parameter) else nn.Parameter(values)
    return nn.Parameter(values.detach().to(master_dtype(values.dtype), copy=True))
