"""The state of a job by name: parameters with everything that belongs to them.

That is a value, its fp32 master and the optimizer's state of it; buffers and frozen parameters have a value only. It
is taken apart into :class:`~paceline.checkpoint.Piece` (rows of one tensor), and put into place from anything that can
read rows by name, such as a checkpoint of any shape. What moves between ranks that train: :mod:`.exchange`.

Of experts that lie on several ranks a rank has some rows, in any order. Outside they are the rows of one tensor, by the
experts' numbers in the model (:class:`Numbering`): the same for every number of ranks and every placement. A rank with
fewer experts than others has empty rows after its own, which are 0, and which nothing outside knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint import Piece
from ..config.optimizers import class_name
from ..hf.sliced_layers import SLICE, SliceOf
from ..optim.corrections import NUM_UPDATES
from ..optim.owned_rows import Owned
from ..optim.sharded import ShardedOptimizer

REPLICATED = "ds_pipe_replicated"
"""DeepSpeed's mark on a parameter of which another stage holds the one that counts."""

SPREAD = "paceline_is_spread"
"""Mark on a parameter of experts that lie on several ranks of a stage, each of which has other rows of it."""

COPY = "@copy"
"""Ends the name of what a tied module has beside the tied weight, in the last stage's copy: it is one of its own."""

MASTER, VALUE = "master", "value"
KINDS_OF_VALUE = (MASTER, VALUE)

COUNTS = frozenset(("step", "mu_product", NUM_UPDATES))
"""States that optimizers compute on the host, unless they are fused: counts of steps, NAdam's product."""


class Source(Protocol):
    """Tensors that can be read by name, kind and rows, such as a checkpoint."""

    def kinds(self, name: str) -> list[str]: ...

    def shape(self, name: str, kind: str | None = None) -> tuple[int, ...]: ...

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Numbering:
    """Numbers that the rows of a parameter here have in the job's tensor.

    Args:
        shape: of the whole tensor.
        rows: number in it of each row here, where those after them are empty; None: they follow each other.
        num_shares: ranks of the stage that have different rows of it.
        first: number of the first row here, where they follow each other.
        columns: number of the first column here and the end, where some only are here.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    num_shares: int = 1
    first: int = 0
    columns: tuple[int, int] | None = None

    @property
    def column(self) -> int | None:
        """Number of the first column here; None: all are."""
        return None if self.columns is None else self.columns[0]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Rows ``start`` to ``stop - 1`` here as ``(first, end, number of the first)``, cut where numbers jump.

        Without those that are empty.
        """
        if self.rows is None:
            yield start, stop, self.first + start
            return
        first, stop = start, min(stop, len(self.rows))
        for row in range(start + 1, stop + 1):
            if row == stop or self.rows[row] != self.rows[row - 1] + 1:
                yield first, row, self.rows[first]
                first = row


class RowsOf(Protocol):
    """Which rows of a parameter are here, as :class:`paceline.hf.sliced_head.Rows`."""

    @property
    def start(self) -> int: ...

    @property
    def whole(self) -> int: ...


class Numbered(Protocol):
    """A layer whose experts lie on several ranks, as :class:`paceline.moe.layer.ExpertLayer`."""

    num_experts: int
    size: int

    @property
    def own_experts(self) -> tuple[int, ...]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Numberings:
    """The :class:`Numbering` of every tensor of a module."""

    def __init__(self, module: nn.Module) -> None:
        layers: dict[str, Numbered] = getattr(module, "expert_layers", {})
        self._layer_of = {id(parameter): layer for layer in layers.values() for parameter in layer.parameters()}
        in_rows: Callable[[], Mapping[nn.Parameter, RowsOf]] = getattr(module, "parameters_in_rows", dict)
        self._rows_of = {id(parameter): rows for parameter, rows in in_rows().items()}

    def of(self, tensor: Tensor) -> Numbering:
        if (own := getattr(tensor, SLICE, None)) is not None:
            return _of_slice(tensor, own)
        rows = self._rows_of.get(id(tensor))
        if rows is not None:
            return Numbering((rows.whole, *tensor.shape[1:]), first=rows.start)
        layer = self._layer_of.get(id(tensor))
        if layer is None:
            return Numbering(tuple(tensor.shape))
        return Numbering((layer.num_experts, *tensor.shape[1:]), layer.own_experts, layer.size)


