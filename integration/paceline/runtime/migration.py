"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that moves layers between stages while it trains.

At a step boundary the layers whose stage changes go there with everything that belongs to them: values, fp32 masters,
the optimizer's states, buffers, and what is frozen. First all that can fail is tried (the layers are made anew where
they are to come, their memory is taken): if it fails on any rank, all stay as they were. Then modules are swapped, the
optimizer is laid out for the parameters that are there now, and every tensor goes straight to the rank that needs it
(:mod:`..state.exchange`): with ZeRO 1 each row of a state from its old owner to its new one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.staging import ranks_sharing
from ..config.stage_counts import resolve_method
from ..measure.device_memory import room_bytes
from ..optim.sharded import Owned, ShardedOptimizer
from ..state.exchange import Held, Move, Transfer, Wanted, carry_out, in_rounds, plan_moves, sent_bytes, stretch
from ..state.named import MASTER, VALUE, link_full_access, parts_of, unlink_full_access
from ..supervise.watch import EVERYONE, WATCH
from .checkpointing import NOT_RESTORED
from .movable_layers import Layers, TensorNote, tensors_of_layer
from .plain_layers import PlainLayers

logger = logging.getLogger("paceline")

MIGRATIONS = 64
"""The last migrations, whose figures are kept."""


class Migrating:
    """Moves layers between stages. Mixed into the engine; all ranks call its methods together."""

    def _start_migrating(self: Any) -> None:
        self.layers: Layers = self._make_layers()
        self.migrations: deque[dict[str, Any]] = deque(maxlen=MIGRATIONS)
        """What the last migrations were and cost: ``step``, ``from``, ``to``, ``bytes``, ``seconds``, ``rebuild_s``."""

    def _start_partition(self: Any) -> None:
        """Apply the JSON's partition to a module that was built with another one."""
        method = resolve_method(self._config._param_dict)[0]
        if method is None or self.num_stages == 1 or not isinstance(self.optimizer, ShardedOptimizer):
            return
        boundaries = self.layers.boundaries(method, self.partition_choice.profile)
        if boundaries is not None:
            self.repartition(boundaries)

    def _make_layers(self: Any) -> Layers:
        return PlainLayers(self.module)

    def repartition(self: Any, parts: Sequence[int], *, memory_bytes: int | None = None) -> dict[str, Any] | None:
        """Have each stage hold the items that ``parts`` says, from the next step on. Call it between steps.

        No number of the training changes: every bit of every weight is what it would have been. Only sums are taken in
        another order: that of the norm, with clipping, and those of gradients over three or more replicas. Of what is
        random (dropout), each rank goes on with its own generator; hooks that somebody put on a layer stay behind.

        Args:
            parts: boundaries over the items, one more than there are stages: ``[0, …, number of items]``. Items are
                the layers of a ``PipelineModule``; of a Hugging Face model embedding, decoder layers, head.
            memory_bytes: what a rank may take for layers that come; by default what is free.

        Returns:
            The figures that :attr:`migrations` gets; None where nothing is to move. ``bytes`` are those sent from rank
            to rank, ``most_bytes`` those of the rank that sends the most, ``transfer_s`` the exchange of the slowest
            rank and ``rebuild_s`` all else.

        Raises:
            ValueError: on every rank, and nothing has moved: boundaries that do not fit, a layer that cannot be made
                anew, groups of the optimizer that a stage lacks, or memory that does not suffice.
            RuntimeError: a rank or a connection was lost on the way: this engine is of no use any more.
        """
        WATCH.step = self.global_steps
        self._check_whole()
        if not isinstance(self.optimizer, ShardedOptimizer):
            raise ValueError(
                'there is no optimizer, so layers have no reason to move: write "optimizer" into the JSON.'
            )
        error: Exception | None = None
        asked = self.control.gather(list(parts))
        try:
            if any(others != asked[0] for others in asked):
                raise ValueError(f"ranks ask for different partitions, {asked}: give all the same.")
            new = self.layers.check(asked[0])
        except Exception as caught:
            error = caught
        self.control.settle(error, "checking a partition")
        old = [int(part) for part in self.module.parts]
        if new == old:
            return None
        self._at.doing = None  # what the last step did last
        with self._naming_lost_peers():
            found = self._migrate(old, new, memory_bytes)
        WATCH.idle()
        return found

    def _migrate(self: Any, old: list[int], new: list[int], memory_bytes: int | None) -> dict[str, Any]:
        begun = time.perf_counter()
        WATCH.doing("preparing to move layers", EVERYONE)
        moving = _Moving(old, new, self.stage_id)
        notes = self._notes(moving)
        WATCH.doing("making layers that come")
        arrived: dict[int, nn.Module | None] = {}
        error: Exception | None = None
        try:
            self._refuse(moving, notes, memory_bytes)
            for item in moving.arriving:
                arrived[item] = self.layers.make(item, notes[item])
        except Exception as caught:
            error = caught
        WATCH.doing("preparing to move layers", EVERYONE)
        try:
            self.control.settle(error, f"preparing to move layers ({_shown(old)} to {_shown(new)})")
        except BaseException:
            self.layers.unmake(arrived)
            raise

        with self._half_way("layers were being moved"):
            WATCH.doing("moving layers", EVERYONE)
            held, own = self._holdings() if moving.concerns_this_stage else ([], [])
            natural = self.natural_gradient
            learned = natural and natural.state_of([self.layers.prefix(item) for item in moving.leaving])
            unlink_full_access(self.optimizer)
            self.layers.swap(new, arrived)
            if natural is not None:
                natural.follow(learned, self.control.gather_over_stages)
            if moving.concerns_this_stage:
                self._rebuild_optimizer(moving, notes, arrived)
            wanted, places = self._wishes(arrived) if moving.concerns_this_stage else ([], _Places())
            told = self.control.gather((held, wanted, self.pipe_number))
            moves = plan_moves([t[0] for t in told], [t[1] for t in told], [t[2] for t in told])
            transfer_begun = time.perf_counter()
            rank = self.global_rank
            holdings = [t[0] for t in told]
            rounds = ([t for m in r if (t := places.transfer(m, holdings, own, rank))] for r in in_rounds(moves))
            goes_on = partial(WATCH.doing, "moving layers", EVERYONE)
            carry_out(rounds, torch.device(self.device), progress=goes_on)
            transfer_s = time.perf_counter() - transfer_begun
            places.settle(self.optimizer)
            self._forget_the_old_stage()
            # The end of the slowest is the end of all.
            seconds = self.control.gather((transfer_s, time.perf_counter() - begun))
        sent = sent_bytes(moves, len(told))
        slowest = max(transfer for transfer, _ in seconds)
        migration = {
            "step": self.global_steps,
            "from": old,
            "to": new,
            "bytes": sum(sent),
            "most_bytes": max(sent),
            "seconds": max(whole for _, whole in seconds),
            "transfer_s": slowest,
            "rebuild_s": max(whole - transfer for transfer, whole in seconds),
        }
        self.migrations.append(migration)
        if rank == 0:
            logger.info(
                "step %d: layers moved, %s -> %s: %.4g MB in %.3g s",
                *(self.global_steps, _shown(old), _shown(new), sum(sent) / 1e6, migration["seconds"]),
            )
        return migration

    # -- before anything moves -----------------------------------------------------------------------------------

    def _notes(self: Any, moving: _Moving) -> dict[int, list[TensorNote]]:
        """The tensors of all layers that move, as their stages have them."""
        groups = self.optimizer.param_groups
        mine: dict[int, list[TensorNote]] = {}
        for item in moving.leaving:
            layer = self.layers.get(item)
            noted = mine.setdefault(item, [])
            for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
                number = self.optimizer.group_of.get(self.layers.prefix(item) + name)
                options = None
                if number is not None:
                    options = {k: v for k, v in groups[number].items() if k not in NOT_RESTORED}
                is_parameter = isinstance(tensor, nn.Parameter)
                shape = tuple(tensor.shape)
                requires = tensor.requires_grad
                noted.append(TensorNote(name, is_parameter, shape, tensor.dtype, requires, number, options))
        notes: dict[int, list[TensorNote]] = {}
        for told in self.control.gather(mine):
            for item, noted in told.items():
                notes.setdefault(item, noted)
        return notes

    def _refuse(self: Any, moving: _Moving, notes: dict[int, list[TensorNote]], memory_bytes: int | None) -> None:
        for item in moving.arriving:
            for note in notes[item]:
                if note.group is not None:
                    self._group_for(note, item)
        stays = [p for p in self.optimizer.parameters if self._item_of(p) not in moving.leaving]
        comes = [note for item in moving.arriving for note in notes[item] if note.group is not None]
        if moving.concerns_this_stage and not stays and not comes and not self._keeps_parameters(moving, notes):
            raise ValueError(
                f"partition {_shown(moving.new)} leaves stage {self.stage_id} without a parameter: choose one with at "
                "least one on every stage."
            )
        self.optimizer.check_dtypes({p.dtype for p in stays} | {note.dtype for note in comes})
        need = self._needed_bytes(moving, notes)
        room = self.memory_room() if memory_bytes is None else memory_bytes
        if need > room:
            raise ValueError(
                f"partition {_shown(moving.new)} does not fit: stage {self.stage_id} would take {need / 2**20:.1f} MiB "
                f"more{_items(moving.arriving)} and has room for {room / 2**20:.1f} MiB; nothing has moved. Leave "
                "it fewer layers, or lower the micro-batch size."
            )

    def _keeps_parameters(self: Any, moving: _Moving, notes: dict[int, list[TensorNote]]) -> bool:
        """Whether frozen parameters will be here."""
        comes = any(note.is_parameter for item in moving.arriving for note in notes[item])
        leaves = [layer for item in moving.leaving if (layer := self.layers.get(item)) is not None]
        leaving = {parameter for layer in leaves for parameter in layer.parameters()}
        return comes or any(parameter not in leaving for parameter in self.module.parameters())

    def memory_room(self: Any) -> int:
        """Bytes that this rank may still take."""
        device = torch.device(self.device)
        return room_bytes(device, ranks_sharing(device))

    def _needed_bytes(self: Any, moving: _Moving, notes: dict[int, list[TensorNote]]) -> int:
        """What this rank takes more than it has now, until what leaves it has left."""
        come = sum(note.num_bytes for item in moving.arriving for note in notes[item])
        # What is trained has masters, states and gradients beside its value, as much as what is here.
        trained = sum(note.num_bytes for item in moving.arriving for note in notes[item] if note.group is not None)
        return int(come + trained * self.state_bytes_per_value_byte()) + self._laid_out_twice_bytes(moving)

    def _laid_out_twice_bytes(self: Any, moving: _Moving) -> int:
        """With ZeRO 1 rows change owners, and values lie in the optimizer's memory: old and new are there at once."""
        optimizer = self.optimizer
        if not (optimizer.is_sharded and moving.concerns_this_stage):
            return 0
        values = sum(_num_bytes(p) for p in optimizer.parameters)
        kept = ((o, kind, t) for o in optimizer.owned for kind, t in parts_of(optimizer, o).items())
        return values + sum(_num_bytes(t) for o, kind, t in kept if kind != MASTER or t.dtype != o.parameter.dtype)

    def state_bytes_per_value_byte(self: Any) -> float:
        """Bytes of masters, states and gradients on this rank for each byte of the values that it trains."""
        optimizer = self.optimizer
        values = sum(_num_bytes(p) for p in optimizer.parameters)
        return float(optimizer.num_bytes()) / values if values else 0.0

    def _group_for(self: Any, note: TensorNote, item: int) -> int:
        """The group here that has the options of the one that trains a layer there."""
        groups = self.optimizer.param_groups
        order = sorted(range(len(groups)), key=lambda number: number != note.group)
        for number in order:
            if {k: v for k, v in groups[number].items() if k not in NOT_RESTORED} == note.options:
                return number
        raise ValueError(
            f"layer {item} cannot move to stage {self.stage_id}: no group of its optimizer has the options of the one "
            f"that trains {note.name}; give every stage the same parameter groups, empty ones too."
        )

    def _item_of(self: Any, parameter: nn.Parameter) -> int | None:
        name = self.optimizer.name_of(parameter)
        return next((item for item in self.layers.here if name.startswith(self.layers.prefix(item))), None)

    # -- what moves ----------------------------------------------------------------------------------------------

    @property
    def _slice(self: Any) -> str:
        """With tensor parallelism ranks of a stage have other tensors under the same names."""
        is_cut = self.grid.get_slice_parallel_world_size() > 1
        return f" (slice {self.grid.get_slice_parallel_rank()})" if is_cut else ""

    def _holdings(self: Any) -> tuple[list[Held], list[Tensor]]:
        """Everything of this stage that belongs to a layer or its training, before it changes."""
        held: list[Held] = []
        own: list[Tensor] = []

        for item in self.layers.here:
            layer = self.layers.get(item)
            for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
                whole_name = self.layers.prefix(item) + name + self._slice
                held.append(Held(whole_name, VALUE, 0, tensor.numel(), tensor.dtype))
                own.append(tensor.detach())
        for owned in self.optimizer.owned:
            for kind, tensor in parts_of(self.optimizer, owned).items():
                if kind == MASTER and tensor.dtype == owned.parameter.dtype:
                    continue  # the value says it
                by_rows = tensor.shape == owned.master.shape and (tensor.dim() > 0 or kind == MASTER)
                # A step count, or factors of a whole parameter, serve for any of its rows.
                start, stop = elements_of(owned) if by_rows else (0, tensor.numel())
                is_number = kind != MASTER and not torch.is_tensor(self.optimizer.state[owned.master][kind])
                whole = None if by_rows else tuple(tensor.shape)
                held.append(Held(owned.name + self._slice, kind, start, stop, tensor.dtype, whole, is_number))
                own.append(tensor)
        return held, own

    def _wishes(self: Any, arrived: dict[int, nn.Module | None]) -> tuple[list[Wanted], _Places]:
        wanted: list[Wanted] = []
        places = _Places()
        for item, layer in arrived.items():
            for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
                wanted.append(Wanted(self.layers.prefix(item) + name + self._slice, 0, tensor.numel(), VALUE))
                places.wishes.append(tensor.detach())
        for owned in self.optimizer.owned:
            wanted.append(Wanted(owned.name + self._slice, *elements_of(owned), None))
            places.wishes.append(owned)
        return wanted, places

    def _rebuild_optimizer(
        self: Any, moving: _Moving, notes: dict[int, list[TensorNote]], arrived: dict[int, nn.Module | None]
    ) -> None:
        names, counts, apart = self._placement()
        group_of = dict(self.optimizer.group_of)
        for item in arrived:
            for note in notes[item]:
                if note.group is not None:
                    group_of[self.layers.prefix(item) + note.name] = self._group_for(note, item)
        groups: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for parameter, name in names.items():
            if name in group_of:
                groups[group_of[name]].append(parameter)
        self.optimizer.rebuild(groups, names, counts=counts, apart=apart)

    def _forget_the_old_stage(self: Any) -> None:
        """What was kept of the stage as it was."""
        link_full_access(self.optimizer)
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._find_trained()
        self.saved_bytes.clear()
        self.recorder.forget()
        self.reset_activation_shape()


