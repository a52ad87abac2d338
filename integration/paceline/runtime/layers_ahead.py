"""Send the parameters of layers that are about to move beside the steps before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.control import Gather
from ..state.named import is_spread
from ..state.values_ahead import ValuesAhead
from .movable_layers import Layers, TensorNote, tensors_of_layer

LEAST_BYTES = 1 << 20
"""Fewer bytes than these are sent when the layers move."""

Notes = Mapping[int, Sequence[TensorNote]]
"""Tensors by item, as its stage has them."""


def ahead_bytes(notes: Notes) -> int:
    """Bytes that can be sent before layers move."""
    return sum(note.num_bytes for noted in notes.values() for note in noted if note.goes_ahead)


class LayersAhead(ValuesAhead):
    """Parameters of layers that are about to move, on their way. Collective.

    Args:
        leaving: items that are to leave this rank.
        arrived: items that are to come to it, not yet filled.
        with_trained: send also what steps change.
        suffix: ends the names of tensors where ranks of a stage have slices of them.
        replica: number of this rank's pipeline.
        group: that carries them, and nothing else meanwhile.

    Attributes:
        before, parts: the boundaries, and those that they are sent for.
        arrived: as given.
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
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.before, self.parts, self.arrived = list(layers.parts), list(parts), arrived
        names = {
            layers.prefix(item) + note.name + suffix: note.is_trained
            for item, noted in notes.items()
            for note in noted
            if note.goes_ahead and (with_trained or not note.is_trained)
        }

        def own() -> dict[str, Tensor]:
            found = _parameters(layers, {item: layers.get(item) for item in leaving}, suffix)
            return {name: tensor for name, tensor in found if name in names}

        super().__init__(
            gather,
            own,
            {name: tensor for name, tensor in _parameters(layers, arrived, suffix) if name in names},
            {name for name, is_trained in names.items() if is_trained},
            replica=replica,
            doing="moving layers",
            device=device,
            group=group,
        )


def _parameters(layers: Layers, modules: Mapping[int, nn.Module | None], suffix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters of layers that may be sent ahead, by name. Not experts, which may change ranks meanwhile."""
    for item, layer in modules.items():
        for name, tensor in tensors_of_layer(layer).items() if layer is not None else ():
            if isinstance(tensor, nn.Parameter) and not is_spread(tensor):
                yield layers.prefix(item) + name + suffix, tensor.detach()