def _of_slice(tensor: Tensor, own: SliceOf) -> Numbering:
    num_rows, *others = tensor.shape
    if own.dim == 0:
        return Numbering((own.size * num_rows, *others), first=own.rank * num_rows)
    width, *others = others
    return Numbering((num_rows, own.size * width, *others), columns=(own.rank * width, (own.rank + 1) * width))


def pieces(
    module: nn.Module, optimizer: ShardedOptimizer | None, *, replica: int, trained_only: bool = False
) -> Iterator[Piece]:
    """Pieces that this rank answers for: those of all ranks are the state of the job, each row once.

    Args:
        replica: data-parallel rank: the first writes what all have alike, buffers and frozen parameters; of frozen
            experts the first that have them.
        trained_only: leave frozen parameters out.
    """
    shares = list(optimizer.rows.shares()) if optimizer is not None else []
    tied, numberings = tied_weights(module), Numberings(module)
    for position, start, stop in shares:
        owned = optimizer.owned[position]  # type: ignore[union-attr]
        if is_copy(owned.parameter, tied) or is_of_first_slice(module, owned.parameter):
            continue
        numbering = numberings.of(owned.parameter)
        runs = list(numbering.runs(start, stop))
        for kind, tensor in parts_of(optimizer, owned).items():  # type: ignore[arg-type]
            if tensor.dim() and tensor.shape == owned.master.shape:
                for first, end, number in runs:
                    rows = tensor[first - owned.start : end - owned.start]
                    yield Piece(owned.name, kind, rows, number, numbering.shape, numbering.column)
            elif any(number == 0 for _, _, number in runs) and not numbering.column:
                yield Piece(owned.name, kind, tensor)
    for name, tensor in rest_of(module, optimizer):
        numbering = numberings.of(tensor)
        is_left_out = (trained_only and isinstance(tensor, nn.Parameter)) or is_of_first_slice(module, tensor)
        if replica >= numbering.num_shares or is_copy(tensor, tied) or is_left_out:
            continue
        if numbering.rows is None and numbering.shape == tuple(tensor.shape):
            yield Piece(name, VALUE, tensor.detach())
        else:
            for first, end, number in numbering.runs(0, len(tensor)):
                yield Piece(name, VALUE, tensor.detach()[first:end], number, numbering.shape, numbering.column)


def place(
    module: nn.Module,
    optimizer: ShardedOptimizer | None,
    source: Source,
    *,
    states: bool = True,
    trained_only: bool = False,
) -> None:
    """Fill what this rank owns from ``source``, with ``states`` the optimizer's states too.

    With ``trained_only``, frozen parameters that ``source`` lacks stay as they are. Not collective:
    ``optimizer.publish()`` afterwards brings the values to the ranks that do not own them.

    Raises:
        ValueError: ``source`` lacks something, or has it in another shape.
    """
    numberings = Numberings(module)
    for owned in optimizer.owned if optimizer is not None else ():
        if not owned.master.numel():
            continue  # it has no rows that anybody answers for
        _place_owned(optimizer, owned, numberings.of(owned.parameter), source, states)  # type: ignore[arg-type]
    for name, tensor in rest_of(module, optimizer):
        if trained_only and isinstance(tensor, nn.Parameter) and not source.kinds(name):
            continue
        numbering = numberings.of(tensor)
        _check(source, name, numbering)
        rows = len(tensor) if tensor.dim() else 1
        tensor.detach().copy_(_read(source, name, _kind_of_value(source, name), numbering, 0, rows))


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """The names under which a pipeline's parameters are saved: the same for every number of stages."""
    name_of = getattr(module, "state_name", str)
    tied = tied_weights(module)
    return {
        parameter: name_of(name) + (COPY if getattr(parameter, REPLICATED, False) and id(parameter) not in tied else "")
        for name, parameter in module.named_parameters()
    }


def tied_weights(module: Any) -> set[int]:
    """``id`` of the weights here that another stage has too, or another slice of this one."""
    has_others = module.num_stages > 1 or getattr(module, "tensor_parallel", 1) > 1
    return {id(w) for w, _ in module.get_tied_weights_and_groups()} if has_others else set()


def is_copy(tensor: Tensor, tied: set[int]) -> bool:
    """Whether another stage has the one of these two equal weights that counts."""
    return getattr(tensor, REPLICATED, False) and id(tensor) in tied