class _Moving:
    """Which items of a stage change."""

    def __init__(self, old: Sequence[int], new: Sequence[int], stage: int) -> None:
        self.old, self.new = old, new
        before, after = range(old[stage], old[stage + 1]), range(new[stage], new[stage + 1])
        self.leaving = [item for item in before if item not in after]
        self.arriving = [item for item in after if item not in before]

    @property
    def concerns_this_stage(self) -> bool:
        return bool(self.leaving or self.arriving)


class _Places:
    """Where what arrives is put. States of the optimizer get memory of their own when their first rows come."""

    def __init__(self) -> None:
        self.wishes: list[Tensor | Owned] = []
        self._states: dict[int, dict[str, Tensor]] = {}
        self._numbers: set[tuple[int, str]] = set()

    def transfer(self, move: Move, held: Sequence[Sequence[Held]], own: Sequence[Tensor], rank: int) -> Transfer | None:
        """One move with the memory that it reads and writes here; None if it does not concern this rank."""
        if rank not in (move.source, move.target):
            return None
        entry = held[move.source][move.held]
        leaving = stretch(own[move.held], entry.start, move.start, move.stop) if move.source == rank else None
        place = self._place(move, entry, own) if move.target == rank else None
        return Transfer(move.source, move.target, leaving, place)

    def _place(self, move: Move, held: Held, own: Sequence[Tensor]) -> Tensor:
        """Memory for one move to this rank; what already lies here as it is wanted stays there."""
        wish = self.wishes[move.wanted]
        if isinstance(wish, Tensor):
            return stretch(wish, 0, move.start, move.stop)
        first, stop = elements_of(wish)
        if held.kind == MASTER:
            return stretch(wish.master.detach(), first, move.start, move.stop)
        states = self._states.setdefault(move.wanted, {})
        if held.is_number:
            self._numbers.add((move.wanted, held.kind))
        if move.source == move.target and (held.whole is not None or (held.start, held.stop) == (first, stop)):
            states[held.kind] = own[move.held]
        if held.kind not in states:
            shape = wish.master.shape if held.whole is None else held.whole
            device = torch.device("cpu") if held.whole == () else wish.master.device
            states[held.kind] = torch.empty(shape, dtype=held.dtype, device=device)
        return stretch(states[held.kind], 0 if held.whole is not None else first, move.start, move.stop)

    def settle(self, optimizer: Any) -> None:
        """Everything is here: the states belong to their masters."""
        group_of = {id(master): group for group in optimizer.param_groups for master in group["params"]}
        for place, states in self._states.items():
            owned = self.wishes[place]
            assert isinstance(owned, Owned)
            group, device = group_of[id(owned.master)], owned.master.device
            on_device = group.get("fused") or group.get("capturable")
            optimizer.state[owned.master] = {
                kind: tensor.item() if (place, kind) in self._numbers else tensor.to(device) if on_device else tensor
                for kind, tensor in states.items()
            }


def elements_of(owned: Owned) -> tuple[int, int]:
    """First element and end of what is owned of a flattened parameter."""
    row = prod(owned.master.shape[1:])
    return owned.start * row, owned.stop * row


def _shown(parts: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, parts)) + "]"


def _items(items: Sequence[int]) -> str:
    if not items:
        return ""
    return f" for layer {items[0]}" if len(items) == 1 else f" for layers {items[0]}-{items[-1]}"


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
