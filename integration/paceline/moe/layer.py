"""What all expert layers of ours have in common, whichever library the layer itself comes from.

Each rank of an expert-parallel group has *slots*. The first P of them are its own, for experts that the rank owns:
parameters of the model, with masters and moments. The others hold copies of experts that other ranks own: their values
are fetched after each step, their gradients go to the owner before the next. A
:class:`~paceline.planning.experts.Placement` says which expert lies in which slot of which rank; router, auxiliary
loss, checkpoints and exports know experts by their number in the model only.

P = ceil(E / R) on every rank, so that parameters have the same shape everywhere. Where R does not divide E, some ranks
own fewer: their last own slots are empty. No token goes there, and values, masters and moments of an empty slot are 0:
so it has no gradient, no elementwise optimizer changes it, no norm sees it, and nothing outside knows it.

Legend: E experts of the model, R ranks of the group, P own slots of a rank, T tokens of this rank, K experts that a
token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..hf.early_recomputation import is_repeated
from ..planning.experts import Placement
from .dispatch import Exchange, SlotTable, plan_exchange, return_rows, send_rows
from .replica_sync import Replicas
from .timing import ARRIVE, BACK, COMPUTED, LEAVE, ExpertClock

EVEN, PLANNED, FRESH = "even", "planned", "fresh"

SlotWeights = Sequence[Sequence[Tensor]]
"""Own weights and those of copies; nothing where there are no copies, and the parameters are the weights."""


@dataclass(frozen=True)
class SlotPart:
    """One weight of the expert in a slot: ``numel`` elements of ``parameter``, flattened, from ``start`` on.

    Args:
        name: of the weight in its expert ("w1", "0.weight"): the same in all slots of the layer.
    """

    name: str
    parameter: nn.Parameter
    start: int
    numel: int


@dataclass(frozen=True)
class LayerState:
    """State of an :class:`ExpertLayer` beside its weights, which goes along where the layer changes its stage.

    Args:
        planned_for: loads that the placement was made for; None: nobody has said.
        routed: tokens sent to each expert by one rank, as it counted them ``[E]``; on the CPU.
    """

    placement: Placement
    planned_for: Sequence[float] | None
    routed: Tensor


class ExpertLayer:
    """Mixin of modules whose experts lie on the ranks of an expert-parallel group."""

    name: str
    """Of the module in the model."""
    group: Any
    """The R ranks that share the layer's experts; None for one."""
    rank: int
    size: int
    num_experts: int
    num_slots: int
    """P, for experts that a rank owns."""
    num_replicas: int
    """Further slots of each rank, for copies."""
    placement: Placement
    routed: Tensor
    """Tokens sent to each expert by this rank since somebody set it to zero ``[E]``: int64, before any is dropped."""
    clock: ExpertClock | None = None
    """Times the experts while there is one."""
    _planned_for: Sequence[float] | None = None
    """Loads that the placement was made for."""
    _speeds: Sequence[float] | None = None
    """Speed of each rank of the group; None: equal."""
    time_depends_on_load = True
    """Whether an expert that gets more tokens takes longer."""

    def set_up(self, name: str, num_experts: int, group: Any, *, num_replicas: int = 0, splitting: str = EVEN) -> None:
        """Begin with the contiguous placement.

        Args:
            splitting: how tokens are shared between the copies of an expert: "even"; "planned", by the loads that the
                placement was made for; "fresh", by the loads of each batch, which all ranks tell each other.
        """
        self.name, self.group = name, group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.num_experts, self.num_slots, self.num_replicas = num_experts, -(-num_experts // self.size), num_replicas
        self.splitting = splitting
        self.device = next(self.parameters()).device  # type: ignore[attr-defined]
        self.routed = torch.zeros(num_experts, dtype=torch.int64, device=self.device)
        self.replicas: Replicas | None = None
        self.take_on(Placement.contiguous(num_experts, self.size))

    def parts(self, slot: int) -> list[SlotPart]:
        """The weights of the expert in one of the slots that this rank owns, always in the same order."""
        raise NotImplementedError

    @property
    def own_experts(self) -> tuple[int, ...]:
        """Experts of this rank's own slots, by their numbers in the model; slots after them are empty."""
        return self.placement.own_experts(self.rank)

    @property
    def num_empty(self) -> int:
        """Parameters of this rank's slots that are empty."""
        slots = range(len(self.own_experts), self.num_slots)
        return sum(part.numel for slot in slots for part in self.parts(slot))

    def take_on(self, placement: Placement, loads: Sequence[float] | None = None) -> None:
        """Send tokens by ``placement`` from now on: what the slots hold must be there already.

        Copies are fetched by :meth:`fetch`.

        Args:
            loads: for which it was made; with "planned" splitting the copies' shares follow from it.
        """
        self.check(placement)
        self.placement = placement
        if loads is not None:
            self._planned_for = loads
        shares = self._planned_for if self.splitting == PLANNED else None
        self.table = SlotTable(placement, self.num_slots, self.num_replicas, self.device, shares, self._speeds)
        if self.replicas is not None:
            self.replicas.take_on(placement)

    def know_speeds(self, speeds: Sequence[float] | None) -> None:
        """Share the tokens of copies by the speeds of the ranks from now on, and with "planned" splitting from the next
        placement on. The same on all ranks of the group, between steps.
        """
        self._speeds = self.table.speeds = speeds

    def check(self, placement: Placement) -> None:
        """Raise ValueError if the ranks cannot hold the experts so."""
        if not isinstance(placement, Placement):
            raise ValueError(
                f"{self.name} is to have {placement!r}, which is no Placement: give a "
                "paceline.planning.experts.Placement, made of the experts of each rank."
            )
        copies = [len(experts) - owned for experts, owned in zip(placement.devices, placement.owned, strict=True)]
        if (placement.num_experts, placement.num_devices) != (self.num_experts, self.size):
            raise ValueError(
                f"{self.name} has {self.num_experts} experts on {self.size} ranks, the placement "
                f"{placement.num_experts} on {placement.num_devices}: give one for this layer."
            )
        if max(placement.owned) > self.num_slots or max(copies) > self.num_replicas:
            raise ValueError(
                f"{self.name} has {self.num_slots} own slots and {self.num_replicas} for copies on each rank, the "
                f"placement owns {list(placement.owned)} and copies {copies}: a rank can own at most {self.num_slots} "
                f"and copy at most {self.num_replicas}; give fewer copies, or raise paceline.moe.replicas."
            )

    def from_saved(self, saved: Any) -> Placement:
        """The placement of a checkpoint (:meth:`Placement.to_json`), with as many copies as there is room for now.

        Raises:
            ValueError: it is not of this layer.
        """
        found = Placement.from_json(saved)
        widths = [owned + self.num_replicas for owned in found.owned]
        devices = tuple(held[:width] for held, width in zip(found.devices, widths, strict=True))
        found = Placement(devices, found.owned)
        self.check(found)
        return found

    def leave(self) -> LayerState:
        """Give what the layer that takes this one's place on another stage needs beside the weights. Between steps."""
        if self.replicas is not None:
            self.replicas.settle()
        return LayerState(self.placement, self._planned_for, self.routed.cpu())

    def arrive(self, left: LayerState) -> None:
        """Take the place of a layer that has left another stage. Weights come afterwards, then copies are fetched."""
        self.take_on(left.placement, left.planned_for)
        self.routed.copy_(left.routed)

    @torch.no_grad()
    def fetch(self) -> None:
        """Give the copies their owners' values. Collective over the group."""
        if self.copying is not None:
            self.copying.fetch()

    @property
    def copying(self) -> Replicas | None:
        """What copies there are on the ranks; None if there is none on any."""
        return self.replicas if self.table.has_copies else None

    def count(self, counts: Tensor) -> None:
        """Add what this batch's router chose ``[E]``, unless this is a forward that is computed a second time."""
        if self.training and not is_repeated():  # type: ignore[attr-defined]
            self.routed += counts

    def route(self, chosen: Tensor, counts: Tensor) -> Exchange:
        """Where the rows of a batch go. Collective over the group.

        Args:
            chosen: ``[T, K]`` experts of each token.
            counts: ``[E]`` how often each was chosen.
        """
        self.count(counts)
        return plan_exchange(chosen, counts, self.table, self.group, fresh=self.splitting == FRESH)

    def through_experts(
        self, rows: Tensor, exchange: Exchange, compute: Callable[[Tensor, Exchange, SlotWeights], Tensor]
    ) -> Tensor:
        """What the experts make of ``rows``, which are in sending order, and stay so. Collective over the group.

        Args:
            compute: from the rows that have arrived, by source and slot, how many they are of each and the weights to
                what the experts of their slots make of them, in the same order.
        """
        clock = self.clock if self.training else None  # type: ignore[attr-defined]
        rows = rows if clock is None else clock.mark(rows, LEAVE)
        rows = send_rows(rows, exchange, self.group)
        weights: SlotWeights = ()
        if self.copying is not None:  # on the way: it waits for other ranks, forward and backward
            rows, *found = self.copying.slot_weights(rows)
            weights = found
        if clock is not None:
            clock.count(rows.shape[0])
            rows = clock.mark(rows, ARRIVE)
        rows = compute(rows, exchange, weights)
        rows = rows if clock is None else clock.mark(rows, COMPUTED)
        rows = return_rows(rows, exchange, self.group)
        return rows if clock is None else clock.mark(rows, BACK)
