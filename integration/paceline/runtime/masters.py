"""What the parameters of a job are trained in, by name, brought together on its first rank and back again.

Of each parameter the fp32 master, where there is one, otherwise the parameter itself: flat, on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..optim.flat_masters import masters_of, num_real
from .control import ControlPlane
from .exchange import Held, Move, Wanted, carry_out, plan_moves
from .state import MASTER, Numberings, pieces


class Share(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of a parameter, as they lie here, contiguous."""

    name: str
    start: int
    stop: int
    tensor: Tensor


class Masters(ABC):
    """All ranks of a job call its methods together."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._numels: dict[str, int] | None = None

    @abstractmethod
    def held(self) -> Iterator[Share]:
        """What this rank answers for: together the ranks answer for every element once."""

    @abstractmethod
    def stepped(self) -> Iterator[Share]:
        """All that this rank steps."""

    @abstractmethod
    def publish(self) -> None:
        """Bring the masters' values into the model."""

    @abstractmethod
    def states(self) -> Iterator[dict[str, Any]]:
        """The optimizer's states of what this rank steps."""

    def numels(self) -> dict[str, int]:
        """Elements of each parameter of the job that is trained, by name."""
        if self._numels is None:
            self._numels = {}
            for told in self._control.gather([(s.name, s.stop) for s in self.held()]):
                for name, stop in told:
                    self._numels[name] = max(stop, self._numels.get(name, 0))
        return self._numels

    @torch.no_grad()
    def reset_states(self) -> None:
        """Have the optimizer begin anew."""
        for state in self.states():
            for kind, value in state.items():
                if torch.is_tensor(value):
                    value.zero_()
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    state[kind] = type(value)(0)

    @torch.no_grad()
    def gather(self, names: Sequence[str]) -> list[Tensor] | None:
        """Copies of the named parameters on the first rank, flat and on the CPU; None on the others."""
        wanted = set(names)
        shares = [share for share in self.held() if share.name in wanted]
        whole = self._whole(names)
        own = [share.tensor.detach().reshape(-1).cpu() for share in shares]
        held = [_held(share, flat) for share, flat in zip(shares, own, strict=True)]
        self._carry(held, own, [Wanted(name, 0, len(whole[name]), False) for name in whole], list(whole.values()))
        return list(whole.values()) if self._control.rank == 0 else None

    @torch.no_grad()
    def scatter(self, names: Sequence[str], tensors: Sequence[Tensor] | None, *, add: bool) -> None:
        """Put values of the first rank into place everywhere, or add them."""
        wanted = set(names)
        own = list(tensors or ())
        held = [Held(n, MASTER, 0, len(t), (len(t),), t.dtype) for n, t in zip(names, own, strict=False)]
        targets = [share for share in self.stepped() if share.name in wanted]
        arrived = [torch.empty(s.stop - s.start, dtype=s.tensor.dtype) for s in targets]
        self._carry(held, own, [Wanted(s.name, s.start, s.stop, False) for s in targets], arrived)
        for share, values in zip(targets, arrived, strict=True):
            if add:
                share.tensor.add_(values.view_as(share.tensor))
            else:
                share.tensor.copy_(values.view_as(share.tensor))
        self.publish()

    def _whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        numels = self.numels()
        if self._control.rank != 0:
            return {}
        dtype = next((share.tensor.dtype for share in self.held()), torch.float32)
        return {name: torch.empty(numels[name], dtype=dtype) for name in names}

    def _carry(
        self, held: Sequence[Held], own: Sequence[Tensor], wanted: Sequence[Wanted], places: Sequence[Tensor]
    ) -> None:
        rank = dist.get_rank()
        told = self._control.gather((list(held), list(wanted)))
        moves = plan_moves([t[0] for t in told], [t[1] for t in told], [0] * len(told))

        def place(move: Move) -> Tensor:
            start = wanted[move.wanted].start
            return places[move.wanted][move.start - start : move.stop - start]

        targets = {n: place(move) for n, move in enumerate(moves) if move.target == rank}
        carry_out(moves, list(held), list(own), targets, torch.device("cpu"), group=self._control.world)


def _held(share: Share, flat: Tensor) -> Held:
    return Held(share.name, MASTER, share.start, share.stop, (len(flat),), flat.dtype)


class PipelineMasters(Masters):
    """Of an engine with the pipelines' optimizer."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.control)
        self._engine = engine

    def held(self) -> Iterator[Share]:
        engine = self._engine
        for piece in pieces(engine.module, engine.optimizer, replica=engine.replica):
            if piece.kind == MASTER:
                shape = piece.whole
                row = prod(shape[1:]) if shape else 1
                start = piece.start * row
                yield Share(piece.name, start, start + piece.tensor.numel(), piece.tensor)

    def stepped(self) -> Iterator[Share]:
        numberings = Numberings(self._engine.module)
        for owned in self._engine.optimizer.owned:
            master = owned.master.detach()
            row = prod(master.shape[1:]) if master.dim() else 1
            for first, end, number in numberings.of(owned.parameter).runs(owned.start, owned.stop):
                tensor = master[first - owned.start : end - owned.start] if master.dim() else master
                yield Share(owned.name, number * row, (number + end - first) * row, tensor)

    def publish(self) -> None:
        self._engine.optimizer.publish()
        for layer in self._engine.expert_layers.values():
            layer.fetch()

    def states(self) -> Iterator[dict[str, Any]]:
        optimizer = self._engine.optimizer
        for owned in optimizer.owned:
            yield optimizer.state.get(owned.master, {})


class PlainMasters(Masters):
    """Of an engine of DeepSpeed's without a pipeline: segments of parameters, in the order of the ranks.

    Raises:
        ValueError: its optimizer cannot be averaged from here.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.control)
        if any(getattr(p, "allreduce", True) is False for p in engine.module.parameters()):
            raise ValueError(
                "paceline.averaging is there, and experts lie on different ranks of an engine without a pipeline: use "
                'a pipeline ("paceline": {"pipeline": {}}), whose experts have names of their own, or leave '
                "expert_parallel out."
            )
        self._engine = engine
        self._masters = masters_of(engine.optimizer)
        self._starts: dict[str, int] | None = None

    def _segments(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        for name, parameter in self._engine.module.named_parameters():
            segment = self._masters.segment(parameter) if parameter.requires_grad else None
            if segment is not None:
                numel = segment.numel() if self._masters.are_whole else num_real(parameter, segment)
                if numel:
                    yield name, parameter, segment.detach().reshape(-1)[:numel]

    def stepped(self) -> Iterator[Share]:
        if self._starts is None:
            mine = [(name, len(segment)) for name, _, segment in self._segments()]
            told = self._control.gather(mine)
            before = told[: self._control.rank] if not self._masters.are_whole else []
            self._starts = {}
            for segments in before:
                for name, numel in segments:
                    self._starts[name] = self._starts.get(name, 0) + numel
        for name, _, segment in self._segments():
            start = self._starts.get(name, 0)
            yield Share(name, start, start + len(segment), segment)

    def held(self) -> Iterator[Share]:
        shares = list(self.stepped())  # the first time it is collective
        return iter(shares if not self._masters.are_whole or self._control.rank == 0 else [])

    def publish(self) -> None:
        self._masters.publish()

    def states(self) -> Iterator[dict[str, Any]]:
        yield from self._engine.basic_optimizer.state.values()
