"""Send the parameters of layers that are about to move beside the steps before.

What steps change of them meanwhile follows when the layers move, as lossless differences
(:mod:`..state.differences`): few bytes, for which training stands still.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.control import Gather
from ..state.differences import packed, unpack
from ..state.exchange import Held, Move, Transfer, Wanted, carry_out, in_rounds, plan_moves, sent_bytes, stretch
from ..state.exchange_beside import ExchangeBeside
from ..state.named import VALUE, is_spread
from ..supervise.watch import EVERYONE, WATCH
from .movable_layers import Layers, TensorNote, tensors_of_layer

LEAST_BYTES = 1 << 20
"""Fewer bytes than these are sent when the layers move."""

JUDGED_BYTES = 1 << 17
"""So many bytes of a layer are packed in any case, which shows whether it is faster to pack the others."""

Notes = Mapping[int, Sequence[TensorNote]]
"""Tensors by item, as its stage has them."""


def ahead_bytes(notes: Notes) -> int:
    """Bytes that can be sent before layers move."""
    return sum(note.num_bytes for noted in notes.values() for note in noted if note.goes_ahead)


class LayersAhead:
    """Parameters of layers that are about to move, on their way. Collective.

    Args:
        leaving: items that are to leave this rank.
        arrived: items that are to come to it, not yet filled.
        with_trained: send also what steps change, of which a rank keeps a copy as it was sent.
        suffix: ends the names of tensors where ranks of a stage have slices of them.
        replica: number of this rank's pipeline.
        rank: in the world.
        group: that carries them, and nothing else meanwhile.

    Attributes:
        before, parts: the boundaries, and those that they are sent for.
        arrived: as given.
        sent: bytes that each rank sends.
        sent_late: of these, the bytes that it sends in :meth:`arrive`.
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
        with_trained: bool,
        suffix: str,
        replica: int,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.before, self.parts, self.arrived, self._gather = list(layers.parts), list(parts), arrived, gather
        self._layers, self._leaving, self._suffix, self._rank, self._device = layers, leaving, suffix, rank, device
        names = {
            layers.prefix(item) + note.name + suffix: note.is_trained
            for item, noted in notes.items()
            for note in noted
            if note.goes_ahead and (with_trained or not note.is_trained)
        }
        trained = {name for name, is_trained in names.items() if is_trained}
        own = {name: tensor for name, tensor in self._own() if name in names}
        self._places = {name: tensor for name, tensor in _parameters(layers, arrived, suffix) if name in names}
        self._versions = {name: (tensor, tensor._version) for name, tensor in own.items() if name not in trained}
        self._as_sent = {
            name: tensor.clone(memory_format=torch.contiguous_format) if name in trained else tensor
            for name, tensor in own.items()
        }
        told = gather(
            (
                [Held(name, VALUE, 0, tensor.numel(), tensor.dtype) for name, tensor in own.items()],
                [Wanted(name, 0, tensor.numel(), VALUE) for name, tensor in self._places.items()],
                replica,
                [name in trained for name in self._places],
            )
        )
        moves = plan_moves([t[0] for t in told], [t[1] for t in told], [t[2] for t in told])
        self._late = [(m, told[m.target][1][m.wanted].name) for m in moves if told[m.target][3][m.wanted]]
        """Moves of what steps change, with its name."""
        self.sent, self.sent_late = sent_bytes(moves, len(told)), [0] * len(told)
        sent, wanted = list(self._as_sent.values()), list(self._places.values())
        rounds = [
            [
                Transfer(
                    move.source,
                    move.target,
                    stretch(sent[move.held], 0, move.start, move.stop) if move.source == rank else None,
                    stretch(wanted[move.wanted], 0, move.start, move.stop) if move.target == rank else None,
                )
                for move in one
                if rank in (move.source, move.target)
            ]
            for one in in_rounds(moves)
        ]
        self._exchange = ExchangeBeside(rounds, device, group)
        self._exchange.start()

    def has_arrived(self) -> bool:
        """Whether everything is where it is to be, on all ranks. Collective."""
        return all(self._gather(self._exchange.is_done))

    def wait(self) -> None:
        """Wait until everything that this rank sends and receives has come, as it was sent."""
        with WATCH.waiting("moving layers", EVERYONE):
            self._exchange.wait(progress=partial(WATCH.doing, "moving layers", EVERYONE))

    def arrive(self) -> frozenset[str]:
        """Wait until all is where it is to be, and bring what steps have changed since. Collective.

        Returns:
            Names of what has come to this rank and is as its source has it now.
        """
        self.wait()
        self._bring_changes()
        changed = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        return frozenset(self._places).difference(*self._gather(changed))

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        return _parameters(self._layers, {item: self._layers.get(item) for item in self._leaving}, self._suffix)

    def _bring_changes(self) -> None:
        """Send what steps have changed of trained parameters, as differences to what was sent before."""
        now = dict(self._own())
        messages = self._messages(now)
        # Whoever receives a message has to know its length.
        lengths = [iter(lengths) for lengths in self._gather([message.numel() for message in messages])]
        moves = [(move._replace(num_bytes=next(lengths[move.source])), name) for move, name in self._late]
        self.sent_late = sent_bytes((move for move, _ in moves), len(lengths))
        self.sent = [sum(each) for each in zip(self.sent, self.sent_late, strict=True)]
        own = iter(messages)
        ends: dict[Move, Transfer] = {}
        for move, _ in moves:
            if self._rank in (move.source, move.target):
                leaving = place = None
                if move.source == self._rank:
                    leaving = next(own)
                else:
                    place = torch.empty(move.num_bytes, dtype=torch.uint8, device=self._device)
                ends[move] = Transfer(move.source, move.target, leaving, place)
        rounds = ([ends[move] for move in one if move in ends] for one in in_rounds([move for move, _ in moves]))
        carry_out(rounds, self._device, progress=partial(WATCH.doing, "moving layers", EVERYONE))
        for move, name in moves:
            if move.target == self._rank and (message := ends[move].place) is not None:
                values = stretch(self._places[name], 0, move.start, move.stop)
                if message.numel() == values.nbytes:
                    values.view(torch.uint8).copy_(message)
                else:
                    unpack(message, values)

    def _messages(self, now: Mapping[str, Tensor]) -> list[Tensor]:
        """Changes of trained parameters that this rank sends, in the order of moves; packed while that is faster."""
        messages = []
        ahead = self.sent[self._rank]
        s_per_byte = self._exchange.seconds / ahead if ahead else 0.0
        took_s, num_bytes, saved = 0.0, 0, 0
        for move, name in self._late:
            if move.source == self._rank:
                new, old = (stretch(t[name], 0, move.start, move.stop) for t in (now, self._as_sent))
                whole = new.contiguous().view(-1).view(torch.uint8)
                message = None
                if num_bytes < JUDGED_BYTES or took_s < saved * s_per_byte:
                    begun = time.perf_counter()
                    message = packed(new, old)
                    took_s += 2 * (time.perf_counter() - begun)  # with unpacking
                    num_bytes += whole.numel()
                    saved += 0 if message is None else whole.numel() - message.numel()
                messages.append(whole if message is None else message)
        return messages


def _parameters(layers: Layers, modules: Mapping[int, nn.Module | None], suffix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters of layers that may be sent ahead, by name. Not experts, which may change ranks meanwhile."""
    for item, layer in modules.items():
        for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
            if isinstance(tensor, nn.Parameter) and not is_spread(tensor):
                yield layers.prefix(item) + name + suffix, tensor.detach()
