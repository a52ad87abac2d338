"""Whether layers can move: tried on all ranks before any does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..comm.staging import ranks_sharing
from ..measure.device_memory import room_bytes
from ..optim.sharded import ShardedOptimizer
from ..state.named import parts_of
from ..state.rank_states import NOT_RESTORED
from .migration_memory import needed_bytes
from .movable_layers import Layers, TensorNote, items_of_stages


class Change:
    """Items that leave a rank and come to it.

    Args:
        stages: that the rank holds.
    """

    def __init__(self, old: Sequence[int], new: Sequence[int], stages: Sequence[int]) -> None:
        self.old, self.new = list(old), list(new)
        before, after = items_of_stages(old, stages), items_of_stages(new, stages)
        self.leaving = [item for item in before if item not in after]
        self.arriving = [item for item in after if item not in before]
        self.concerns_this_stage = any(self.old[s : s + 2] != self.new[s : s + 2] for s in stages)
        """Whether a stage here changes. An item that goes from one to another one here neither leaves nor arrives, but
        its gradients are complete with another stage's now."""


class MoveCheck:
    """Checks whether layers that come to a rank can be trained there. Nothing here is collective.

    Args:
        stage: of the rank, for messages.
        layers: of the rank's stages.
        device: where they lie.
    """

    def __init__(self, stage: int, layers: Layers, optimizer: ShardedOptimizer, device: torch.device) -> None:
        self._stage, self._layers, self._optimizer, self._device = stage, layers, optimizer, device

    def require(
        self,
        change: Change,
        notes: Mapping[int, Sequence[TensorNote]],
        memory_bytes: int | None,
        *,
        are_made: bool,
    ) -> None:
        """Raise ValueError where what is to come cannot be trained here.

        Args:
            notes: tensors of the layers that move.
            memory_bytes: what a rank may take for layers that come; None: what is free.
            are_made: layers that come have their memory already.
        """
        for item in change.arriving:
            for note in notes[item]:
                if note.group is not None:
                    self.group_for(note, item)
        for owned in self._optimizer.owned:
            parts_of(self._optimizer, owned)  # raises where a state cannot go along
        stays = [p for p in self._optimizer.layout.parameters if self._item_of(p) not in change.leaving]
        comes = [note for item in change.arriving for note in notes[item] if note.group is not None]
        stage = self._stage
        if change.concerns_this_stage and not stays and not comes and not self._keeps_parameters(change, notes):
            raise ValueError(
                f"partition {shown(change.new)} leaves stage {stage} without a parameter: choose one with at "
                "least one on every stage."
            )
        self._optimizer.check_dtypes({p.dtype for p in stays} | {note.dtype for note in comes})
        need = needed_bytes(
            self._optimizer,
            [note for item in change.arriving for note in notes[item]],
            is_laid_out_anew=change.concerns_this_stage,
            are_made=are_made,
        )
        room = room_bytes(self._device, ranks_sharing(self._device)) if memory_bytes is None else memory_bytes
        if need > room:
            raise ValueError(
                f"partition {shown(change.new)} does not fit: stage {stage} would take {need / 2**20:.1f} MiB "
                f"more{_items(change.arriving)} and has room for {room / 2**20:.1f} MiB; nothing has moved. Leave "
                "it fewer layers, or lower the micro-batch size."
            )

    def group_for(self, note: TensorNote, item: int) -> int:
        """Number of the group here that has the options of the one that trains a layer there."""
        groups = self._optimizer.param_groups
        order = sorted(range(len(groups)), key=lambda number: number != note.group)
        for number in order:
            if {k: v for k, v in groups[number].items() if k not in NOT_RESTORED} == note.options:
                return number
        raise ValueError(
            f"layer {item} cannot move to stage {self._stage}: no group of its optimizer has the options of "
            f"the one that trains {note.name}; give every stage the same parameter groups, empty ones too."
        )

    def _keeps_parameters(self, change: Change, notes: Mapping[int, Sequence[TensorNote]]) -> bool:
        """Whether frozen parameters will be here."""
        comes = any(note.is_parameter for item in change.arriving for note in notes[item])
        leaves = [layer for item in change.leaving if (layer := self._layers.get(item)) is not None]
        leaving = {parameter for layer in leaves for parameter in layer.parameters()}
        return comes or any(parameter not in leaving for parameter in self._layers.module.parameters())

    def _item_of(self, parameter: nn.Parameter) -> int | None:
        name = self._optimizer.layout.name_of(parameter)
        return next((item for item in self._layers.here if name.startswith(self._layers.prefixes(item))), None)


def shown(parts: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, parts)) + "]"


def _items(items: Sequence[int]) -> str:
    if not items:
        return ""
    return f" for layer {items[0]}" if len(items) == 1 else f" for layers {items[0]}-{items[-1]}"
