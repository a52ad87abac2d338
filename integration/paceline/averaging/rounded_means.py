"""Weighted means over islands in few bits: each sends by how much it has changed, rounded, in a format.

Of n islands each is the mean's owner of one n-th of the elements. To the owners all islands send their differences; the
owners send the means back, rounded once more. What rounding takes away stays where it was taken and is added to what is
sent the next time (error feedback), so that nothing is lost in the long run. All islands decode the same bytes, and so
have the same bits.

Sources: Seide et al. 2014 (1-bit SGD, error feedback); Douillard et al., Streaming DiLoCo, arXiv 2501.18512 (few bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm.formats import Format

ROW = 1024
"""Values that are encoded in a row."""

CHUNK = 2**24
"""Elements that are sent at once, at most."""


class Exchanges(Protocol):
    """The islands of a round."""

    size: int

    def exchange(self, values: Tensor, timeout_s: float) -> Tensor: ...


@dataclass(frozen=True)
class Rounded:
    """Tensors of an island that are sent in a format.

    Args:
        changes: by how much each tensor differs from what all islands have in common, float32.
        residuals: of earlier rounds.
        exact: further tensors, whose mean is not rounded.
    """

    changes: Sequence[Tensor]
    residuals: Residuals
    format: Format
    exact: Sequence[Tensor] = ()


class Residuals(NamedTuple):
    """Rests that rounding has left: of this island's changes, and of the means that it owns. Like the changes."""

    of_changes: Sequence[Tensor]
    of_means: Sequence[Tensor]


def rounded_mean(
    group: Exchanges, sent: Rounded, weights: Sequence[float], mine: int, timeout_s: float
) -> tuple[list[Tensor], Residuals, int]:
    """The weighted mean of the islands' changes, of each tensor; new residuals; bytes that this island sent.

    Islands without weight send zeros: their changes are dropped, and their residuals stay.
    """
    own, left_of_means = _flat(sent.residuals.of_changes), _flat(sent.residuals.of_means)
    counts, num_bytes = weights[mine] > 0, 0
    left = own
    if counts:
        own, left = own + _flat(sent.changes), torch.empty_like(own)
    means = torch.empty_like(own)
    for start in range(0, own.numel(), CHUNK):
        stop = min(start + CHUNK, own.numel())
        rows = -(-(stop - start) // (group.size * ROW))
        shape = (group.size, rows, ROW)
        coded = sent.format.encode(_shards(own[start:stop], shape) if counts else torch.zeros(shape))
        if counts:
            rest = own[start:stop] - sent.format.decode(coded, ROW, torch.float32).view(-1)[: stop - start]
            left[start:stop] = torch.nan_to_num(rest, 0.0, 0.0, 0.0)
        # This island's part of the elements, of every island.
        arrived = sent.format.decode(group.exchange(coded, timeout_s), ROW, torch.float32)
        mean = _shards(left_of_means[start:stop], shape)[mine]
        for weight, part in zip(weights, arrived, strict=True):
            if weight > 0:
                mean = mean + weight * part
        coded_mean = sent.format.encode(mean)
        own_part = slice(start + mine * rows * ROW, min(start + (mine + 1) * rows * ROW, stop))
        if own_part.start < stop:
            rest = (mean - sent.format.decode(coded_mean, ROW, torch.float32)).view(-1)
            left_of_means[own_part] = torch.nan_to_num(rest[: own_part.stop - own_part.start], 0.0, 0.0, 0.0)
        told = group.exchange(coded_mean.expand(group.size, *coded_mean.shape).contiguous(), timeout_s)
        means[start:stop] = sent.format.decode(told, ROW, torch.float32).view(-1)[: stop - start]
        num_bytes += 2 * (group.size - 1) * coded_mean.nbytes
    found = [_like(flat, sent.changes) for flat in (means, left, left_of_means)]
    return found[0], Residuals(found[1], found[2]), num_bytes


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


def _shards(flat: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A stretch of elements by owner, in rows; zeros fill it up."""
    islands, rows, row = shape
    return torch.nn.functional.pad(flat, (0, islands * rows * row - flat.numel())).view(shape)


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