def is_of_first_slice(module: Any, tensor: Tensor) -> bool:
    """Whether another rank of this stage has the one of these equal tensors that counts: that with the first slices of
    layers in slices."""
    slicing = getattr(module, "slicing", None)
    return slicing is not None and slicing.rank > 0 and not hasattr(tensor, SLICE)


def is_spread(tensor: Tensor) -> bool:
    """Whether other ranks of this stage have other rows of a parameter, one of experts."""
    return bool(getattr(tensor, SPREAD, False))


def state_of(optimizer: Any, master: Tensor) -> dict[str, Any]:
    """State of a master. DeepSpeed's FusedAdam counts the steps of a whole group in the state of one of its parameters,
    which may go where others do not: that count is written into this state, too.

    Args:
        optimizer: of torch or DeepSpeed, or a :class:`ShardedOptimizer` around it.
    """
    state: dict[str, Any] = optimizer.state.get(master, {})
    if class_name(getattr(optimizer, "optimizer", optimizer)) == "FusedAdam" and "step" in state:
        groups = (group["params"] for group in optimizer.param_groups)
        together = next((group for group in groups if any(each is master for each in group)), [master])
        state["step"] = max(optimizer.state.get(each, {}).get("step", 0) for each in together)
    return state


def parts_of(optimizer: ShardedOptimizer, owned: Owned) -> dict[str, Tensor]:
    """Master and optimizer states of ``owned``, by kind.

    Raises:
        ValueError: a state is neither a tensor nor a number nor None.
    """
    state = state_of(optimizer, owned.master)
    parts = {kind: _as_tensor(kind, value) for kind, value in state.items()}
    return {MASTER: owned.master.detach(), **parts}


def _as_tensor(kind: str, value: Any) -> Tensor:
    if value is None:
        return torch.empty(0, dtype=torch.bool)
    if not isinstance(value, Tensor | Real):
        raise ValueError(
            f"the optimizer's state {kind!r} of a parameter is a {type(value).__name__}: only tensors and numbers can "
            "be saved and moved with the parameter; keep each tensor of it as a state of its own, and text in the "
            "parameter group."
        )
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)


def without_tensor(value: Tensor) -> Any:
    """The number, or None, that :func:`parts_of` has made a tensor of."""
    return value.item() if value.numel() else None


