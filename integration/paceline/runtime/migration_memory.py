"""Memory that a rank takes beside what it has, until layers that leave it have left."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..optim.sharded import ShardedOptimizer
from ..state.named import MASTER, parts_of
from .movable_layers import TensorNote


def needed_bytes(
    optimizer: ShardedOptimizer, arriving: Sequence[TensorNote], *, is_laid_out_anew: bool, are_made: bool
) -> int:
    """Bytes that this rank takes beside what it has now.

    Args:
        arriving: tensors of the layers that come.
        is_laid_out_anew: whether its optimizer's layout changes.
        are_made: whether the layers that come have their memory already.
    """
    trained = [note for note in arriving if note.group is not None]
    come = 0 if are_made else sum(note.num_bytes + note.copied_bytes for note in arriving)
    # What is trained has masters, states and gradients beside its value, as what is here has.
    states, gradients = _bytes_per_value_byte(optimizer)
    beside = sum(note.num_bytes * (gradients + states / note.num_owners) for note in trained)
    return int(come + beside) + (_laid_out_twice_bytes(optimizer) if is_laid_out_anew else 0)


def _laid_out_twice_bytes(optimizer: ShardedOptimizer) -> int:
    """Bytes of what is there twice with ZeRO 1: rows change owners, and values lie in the optimizer's memory."""
    layout = optimizer.layout
    values = sum(_num_bytes(p) for p in layout.parameters if layout.num_owners[layout.name_of(p)] > 1)
    owned = (o for o in optimizer.owned if layout.num_owners[o.name] > 1)
    kept = ((o, kind, t) for o in owned for kind, t in parts_of(optimizer, o).items())
    return values + sum(_num_bytes(t) for o, kind, t in kept if kind != MASTER or optimizer.rows.has_own_master(o))


def _bytes_per_value_byte(optimizer: ShardedOptimizer) -> tuple[float, float]:
    """Bytes of masters and states on all their owners together, and of gradients, for each byte of values here."""
    layout = optimizer.layout
    values = sum(_num_bytes(p) for p in layout.parameters)
    owned = sum(_num_bytes(p) / layout.num_owners[layout.name_of(p)] for p in layout.parameters)
    return (optimizer.rows.num_bytes() / owned, optimizer.gradients.num_bytes() / values) if values else (0.0, 0.0)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
