"""Tensors of a stage as named ranges that ranks exchange when layers change stage, and the memory that takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from ..optim.owned_rows import Owned
from ..optim.sharded import ShardedOptimizer
from ..state.exchange import Held, Move, Transfer, Wanted, stretch
from ..state.named import MASTER, VALUE, home_of, parts_of, without_tensor
from .movable_layers import Layers, tensors_of_layer

Suffix = Callable[[Tensor], str]
"""Ends the name of a layer's tensor on its way: ranks of a stage may have other tensors under the same name."""


class Holdings:
    """All that this rank has of its layers and of their training: values, buffers, masters, the optimizer's states."""

    def __init__(self, layers: Layers, optimizer: ShardedOptimizer, suffix: Suffix) -> None:
        self.held: list[Held] = []
        self.tensors: list[Tensor] = []
        for item in layers.here:
            layer = layers.get(item)
            for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
                whole_name = layers.prefix(item) + name + suffix(tensor)
                self.held.append(Held(whole_name, VALUE, 0, tensor.numel(), tensor.dtype))
                self.tensors.append(tensor.detach())
        for owned in optimizer.owned:
            whole_name = owned.name + suffix(owned.parameter)
            for kind, tensor in parts_of(optimizer, owned).items():
                if kind == MASTER and not optimizer.rows.has_own_master(owned):
                    continue  # it is the value's own memory
                by_rows = tensor.shape == owned.master.shape and (tensor.dim() > 0 or kind == MASTER)
                # A step count, or factors of a whole parameter, serve for any of its rows.
                start, stop = elements_of(owned) if by_rows else (0, tensor.numel())
                whole = None if by_rows else tuple(tensor.shape)
                is_number = kind != MASTER and not torch.is_tensor(optimizer.state[owned.master][kind])
                self.held.append(Held(whole_name, kind, start, stop, tensor.dtype, whole, is_number))
                self.tensors.append(tensor)


class Wishes:
    """All that this rank is to have once layers have come and the optimizer is laid out for them.

    States of the optimizer get memory of their own when their first elements come; what already lies here as it is
    wanted stays there.

    Args:
        there: names of values that have come before.
    """

    def __init__(
        self,
        layers: Layers,
        optimizer: ShardedOptimizer,
        arrived: Mapping[int, nn.Module | None],
        suffix: Suffix,
        there: Collection[str] = (),
    ) -> None:
        self.wanted: list[Wanted] = []
        self._targets: list[Tensor | Owned] = []
        self._states: dict[int, dict[str, Tensor]] = {}
        self._numbers: set[tuple[int, str]] = set()
        for item, layer in arrived.items():
            for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
                whole_name = layers.prefix(item) + name + suffix(tensor)
                if whole_name not in there:
                    self.wanted.append(Wanted(whole_name, 0, tensor.numel(), VALUE))
                    self._targets.append(tensor.detach())
        for owned in optimizer.owned:
            self.wanted.append(Wanted(owned.name + suffix(owned.parameter), *elements_of(owned), None))
            self._targets.append(owned)

    def place(self, move: Move, held: Held, own: Sequence[Tensor]) -> Tensor:
        """Memory for one move to this rank, of what its source has as ``held``; ``own``: this rank's tensors."""
        target = self._targets[move.wanted]
        if isinstance(target, Tensor):
            return stretch(target, 0, move.start, move.stop)
        first, stop = elements_of(target)
        if held.kind == MASTER:
            return stretch(target.master.detach(), first, move.start, move.stop)
        states = self._states.setdefault(move.wanted, {})
        if held.is_number:
            self._numbers.add((move.wanted, held.kind))
        if move.source == move.target and (held.whole is not None or (held.start, held.stop) == (first, stop)):
            states[held.kind] = own[move.held]
        if held.kind not in states:
            shape = target.master.shape if held.whole is None else held.whole
            device = torch.device("cpu") if held.whole == () else target.master.device
            states[held.kind] = torch.empty(shape, dtype=held.dtype, device=device)
        return stretch(states[held.kind], 0 if held.whole is not None else first, move.start, move.stop)

    def settle(self, optimizer: ShardedOptimizer) -> None:
        """Give the states that have come to their masters."""
        group_of = {id(master): group for group in optimizer.param_groups for master in group["params"]}
        for place, states in self._states.items():
            owned = self._targets[place]
            assert isinstance(owned, Owned)
            group, device = group_of[id(owned.master)], owned.master.device
            optimizer.state[owned.master] = {
                kind: without_tensor(tensor)
                if (place, kind) in self._numbers
                else tensor.to(home_of(kind, group, device))
                for kind, tensor in states.items()
            }


def transfer(
    move: Move, held: Sequence[Sequence[Held]], own: Sequence[Tensor], wishes: Wishes | None, rank: int
) -> Transfer | None:
    """One move with the memory that it reads and writes on ``rank``; None if it does not concern it.

    Args:
        held: of each rank.
        own: tensors of this rank's.
    """
    if rank not in (move.source, move.target):
        return None
    entry = held[move.source][move.held]
    leaving = stretch(own[move.held], entry.start, move.start, move.stop) if move.source == rank else None
    place = wishes.place(move, entry, own) if wishes is not None and move.target == rank else None
    return Transfer(move.source, move.target, leaving, place)


def elements_of(owned: Owned) -> tuple[int, int]:
    """First element and end of what is owned of a flattened parameter."""
    row = prod(owned.master.shape[1:])
    return owned.start * row, owned.stop * row