def rest_of(module: nn.Module, optimizer: ShardedOptimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters that the optimizer does not train, and buffers that are part of the model, by their names."""
    name_of = getattr(module, "state_name", str)
    for parameter, name in names_of(module).items():
        if optimizer is None or not optimizer.layout.trains(parameter):
            yield name, parameter
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield name_of(f"{prefix}.{name}" if prefix else name), buffer


@torch.no_grad()
def _place_owned(optimizer: ShardedOptimizer, owned: Owned, numbering: Numbering, source: Source, states: bool) -> None:
    name, rows = owned.name, (numbering, owned.start, owned.stop)
    _check(source, name, numbering)
    owned.master.copy_(_read(source, name, _kind_of_value(source, name), *rows))
    if not states:
        return
    state: dict[str, Tensor] = {}
    group = next(g for g in optimizer.param_groups if any(p is owned.master for p in g["params"]))
    for kind in source.kinds(name):
        if kind in KINDS_OF_VALUE or not optimizer.uses_state(kind):
            continue
        if numbering.shape and source.shape(name, kind) == numbering.shape:
            tensor = _read(source, name, kind, *rows)
        else:
            tensor = source.read(name, kind)
        state[kind] = tensor.to(home_of(kind, group, owned.master.device))
    if state:
        optimizer.state[owned.master] = state
    else:
        optimizer.state.pop(owned.master, None)


def home_of(kind: str, group: Mapping[str, Any], device: torch.device) -> torch.device:
    """Device on which an optimizer has a state of a parameter that lies on ``device``, in this group of its."""
    is_counted_by_host = kind in COUNTS and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if is_counted_by_host else device


def _kind_of_value(source: Source, name: str) -> str:
    return MASTER if MASTER in source.kinds(name) else VALUE


def _read(source: Source, name: str, kind: str, numbering: Numbering, start: int, stop: int) -> Tensor:
    """Read what belongs to rows ``start`` to ``stop - 1`` here; 0 belongs to those that are empty."""
    if not numbering.shape:
        return source.read(name, kind)
    runs = list(numbering.runs(start, stop))
    num_empty = stop - (runs[-1][1] if runs else start)
    parts = [source.read(name, kind, number, number + end - first) for first, end, number in runs]
    if numbering.columns is not None:
        parts = [part[:, slice(*numbering.columns)] for part in parts]
    if num_empty:
        parts.append(source.read(name, kind, 0, 1).new_zeros(num_empty, *numbering.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check(source: Source, name: str, numbering: Numbering) -> None:
    if not source.kinds(name):
        raise ValueError(f"it has no {name}: it is of another model.")
    shape = source.shape(name)
    if shape != numbering.shape:
        raise ValueError(
            f"its {name} has the shape {list(shape)}, the model's {list(numbering.shape)}: it is of another model."
        )


def collect(optimizer: ShardedOptimizer, name: str) -> dict[str, Tensor]:
    """Master and states of a whole parameter as the module here has it, by kind, on every rank that has the same.

    Collective over these. Where a rank has everything (ZeRO 0) the tensors are the optimizer's own, not copies.
    """
    mine = {owned.start: parts_of(optimizer, owned) for owned in optimizer.owned if owned.name == name}
    group = optimizer.layout.group_over(name)
    if group is None:
        (parts,) = mine.values()
        return parts
    parameter = optimizer.layout.parameters[optimizer.layout.names.index(name)]
    parts = {}
    for owner, start, stop in optimizer.layout.owners(name):
        own = mine.get(start)
        header = [None if own is None else [(kind, tuple(t.shape), t.dtype) for kind, t in own.items()]]
        dist.broadcast_object_list(header, group=group, group_src=owner, device=parameter.device)
        for kind, shape, dtype in header[0] or ():
            tensor = torch.empty(shape, dtype=dtype, device=parameter.device)
            if own is not None:
                tensor.copy_(own[kind])
            dist.broadcast(tensor, group=group, group_src=owner)
            if not shape or shape[0] != stop - start:
                parts[kind] = tensor
            else:
                whole = parts.setdefault(kind, tensor.new_empty((parameter.shape[0], *shape[1:])))
                whole[start:stop] = tensor
    return parts


def link_full_access(optimizer: ShardedOptimizer) -> None:
    """Have ``deepspeed.utils.safe_get_full_fp32_param`` and its like find their way.

    As with DeepSpeed's optimizers, all ranks of the group call them together, and outside of a step there are no
    gradients to get.
    """
    here = weakref.ref(optimizer)  # a graph keeps its parameters, and may be the optimizer's engine's
    for parameter in optimizer.layout.parameters:
        parameter._hp_mapping = here  # type: ignore[attr-defined]
        parameter.get_full_hp_param = partial(_get_full, here, parameter)  # type: ignore[attr-defined]
        parameter.set_full_hp_param = partial(_set_full, here, parameter)  # type: ignore[attr-defined]
        parameter.get_full_hp_grad = lambda: None  # type: ignore[attr-defined]


def unlink_full_access(optimizer: ShardedOptimizer) -> None:
    """Undo :func:`link_full_access`: a parameter that refers to itself would keep its memory when it has left."""
    for parameter in optimizer.layout.parameters:
        for name in ("_hp_mapping", "get_full_hp_param", "set_full_hp_param", "get_full_hp_grad"):
            vars(parameter).pop(name, None)


def _settled(optimizer: weakref.ref[ShardedOptimizer]) -> ShardedOptimizer:
    found = optimizer()
    if found is None:
        raise RuntimeError("the engine that trained this parameter is gone, and its optimizer: read the parameter.")
    found.check_settled()
    return found


def _get_full(
    here: weakref.ref[ShardedOptimizer], parameter: nn.Parameter, optim_state_key: str | None = None
) -> Tensor:
    optimizer = _settled(here)
    name = optimizer.layout.name_of(parameter)
    parts = collect(optimizer, name)
    if (optim_state_key or MASTER) not in parts:
        raise ValueError(f"{name} has no optimizer state {optim_state_key!r}: it has {sorted(set(parts) - {MASTER})}.")
    return parts[optim_state_key or MASTER].clone()


@torch.no_grad()
def _set_full(
    here: weakref.ref[ShardedOptimizer], parameter: nn.Parameter, value: Tensor, optim_state_key: str | None = None
) -> None:
    optimizer = _settled(here)
    for owned in optimizer.owned:
        if owned.parameter is parameter:
            target = parts_of(optimizer, owned)[optim_state_key or MASTER]
            target.copy_(value[owned.start : owned.stop] if target.dim() else value)
    if optim_state_key is None:
        optimizer.publish()
