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
    """What an island sends of itself, and how.

    Args:
        changes: by how much each tensor differs from what all islands have in common, flat, float32; with what earlier
            rounds have left of it.
        left_of_means: what this island, as the owner of means, has left of them; like ``changes``.
        exact: further tensors, whose mean is not rounded.
    """

    changes: Sequence[Tensor]
    left_of_means: Sequence[Tensor]
    format: Format
    exact: Sequence[Tensor] = ()


class Left(NamedTuple):
    """What rounding took away in one round: of this island's changes, and of the means that it owns."""

    of_changes: list[Tensor]
    of_means: list[Tensor]


def rounded_mean(
    group: Exchanges, sent: Rounded, weights: Sequence[float], mine: int, timeout_s: float
) -> tuple[list[Tensor], Left, int]:
    """The weighted mean of the islands' changes, of each tensor; what is left; bytes that this island sent.

    Islands without weight send zeros, whatever they hold, and keep what is left as it is.
    """
    own, of_means = _flat(sent.changes), _flat(sent.left_of_means)
    means, left, left_of_means = torch.empty_like(own), own.clone(), of_means.clone()
    counts, num_bytes = weights[mine] > 0, 0
    for start in range(0, own.numel(), CHUNK):
        stop = min(start + CHUNK, own.numel())
        rows = -(-(stop - start) // (group.size * ROW))
        shape = (group.size, rows, ROW)
        coded = sent.format.encode(_shards(own[start:stop], shape) if counts else torch.zeros(shape))
        if counts:
            left[start:stop] -= sent.format.decode(coded, ROW, torch.float32).view(-1)[: stop - start]
        # This island's part of the elements, of every island.
        arrived = sent.format.decode(group.exchange(coded, timeout_s), ROW, torch.float32)
        mean = _shards(of_means[start:stop], shape)[mine]
        for weight, part in zip(weights, arrived, strict=True):
            if weight > 0:
                mean = mean + weight * part
        coded_mean = sent.format.encode(mean)
        own_part = slice(start + mine * rows * ROW, min(start + (mine + 1) * rows * ROW, stop))
        if own_part.start < stop:
            rest = mean - sent.format.decode(coded_mean, ROW, torch.float32)
            left_of_means[own_part] = rest.view(-1)[: own_part.stop - own_part.start]
        told = group.exchange(coded_mean.expand(group.size, *coded_mean.shape).contiguous(), timeout_s)
        means[start:stop] = sent.format.decode(told, ROW, torch.float32).view(-1)[: stop - start]
        num_bytes += 2 * (group.size - 1) * coded_mean.nbytes
    found = [_like(flat, sent.changes) for flat in (means, left, left_of_means)]
    return found[0], Left(found[1], found[2]), num_bytes


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


def _shards(flat: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A stretch of elements by owner, in rows; zeros fill it up."""
    islands, rows, row = shape
    return torch.nn.functional.pad(flat, (0, islands * rows * row - flat.numel())).view(shape)


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.clone().view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
