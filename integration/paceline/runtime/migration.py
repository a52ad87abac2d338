"""Move layers between stages while they train.

At a step boundary the layers whose stage changes go there with everything that belongs to them: values, fp32 masters,
the optimizer's states, buffers, and what is frozen. First all that can fail is tried (the layers are made anew where
they are to come, their memory is checked): if it fails on any rank, all stay as they were. Then modules are swapped,
the optimizer is laid out for the parameters that are there now, and every tensor goes straight to the rank that needs
it (:mod:`..state.exchange`): with ZeRO 1 each row of a state from its old owner to its new one.

Training stands still for the values alone: nobody looks at masters and states before the end of the next step, and
until then they follow beside it (:mod:`..state.exchange_beside`). Values too can be sent beside steps before, but for
what these change (:mod:`.layers_ahead`). Not so on GPUs, where it was never tried, and where updates are made beside
computation.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypedDict

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ..comm.control import ControlPlane, Gather
from ..comm.groups import end_with, gloo_group, groups_here
from ..comm.staging import ranks_sharing
from ..comm.transport import TIMEOUT
from ..measure.device_memory import room_bytes
from ..optim.sharded import ShardedOptimizer
from ..state.exchange import Move, Transfer, carry_out, in_rounds, plan_moves, sent_bytes
from ..state.exchange_beside import ExchangeBeside
from ..state.named import VALUE, is_spread, link_full_access, unlink_full_access
from ..state.rank_states import NOT_RESTORED
from ..supervise.expected import expecting_all
from ..supervise.watch import EVERYONE, WATCH
from .layers_ahead import LEAST_BYTES, LayersAhead, ahead_bytes
from .migration_check import Change, MoveCheck, shown
from .movable_layers import Layers, TensorNote, tensors_of_layer
from .stage_tensors import Holdings, Wishes, transfer

logger = logging.getLogger("paceline")

MIGRATIONS = 64
"""The last migrations, whose figures are kept."""

Migration = TypedDict(
    "Migration",
    {
        "step": int,
        "from": list[int],
        "to": list[int],
        "bytes": int,
        "most_bytes": int,
        "paused_bytes": int,
        "seconds": float,
        "transfer_s": float,
        "rebuild_s": float,
    },
)
"""Figures of a migration: ``bytes`` are those sent from rank to rank, ``most_bytes`` those of the rank that sends the
most. Of these ``paused_bytes`` were sent while training stood still, for ``seconds``: ``transfer_s`` is that exchange,
of the slowest rank, and ``rebuild_s`` all else."""


class StageParameters(NamedTuple):
    """Parameters of a stage by name, which of them count in the norm here, and which have gradients elsewhere too."""

    names: dict[nn.Parameter, str]
    counts: Callable[[nn.Parameter], bool]
    apart: Callable[[nn.Parameter], bool]


class Learned(Protocol):
    """Estimates that are learned of layers beside the optimizer, and go with them."""

    def leave(self, prefixes: Sequence[str]) -> Callable[[Gather], None]:
        """Keep the estimates of the layers whose names begin with one of ``prefixes``, before they leave.

        Returns:
            What takes on the layers that have come, with their estimates, when all are where they belong. It gathers
            over the stages of a pipeline, whose ranks call it together.
        """


@dataclass(frozen=True)
class Seat:
    """Place of a rank in the job.

    Args:
        rank: in the world.
        stage: that it holds.
        replica: number of its pipeline.
        slice_name: ends the names of its tensors where ranks of a stage have slices of them, else empty.
        share_name: ends the names of parameters of experts that lie on several ranks of a stage.
        num_copies: slots for copies of experts that such a layer has here.
    """

    rank: int
    stage: int
    replica: int
    slice_name: str = ""
    share_name: str = ""
    num_copies: int = 0

    def suffix(self, tensor: Tensor) -> str:
        """See :data:`~.stage_tensors.Suffix`."""
        return self.slice_name + (self.share_name if is_spread(tensor) else "")

    def copied_bytes(self, tensor: Tensor) -> int:
        """Bytes of the copies of experts that come with a tensor of a layer."""
        return self.num_copies * tensor[0].nbytes if is_spread(tensor) else 0


class Migrator:
    """Moves layers between stages; all ranks call its methods together.

    Args:
        seat: of this rank.
        layers: of this rank's stage.
        optimizer: that trains them.
        device: where they lie.
        parameters: says what the stage has to train, after layers were swapped.
        step: says how many steps there were.
        half_way: holds what must not end in the middle: where it does, the engine is of no use any more.
        learned: estimates that go with layers.
        after: called when layers have moved, on all ranks: what was kept of the stage as it was is out of date.

    Attributes:
        migrations: figures of the last ones.
    """

    def __init__(
        self,
        control: ControlPlane,
        seat: Seat,
        layers: Layers,
        optimizer: ShardedOptimizer,
        device: torch.device,
        *,
        parameters: Callable[[], StageParameters],
        step: Callable[[], int],
        half_way: Callable[[str], AbstractContextManager[None]],
        learned: Sequence[Learned],
        after: Callable[[], None],
    ) -> None:
        self.migrations: deque[Migration] = deque(maxlen=MIGRATIONS)
        self._control, self._seat, self._layers = control, seat, layers
        self._optimizer, self._device = optimizer, device
        self._parameters, self._step, self._half_way = parameters, step, half_way
        self._learned, self._after = learned, after
        self._check = MoveCheck(seat.stage, layers, optimizer, device)
        self._made_group: dist.ProcessGroup | None = None
        """Carries what moves beside steps; made when layers move for the first time."""
        self._ahead: LayersAhead | None = None

    def get_ready(self) -> None:
        """Take the time now that the first migration would take more than others. Collective."""
        self._layers.get_ready()
        self._group()

    def agree(self, parts: Sequence[int]) -> list[int] | None:
        """Check on all ranks that layers can move so that ``parts`` holds; None where nothing is to move.

        Raises:
            ValueError: on every rank: boundaries that do not fit, or not the same on all ranks.
        """
        with expecting_all("moving layers", self._seat.rank):
            asked = self._control.gather(list(parts))
        new: list[int] = []
        with self._control.together("checking a partition"):
            if any(others != asked[0] for others in asked):
                raise ValueError(f"ranks ask for different partitions, {asked}: give all the same.")
            new = self._layers.check(asked[0])
        return None if new == self._layers.parts else new

    def prepare(self, new: list[int]) -> bool:
        """Begin to send the parameters of the layers that :meth:`migrate` is to move after the next step or later.

        Returns:
            Whether there is so much of them that it pays; the same on all ranks.

        Raises:
            ValueError: as from :meth:`migrate`.
        """
        self.forget()
        if not self._optimizer.may_wait_for_states:
            return False
        self._optimizer.settle_states()
        WATCH.doing("preparing to move layers", EVERYONE)
        begun = time.perf_counter()
        change = Change(self._layers.parts, new, self._layers.held)
        notes = self._notes(change)
        if ahead_bytes(notes) < LEAST_BYTES:
            return False
        arrived = self._make(change, notes, None)
        copied = sum(note.num_bytes for item in change.leaving for note in notes[item] if note.is_trained)
        is_room = copied <= room_bytes(self._device, ranks_sharing(self._device))
        self._ahead = LayersAhead(
            *(self._control.gather, self._layers, new, change.leaving, arrived, notes),
            with_trained=all(self._control.gather(is_room)),
            suffix=self._seat.slice_name,
            replica=self._seat.replica,
            device=self._device,
            group=self._group(),
        )
        self._ahead.prepared_s = time.perf_counter() - begun
        return True

    def is_prepared(self) -> bool:
        """Whether nothing is on its way that :meth:`prepare` has begun to send. Collective."""
        return self._ahead is None or self._ahead.has_arrived()

    def close(self) -> None:
        """End what is on its way. The ranks need not call it together."""
        with suppress(RuntimeError):  # what was lost on its way is of no use any more
            self.forget()

    def forget(self) -> None:
        """Let go of layers that were prepared and are not to come now. Waits for what is on its way."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()
            self._layers.unmake(ahead.arrived)

    def migrate(self, new: list[int], memory_bytes: int | None = None) -> Migration:
        """Move layers to the boundaries ``new``, which :meth:`agree` gave. Between steps.

        Args:
            memory_bytes: what a rank may take for layers that come; by default what is free.

        Raises:
            ValueError: on every rank, and nothing has moved: a layer that cannot be made anew, groups of the optimizer
                that a stage lacks, or memory that does not suffice.
            RuntimeError: a rank or a connection was lost on the way.
        """
        WATCH.doing("preparing to move layers", EVERYONE)
        begun = self._time()
        old = self._layers.parts
        change = Change(old, new, self._layers.held)
        if self._ahead is not None and (self._ahead.before, self._ahead.parts) != (old, new):
            self.forget()
        notes = self._notes(change)
        arrived = self._make(change, notes, memory_bytes)
        group = self._group()
        with self._half_way("layers were being moved"):
            WATCH.doing("moving layers", EVERYONE)
            sent, paused, transfer_s, later = self._move(change, notes, arrived, group)
            self._after()
            # The end of the slowest is the end of all.
            prepared_s = 0.0 if self._ahead is None else self._ahead.prepared_s
            seconds = self._control.gather((transfer_s, prepared_s + self._time() - begun))
            if later is not None:
                later.start()  # not sooner: what ranks agree on would wait behind it
        self._ahead = None
        # Ranks that send nothing wait for the others.
        whole_s, sending_s = max(whole for _, whole in seconds), max(transfer for transfer, _ in seconds)
        migration: Migration = {
            "step": self._step(),
            "from": old,
            "to": new,
            "bytes": sum(sent),
            "most_bytes": max(sent),
            "paused_bytes": max(paused),
            "seconds": whole_s,
            "transfer_s": sending_s,
            "rebuild_s": whole_s - sending_s,
        }
        self.migrations.append(migration)
        if self._seat.rank == 0:
            logger.info(
                "step %d: layers moved, %s -> %s: %.4g MB in %.3g s",
                *(migration["step"], shown(old), shown(new), sum(sent) / 1e6, migration["seconds"]),
            )
        return migration

    def _time(self) -> float:
        """Now, once the device has done what it was given: what NCCL is to send is only queued."""
        get_accelerator().synchronize()
        return time.perf_counter()

    # -- before anything moves -----------------------------------------------------------------------------------

    def _make(
        self, change: Change, notes: Mapping[int, Sequence[TensorNote]], memory_bytes: int | None
    ) -> dict[int, nn.Module | None]:
        """Make the layers that come, not yet filled; on all ranks or on none. Those that were prepared are there."""
        WATCH.doing("making layers that come")
        arrived: dict[int, nn.Module | None] = {}
        error: Exception | None = None
        try:
            self._check.require(change, notes, memory_bytes, are_made=self._ahead is not None)
            if self._ahead is not None:
                arrived.update(self._ahead.arrived)
                _freeze_as_noted(arrived, notes)
            else:
                for item in change.arriving:
                    arrived[item] = self._layers.make(item, notes[item])
        except Exception as caught:
            error = caught
        WATCH.doing("preparing to move layers", EVERYONE)
        try:
            self._control.settle(error, f"preparing to move layers ({shown(change.old)} to {shown(change.new)})")
        except BaseException:
            self.forget()
            self._layers.unmake(arrived)
            raise
        return arrived

    def _notes(self, change: Change) -> dict[int, list[TensorNote]]:
        """Gather the tensors of all layers that move, as their stages have them."""
        groups, layout = self._optimizer.param_groups, self._optimizer.layout
        mine: dict[int, list[TensorNote]] = {}
        for item in change.leaving:
            layer = self._layers.get(item)
            noted = mine.setdefault(item, [])
            for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
                whole_name = self._layers.prefix(item) + name
                number, options = layout.group_of.get(whole_name), None
                if number is not None:
                    options = {k: v for k, v in groups[number].items() if k not in NOT_RESTORED}
                noted.append(
                    TensorNote(
                        name,
                        isinstance(tensor, nn.Parameter),
                        tuple(tensor.shape),
                        tensor.dtype,
                        tensor.requires_grad,
                        number,
                        options,
                        layout.num_owners.get(whole_name, 1),
                        self._seat.copied_bytes(tensor),
                        is_spread(tensor),
                    )
                )
        notes: dict[int, list[TensorNote]] = {}
        for told in self._control.gather(mine):
            for item, noted in told.items():
                notes.setdefault(item, noted)
        return notes

    # -- the move ------------------------------------------------------------------------------------------------

    def _move(
        self,
        change: Change,
        notes: Mapping[int, Sequence[TensorNote]],
        arrived: Mapping[int, nn.Module | None],
        group: dist.ProcessGroup | None,
    ) -> tuple[list[int], list[int], float, ExchangeBeside | None]:
        """Swap layers, and bring values to their ranks: bytes that each rank sends, which of them training waits for,
        the seconds in which it did, and what brings the rest beside the next step."""
        layers, optimizer, seat = self._layers, self._optimizer, self._seat
        is_concerned = change.concerns_this_stage
        begun = time.perf_counter()
        there = frozenset[str]() if self._ahead is None else self._ahead.arrive()
        waited_s = time.perf_counter() - begun
        holdings = Holdings(layers, optimizer, seat.suffix) if is_concerned else None
        prefixes = [prefix for item in change.leaving for prefix in layers.prefixes(item)]
        follows = [part.leave(prefixes) for part in self._learned]
        unlink_full_access(optimizer)
        layers.swap(change.new, arrived)
        for follow in follows:
            follow(self._control.gather_over_stages)
        wishes = None
        if is_concerned:
            self._rebuild_optimizer(notes, arrived)
            wishes = Wishes(layers, optimizer, arrived, seat.suffix, there)
        told = self._control.gather((holdings.held if holdings else [], wishes.wanted if wishes else [], seat.replica))
        held = [t[0] for t in told]
        moves = plan_moves(held, [t[1] for t in told], [t[2] for t in told])
        own: Sequence[Tensor] = holdings.tensors if holdings else ()

        def rounds(moves: Iterable[Move]) -> Iterator[list[Transfer]]:
            for one in in_rounds(moves):
                yield [t for move in one if (t := transfer(move, held, own, wishes, seat.rank))]

        begun = self._time()
        is_beside = optimizer.may_wait_for_states
        at_once = [move for move in moves if not is_beside or held[move.source][move.held].kind == VALUE]
        carry_out(rounds(at_once), self._device, progress=_goes_on)
        transfer_s = waited_s + self._time() - begun
        later = None
        if is_beside:
            rest = [move for move in moves if held[move.source][move.held].kind != VALUE]
            later = ExchangeBeside(list(rounds(rest)), self._device, group)
            optimizer.expect_states(partial(self._settle, later, wishes))
        elif wishes is not None:
            wishes.settle(optimizer)
        link_full_access(optimizer)
        whole, paused = sent_bytes(moves, len(told)), sent_bytes(at_once, len(told))
        if self._ahead is not None:
            whole = [sum(each) for each in zip(whole, self._ahead.sent, strict=True)]
            paused = [sum(each) for each in zip(paused, self._ahead.sent_late, strict=True)]
        return whole, paused, transfer_s, later

    def _settle(self, exchange: ExchangeBeside, wishes: Wishes | None) -> None:
        """Wait for masters and states, which somebody is about to look at."""
        with self._half_way("layers were being moved"), WATCH.waiting("moving states of layers", EVERYONE):
            exchange.wait(progress=partial(WATCH.doing, "moving states of layers", EVERYONE))
            if wishes is not None:
                wishes.settle(self._optimizer)

    def _group(self) -> dist.ProcessGroup | None:
        """For what moves beside steps, where anything does. Collective the first time."""
        if self._made_group is None and self._optimizer.may_wait_for_states:
            known = groups_here()
            self._made_group = gloo_group(timeout=TIMEOUT)
            end_with(self, known)
        return self._made_group

    def _rebuild_optimizer(
        self, notes: Mapping[int, Sequence[TensorNote]], arrived: Mapping[int, nn.Module | None]
    ) -> None:
        names, counts, apart = self._parameters()
        group_of = dict(self._optimizer.layout.group_of)
        for item in arrived:
            for note in notes[item]:
                if note.group is not None:
                    group_of[self._layers.prefix(item) + note.name] = self._check.group_for(note, item)
        groups: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        for parameter, name in names.items():
            if name in group_of:
                groups[group_of[name]].append(parameter)
        self._optimizer.rebuild(groups, names, counts=counts, apart=apart)


def _freeze_as_noted(arrived: Mapping[int, nn.Module | None], notes: Mapping[int, Sequence[TensorNote]]) -> None:
    """Layers that were prepared may have been frozen since, or trained again."""
    for item, layer in arrived.items():
        for note in notes[item] if layer is not None else ():
            if note.is_parameter:
                layer.get_parameter(note.name).requires_grad_(note.requires_grad)  # type: ignore[union-attr]


def _goes_on() -> None:
    WATCH.doing("moving layers", EVERYONE)
