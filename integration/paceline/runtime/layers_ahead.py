"""Send what no step changes of layers that are about to move, frozen weights above all, beside the step before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.control import Gather
from ..state.exchange import Held, Transfer, Wanted, in_rounds, plan_moves, sent_bytes, stretch
from ..state.exchange_beside import ExchangeBeside
from ..state.named import VALUE, is_spread
from ..supervise.watch import EVERYONE, WATCH
from .movable_layers import Layers, TensorNote, tensors_of_layer

LEAST_BYTES = 1 << 20
"""Fewer bytes of frozen weights than these are sent with the rest."""

Notes = Mapping[int, Sequence[TensorNote]]
"""Tensors by item, as its stage has them."""


def frozen_bytes(notes: Notes) -> int:
    """Bytes of what no step changes."""
    return sum(note.num_bytes for noted in notes.values() for note in noted if note.is_frozen)


class LayersAhead:
    """Frozen weights of layers that are about to move, on their way. Collective.

    Args:
        leaving: items that are to leave this rank.
        arrived: items that are to come to it, not yet filled.
        suffix: ends the names of tensors where ranks of a stage have slices of them.
        replica: number of this rank's pipeline.
        rank: in the world.
        group: that carries them, and nothing else meanwhile.

    Attributes:
        before, parts: the boundaries, and those that they are sent for.
        arrived: as given.
        sent: bytes that each rank sends.
        prepared_s: seconds that training stood still for preparing this; who did it knows.
    """

    prepared_s = 0.0

    def __init__(
        self,
        gather: Gather,
        layers: Layers,
        parts: Sequence[int],
        leaving: Sequence[int],
        arrived: Mapping[int, nn.Module | None],
        notes: Notes,
        *,
        suffix: str,
        replica: int,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.before, self.parts, self.arrived, self._gather = list(layers.parts), list(parts), arrived, gather
        own = dict(_frozen_of(layers, {item: layers.get(item) for item in leaving}, notes, suffix))
        places = dict(_frozen_of(layers, arrived, notes, suffix))
        self._names = frozenset(places)
        self._versions = {name: (tensor, tensor._version) for name, tensor in own.items()}
        told = gather(
            (
                [Held(name, VALUE, 0, tensor.numel(), tensor.dtype) for name, tensor in own.items()],
                [Wanted(name, 0, tensor.numel(), VALUE) for name, tensor in places.items()],
                replica,
            )
        )
        moves = plan_moves([t[0] for t in told], [t[1] for t in told], [t[2] for t in told])
        self.sent = sent_bytes(moves, len(told))
        held, wanted = list(own.values()), list(places.values())
        rounds = [
            [
                Transfer(
                    move.source,
                    move.target,
                    stretch(held[move.held], 0, move.start, move.stop) if move.source == rank else None,
                    stretch(wanted[move.wanted], 0, move.start, move.stop) if move.target == rank else None,
                )
                for move in one
                if rank in (move.source, move.target)
            ]
            for one in in_rounds(moves)
        ]
        self._exchange = ExchangeBeside(rounds, device, group)
        self._exchange.start()

    def arrive(self) -> frozenset[str]:
        """Wait until all is where it is to be. Collective.

        Returns:
            Names of what has come to this rank and is as its source has it now.
        """
        with WATCH.waiting("moving layers", EVERYONE):
            self._exchange.wait(progress=partial(WATCH.doing, "moving layers", EVERYONE))
        changed = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        return self._names.difference(*self._gather(changed))


def _frozen_of(
    layers: Layers, modules: Mapping[int, nn.Module | None], notes: Notes, suffix: str
) -> Iterator[tuple[str, Tensor]]:
    for item, layer in modules.items():
        frozen = {note.name for note in notes[item] if note.is_frozen}
        for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
            if name in frozen and not is_spread(tensor):  # experts may change ranks meanwhile
                yield layers.prefix(item) + name + suffix, tensor.detach()
