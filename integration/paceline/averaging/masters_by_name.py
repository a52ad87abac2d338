"""Masters of a job's parameters by name, brought together on its first rank and back again.

Of each parameter the fp32 master, where there is one, otherwise the parameter itself: flat, on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.control import ControlPlane
from ..config import exclusion
from ..config.optimizers import class_name
from ..hf.peft import PREFIX
from ..hf.sliced_layers import SLICE, SliceOf
from ..optim.owned_rows import Owned
from ..optim.sharded import ShardedOptimizer
from ..optim.zero_partitions import masters_of, num_real
from ..state.exchange import Held, Move, Transfer, Wanted, carry_out, in_rounds, plan_moves, stretch
from ..state.named import MASTER, Numberings, is_copy, is_of_first_slice, state_of, tied_weights

STATES = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "FusedAdam", "DeepSpeedCPUAdam"), ("exp_avg", "exp_avg_sq")),
    "SGD": ("momentum_buffer",),
}
"""States per element that optimizers keep, by the name of their class."""


class Share(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of a parameter, as they lie here, contiguous."""

    name: str
    start: int
    stop: int
    tensor: Tensor
    bias: float = 1.0
    """Factor by which moments are too small in an optimizer's first steps. They travel without it."""


class Masters(ABC):
    """All ranks of a job call its methods together.

    Args:
        settle: called before masters are read or written.
    """

    keeps_states_apart = True
    """Whether the optimizer's step counts are of single parameters."""

    def __init__(self, control: ControlPlane, settle: Callable[[], None] = lambda: None) -> None:
        self._control, self._settle = control, settle
        self._numels: dict[str, int] | None = None
        self._dtypes: dict[str, torch.dtype] = {}

    @abstractmethod
    def held(self, kind: str = MASTER) -> Iterator[Share]:
        """Shares that this rank answers for: together the ranks answer for every element once.

        Args:
            kind: the masters, or a state that the optimizer keeps of each of their elements; zeros before it has any.
        """

    @abstractmethod
    def stepped(self, kind: str = MASTER) -> Iterator[Share]:
        """All shares that this rank steps; of a state those that there are."""

    @abstractmethod
    def publish(self) -> None:
        """Bring the masters' values into the model."""

    @abstractmethod
    def states(self, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The optimizer's states of the named parameters, and maybe of others that it keeps in one with them.

        Each comes with the parameter group that it belongs to.
        """

    def numels(self) -> dict[str, int]:
        """Elements of each parameter of the job that is trained, by name."""
        if self._numels is None:
            self._numels = {}
            for told in self._control.gather([(s.name, s.stop, s.tensor.dtype) for s in self.held()]):
                for name, stop, dtype in told:
                    self._numels[name] = max(stop, self._numels.get(name, 0))
                    self._dtypes[name] = dtype
        return self._numels

    @torch.no_grad()
    def reset_states(self, names: Sequence[str]) -> None:
        """Have the optimizer begin anew with the named parameters."""
        self._settle()
        for state, group in self.states(names):
            for kind, value in state.items():
                first = _first_value(kind, group)
                if kind == "momentum_buffer" and group.get("dampening"):
                    state[kind] = None  # the first gradient of SGD's momentum is not dampened
                elif torch.is_tensor(value):
                    value.fill_(first)  # in place: others may refer to it
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    state[kind] = type(value)(first)

    @torch.no_grad()
    def gather(self, names: Sequence[str], kind: str = MASTER) -> list[Tensor] | None:
        """Copies of the named parameters, or states, on the first rank, flat and on the CPU; None on the others."""
        self._settle()
        wanted = set(names)
        shares = [share for share in self.held(kind) if share.name in wanted]
        whole = self._whole(names)
        own = [share.tensor.detach().reshape(-1).cpu() for share in shares]
        own = [flat if share.bias == 1 else flat / share.bias for share, flat in zip(shares, own, strict=True)]
        held = [_held(share, flat) for share, flat in zip(shares, own, strict=True)]
        self._carry(held, own, [Wanted(name, 0, len(whole[name]), MASTER) for name in whole], list(whole.values()))
        return list(whole.values()) if self._control.rank == 0 else None

    @torch.no_grad()
    def scatter(
        self, names: Sequence[str], tensors: Sequence[Tensor] | None, *, add: bool = False, kind: str = MASTER
    ) -> None:
        """Put values of the first rank into place everywhere, or add them; of states where the optimizer has some."""
        self._settle()
        wanted = set(names)
        own = list(tensors or ())
        held = [Held(n, MASTER, 0, len(t), t.dtype) for n, t in zip(names, own, strict=False)]
        targets = [share for share in self.stepped(kind) if share.name in wanted]
        arrived = [torch.empty(s.stop - s.start, dtype=s.tensor.dtype) for s in targets]
        self._carry(held, own, [Wanted(s.name, s.start, s.stop, MASTER) for s in targets], arrived)
        for share, values in zip(targets, arrived, strict=True):
            if add:
                share.tensor.add_(values.view_as(share.tensor).to(share.tensor.device))
            else:
                placed = values if share.bias == 1 else values * share.bias
                share.tensor.copy_(placed.view_as(share.tensor))
        if kind == MASTER:
            self.publish()

    def _whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        numels = self.numels()
        if self._control.rank != 0:
            return {}
        return {name: torch.empty(numels[name], dtype=self._dtypes[name]) for name in names}

    def _carry(
        self, held: Sequence[Held], own: Sequence[Tensor], wanted: Sequence[Wanted], places: Sequence[Tensor]
    ) -> None:
        rank = dist.get_rank()
        told = self._control.gather((list(held), list(wanted)))
        moves = plan_moves([t[0] for t in told], [t[1] for t in told], [0] * len(told))

        def transfer(move: Move) -> Transfer:
            at = (move.start, move.stop)
            leaving = stretch(own[move.held], held[move.held].start, *at) if move.source == rank else None
            place = stretch(places[move.wanted], wanted[move.wanted].start, *at) if move.target == rank else None
            return Transfer(move.source, move.target, leaving, place)

        rounds = ([transfer(m) for m in moves if rank in (m.source, m.target)] for moves in in_rounds(moves))
        carry_out(rounds, torch.device("cpu"), group=self._control.world)


def state_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Kinds of the optimizer's states that can be averaged.

    Raises:
        ValueError: it is not known.
    """
    name = class_name(optimizer)
    if name not in STATES:
        raise ValueError(
            f'paceline.averaging.optimizer_state is "average", and what {name} keeps is not known: choose "keep" or '
            f'"reset", or one of {", ".join(sorted(STATES))}.'
        )
    return () if name == "SGD" and not any(group["momentum"] for group in optimizer.param_groups) else STATES[name]


def _first_value(kind: str, group: Mapping[str, Any]) -> float:
    """With which value the optimizers of torch begin a state."""
    if kind in ("mu", "mu_product"):  # ASGD, NAdam
        return 1.0
    if kind in ("eta", "step_size"):  # ASGD, Rprop
        return float(group["lr"])
    return float(group.get("initial_accumulator_value", 0.0)) if kind == "sum" else 0.0  # Adagrad


def _group_of(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    groups: list[dict[str, Any]] = optimizer.param_groups  # between the steps of ZeRO 3 they are empty
    return next((group for group in groups if any(each is flat for each in group["params"])), groups[0])


def _bias(kind: str, state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """Divisor that Adam applies to a state of these parameters; 1 for a state that is no moment."""
    betas = dict(zip(("exp_avg", "exp_avg_sq"), group.get("betas", ()), strict=False))
    step = float(state.get("step", 0))
    return 1 - betas.get(kind, 0.0) ** step if step and group.get("bias_correction", True) else 1.0


def _held(share: Share, flat: Tensor) -> Held:
    return Held(share.name, MASTER, share.start, share.stop, flat.dtype)


class PipelineMasters(Masters):
    """Masters of a pipeline.

    Args:
        module: this rank's stage.
        fetch: brings new values to the copies of experts.
        settle: finishes steps that are under way. Collective.
    """

    def __init__(
        self,
        control: ControlPlane,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        fetch: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(control, settle)
        self._module, self._optimizer, self._fetch = module, optimizer, fetch

    def held(self, kind: str = MASTER) -> Iterator[Share]:
        optimizer, tied = self._optimizer, tied_weights(self._module)
        for position, start, stop in optimizer.rows.shares():
            owned = optimizer.owned[position]
            if not is_copy(owned.parameter, tied) and not is_of_first_slice(self._module, owned.parameter):
                tensor = self._tensor(owned, kind)
                tensor = torch.zeros_like(owned.master) if tensor is None else tensor
                yield from self._rows(owned, start, stop, tensor, self._bias(owned, kind))

    def stepped(self, kind: str = MASTER) -> Iterator[Share]:
        for owned in self._optimizer.owned:
            tensor = self._tensor(owned, kind)
            if tensor is not None:
                yield from self._rows(owned, owned.start, owned.stop, tensor, self._bias(owned, kind))

    def _tensor(self, owned: Owned, kind: str) -> Tensor | None:
        if kind == MASTER:
            return owned.master.detach()
        state: Tensor | None = self._optimizer.state.get(owned.master, {}).get(kind)
        return state

    def _bias(self, owned: Owned, kind: str) -> float:
        optimizer, master = self._optimizer, owned.master
        return 1.0 if kind == MASTER else _bias(kind, state_of(optimizer, master), _group_of(optimizer, master))

    def _rows(self, owned: Owned, start: int, stop: int, tensor: Tensor, bias: float) -> Iterator[Share]:
        """Rows ``start`` to ``stop - 1`` of the parameter, of which ``tensor`` has those that are owned."""
        row = prod(tensor.shape[1:]) if tensor.dim() else 1
        numbering = Numberings(self._module).of(owned.parameter)
        # Slices of columns follow one another.
        before = 0 if numbering.columns is None else numbering.columns[0] * prod(numbering.shape) // numbering.shape[1]
        for first, end, number in numbering.runs(start, stop):
            rows = tensor[first - owned.start : end - owned.start] if tensor.dim() else tensor
            yield Share(self._name_of(owned), before + number * row, before + (number + end - first) * row, rows, bias)

    @staticmethod
    def _name_of(owned: Owned) -> str:
        """Name under which islands have the same elements in the same order; slices of columns are those of as many."""
        own: SliceOf | None = getattr(owned.parameter, SLICE, None)
        return owned.name if own is None or own.dim == 0 else f"{owned.name} (in {own.size} slices)"

    def publish(self) -> None:
        self._optimizer.publish()
        self._fetch()

    def states(self, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        optimizer, wanted = self._optimizer, set(names)
        named = {id(owned.master) for owned in optimizer.owned if self._name_of(owned) in wanted}
        for group in optimizer.param_groups:
            for master in group["params"]:
                if id(master) in named:
                    yield optimizer.state.get(master, {}), group


class PlainMasters(Masters):
    """Masters of DeepSpeed's engine without a pipeline: segments of parameters, in the order of the ranks.

    With PEFT's adapters, names are those of the model inside, as a pipeline has them.

    Args:
        optimizer: of DeepSpeed, which has the masters.
        basic: the optimizer of ``torch.optim`` inside, which has the states.

    Raises:
        ValueError: its optimizer cannot be averaged from here.
    """

    keeps_states_apart = False

    def __init__(self, control: ControlPlane, module: nn.Module, optimizer: Any, basic: torch.optim.Optimizer) -> None:
        super().__init__(control)
        if any(getattr(p, "allreduce", True) is False for p in module.parameters()):
            row = exclusion("averaging", "experts on several ranks without a pipeline")
            raise ValueError(row.message("paceline.averaging is there", "experts lie on different ranks"))
        self._basic = basic
        # Now: what is frozen for some steps has its part in a round all the same.
        self._trained = {n.removeprefix(PREFIX): p for n, p in module.named_parameters() if p.requires_grad}
        self._masters = masters_of(optimizer)
        self._starts: dict[str, int] | None = None

    def _segments(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        for name, parameter in self._trained.items():
            segment = self._masters.segment(parameter)
            if segment is not None:
                num = num_real(parameter, segment)
                # As it is, unless it is padded: flat it would be a copy where its memory is in another order.
                real = segment.detach() if num is None else segment.detach().reshape(-1)[:num]
                if real.numel():
                    yield name, parameter, real

    def stepped(self, kind: str = MASTER) -> Iterator[Share]:
        return self._shares(kind)

    def held(self, kind: str = MASTER) -> Iterator[Share]:
        shares = list(self._shares(kind, torch.zeros_like))  # the first time it is collective
        return iter(shares if not self._masters.are_whole or self._control.rank == 0 else [])

    def _shares(self, kind: str, instead: Callable[[Tensor], Tensor] | None = None) -> Iterator[Share]:
        if self._starts is None:
            mine = [(name, segment.numel()) for name, _, segment in self._segments()]
            told = self._control.gather(mine)
            before = told[: self._control.rank] if not self._masters.are_whole else []
            self._starts = {}
            for segments in before:
                for name, numel in segments:
                    self._starts[name] = self._starts.get(name, 0) + numel
        for name, _, segment in self._segments():
            start = self._starts.get(name, 0)
            tensor, bias = (segment, 1.0) if kind == MASTER else self._state_of(segment, kind)
            if tensor is None and instead is not None:
                tensor = instead(segment)
            if tensor is not None:
                yield Share(name, start, start + segment.numel(), tensor, bias)

    def _state_of(self, segment: Tensor, kind: str) -> tuple[Tensor | None, float]:
        """Stretch of a state that belongs to the segment of a flat master, and its bias."""
        for flat, state in self._basic.state.items():
            first, rest = divmod(segment.data_ptr() - flat.data_ptr(), flat.element_size())
            if not rest and 0 <= first < flat.numel() and flat.device == segment.device:
                values: Tensor | None = state.get(kind)
                if values is not None and values.shape != segment.shape:
                    values = values.view(-1)[first : first + segment.numel()].view(segment.shape)
                return values, _bias(kind, state_of(self._basic, flat), _group_of(self._basic, flat))
        return None, 1.0

    def publish(self) -> None:
        self._masters.publish()

    def states(self, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for flat, state in self._basic.state.items():
            yield state, _group_of(self._basic, flat)
