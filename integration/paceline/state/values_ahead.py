"""Send values that are about to change ranks beside the steps before.

What steps change of them meanwhile follows when they are needed, as lossless differences (:mod:`.differences`): few
bytes, for which training stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.control import Gather
from ..supervise.watch import EVERYONE, WATCH
from .differences import packed, unpack
from .exchange import Held, Move, Transfer, Wanted, carry_out, in_rounds, plan_moves, sent_bytes, stretch
from .exchange_beside import ExchangeBeside
from .named import VALUE

JUDGED_BYTES = 1 << 17
"""So many bytes are packed in any case, which shows whether it is faster to pack the others."""


class ValuesAhead:
    """Named tensors on their way to other ranks, from the moment that this is made. Collective.

    Args:
        gather: over the ranks that send and receive.
        own: gives tensors that leave this rank, by name, as they are now; more than is wanted is not sent.
        places: by name, memory that is to hold tensors which come here.
        changing: names of those that steps change. A rank keeps a copy of what it has sent of them.
        replica: number of this rank's replica, from which it is sent what it can be.
        doing: for messages.
        group: that carries them, and nothing else meanwhile.
        pausing_group: that carries what was changed; None for the world's own. Of the same ranks.

    Attributes:
        sent: bytes that each rank sends.
        sent_late: of these, the bytes that it sends in :meth:`arrive`.
        places: as given.
    """

    def __init__(
        self,
        gather: Gather,
        own: Callable[[], Mapping[str, Tensor]],
        places: Mapping[str, Tensor],
        changing: Collection[str],
        *,
        replica: int,
        doing: str,
        device: torch.device,
        group: dist.ProcessGroup | None,
        pausing_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._gather, self._own, self.places, self._doing = gather, own, places, doing
        self._device, self._pausing_group, self._rank = device, pausing_group, dist.get_rank(pausing_group)
        leaving = own()
        self._versions = {name: (t, t._version) for name, t in leaving.items() if name not in changing}
        self._as_sent = {
            name: tensor.clone(memory_format=torch.contiguous_format) if name in changing else tensor
            for name, tensor in leaving.items()
        }
        told = gather(
            (
                [Held(name, VALUE, 0, tensor.numel(), tensor.dtype) for name, tensor in leaving.items()],
                [Wanted(name, 0, tensor.numel(), VALUE) for name, tensor in places.items()],
                replica,
                [name in changing for name in places],
            )
        )
        moves = plan_moves([t[0] for t in told], [t[1] for t in told], [t[2] for t in told])
        self._late = [(m, told[m.target][1][m.wanted].name) for m in moves if told[m.target][3][m.wanted]]
        """Moves of what steps change, with its name."""
        self.sent, self.sent_late = sent_bytes(moves, len(told)), [0] * len(told)
        sent, wanted = list(self._as_sent.values()), list(places.values())
        rounds = [
            [
                Transfer(
                    move.source,
                    move.target,
                    stretch(sent[move.held], 0, move.start, move.stop) if move.source == self._rank else None,
                    stretch(wanted[move.wanted], 0, move.start, move.stop) if move.target == self._rank else None,
                )
                for move in one
                if self._rank in (move.source, move.target)
            ]
            for one in in_rounds(moves)
        ]
        self._exchange = ExchangeBeside(rounds, device, group)
        self._exchange.start()

    @property
    def is_done(self) -> bool:
        """Whether all that this rank sends and receives has come, as it was sent."""
        return self._exchange.is_done

    def has_arrived(self) -> bool:
        """Whether everything is where it is to be, on all ranks. Collective."""
        return all(self._gather(self.is_done))

    def wait(self) -> None:
        """Wait until everything that this rank sends and receives has come, as it was sent."""
        with WATCH.waiting(self._doing, EVERYONE):
            self._exchange.wait(progress=partial(WATCH.doing, self._doing, EVERYONE))

    def arrive(self) -> frozenset[str]:
        """Wait until all is where it is to be, and bring what steps have changed since. Collective.

        Returns:
            Names of what has come to this rank and is as its source has it now.
        """
        self.wait()
        self._bring_changes()
        changed = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        return frozenset(self.places).difference(*self._gather(changed))

    def _bring_changes(self) -> None:
        """Send what steps have changed of trained parameters, as differences to what was sent before."""
        messages = self._messages(self._own())
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
        progress = partial(WATCH.doing, self._doing, EVERYONE)
        carry_out(rounds, self._device, group=self._pausing_group, progress=progress)
        for move, name in moves:
            if move.target == self._rank and (message := ends[move].place) is not None:
                values = stretch(self.places[name], 0, move.start, move.stop)
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
