"""Rows of a batch, however they are made: a block of running text, one padded sample, or several packed samples.

Legend: B rows in a batch, S its length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from .chat import IGNORED

Row = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""The samples in a row, each as token ids and labels of one length; one array is both where all tokens have a loss."""

DIGESTED_SAMPLES = 64
"""Rows of a data set, evenly spread, whose digest identifies it wherever it lies and however it is cached."""


@dataclass(frozen=True)
class Collator:
    """Collates rows into a micro-batch of tensors ``[B, S]``, int64, padded on the right to the longest row.

    Not packed, ``attention_mask`` is there where something is padded. Packed, ``position_ids`` begin anew with each
    sample, and with the padding, which is a sample without labels: a mask would keep transformers from looking at the
    positions (so throughput and a router's loss count it). A sample's first label is -100, the last token of another
    one must not predict it.

    Args:
        pad_to_multiple_of: S is a multiple of it.
        joined: for flash attention, which knows samples apart in a batch of one row only: B becomes 1.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None
    packed: bool = False
    joined: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        if self.joined and self.packed:
            rows = [[sample for row in rows for sample in row]]
        lengths = [sum(len(ids) for ids, _ in row) for row in rows]
        multiple = self.pad_to_multiple_of or 1
        shape = (len(rows), -(-max(lengths) // multiple) * multiple)
        input_ids = torch.full(shape, self.pad_token_id)
        labels = torch.full(shape, IGNORED)
        position_ids = torch.arange(shape[1]).repeat(len(rows), 1)
        for index, row in enumerate(rows):
            start = 0
            for ids, label in row:
                end = start + len(ids)
                input_ids[index, start:end] = torch.tensor(ids)
                labels[index, start:end] = torch.tensor(label)
                if self.packed:
                    labels[index, start] = IGNORED
                    position_ids[index, end:] -= len(ids)
                start = end
        batch = {"input_ids": input_ids, "labels": labels}
        if self.packed:
            return batch | {"position_ids": position_ids}
        if min(lengths) < shape[1]:
            batch["attention_mask"] = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
        elif all(ids is label for row in rows for ids, label in row):
            batch["labels"] = input_ids  # one tensor under two names
        return batch


class Rows:
    """Rows that can be had by their number, in any order.

    Args:
        dataset: samples with their ``length``: ``input_ids`` and, where not all tokens have a loss, ``labels``.
        block_size: tokens in a row, where samples are packed into rows of so many at most or all have this length.
    """

    length: int
    """Tokens that attend to one another in a row, on average."""

    def __init__(self, dataset: Dataset, collate: Collator, block_size: int | None = None) -> None:
        self._dataset, self._arrays = dataset, dataset.with_format("numpy")
        self._collate, self._block_size = collate, block_size
        lengths = np.asarray(dataset.with_format("arrow", columns=["length"])[:]["length"], np.int64)
        self.length = round(lengths.mean()) if len(lengths) else 0
        self._order, self._ends = np.arange(len(lengths)), np.arange(len(lengths)) + 1
        if collate.packed:
            assert block_size is not None
            self._order, self._ends = best_fit_decreasing(lengths, block_size)

    def __len__(self) -> int:
        return len(self._ends)

    def samples_of(self, row: int) -> list[int]:
        """Numbers of the samples in ``row``."""
        return self._order[self._ends[row - 1] if row else 0 : self._ends[row]].tolist()

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """A micro-batch of the rows ``indices``, ``[len(indices), S]`` each tensor."""
        members = [self.samples_of(row) for row in indices]
        found = self._arrays[[sample for row in members for sample in row]]
        ids = [np.asarray(tokens, np.int64) for tokens in found["input_ids"]]
        labels = [np.asarray(tokens, np.int64) for tokens in found["labels"]] if "labels" in found else ids
        samples = zip(ids, labels, strict=True)
        return self._collate([[next(samples) for _ in row] for row in members])

    def identity(self) -> dict[str, str | int]:
        """The identity of these rows, for a checkpoint; numbers and content, no paths."""
        size = len(self._dataset)
        some = self._dataset[np.unique(np.linspace(0, size - 1, DIGESTED_SAMPLES).astype(int)).tolist() if size else []]
        digested = [size, list(map(list, some["input_ids"]))]
        if self._collate.packed or "labels" in some:
            digested.append(list(map(list, some.get("labels", some["input_ids"]))))
        found: dict[str, str | int] = {"samples": size, "content": digest(digested)}
        if self._block_size is not None:
            found["block_size"] = self._block_size
        if self._collate.packed:
            found["rows"] = len(self)
        return found


def digest(value: Any) -> str:
    """A short digest of a value of Python's, the same in every process."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples, the longest first, each into the row that has least room left for it; else into a new row.

    Args:
        lengths: of the samples, ``[N]``, from 1 to ``capacity``.
        capacity: tokens in a row.

    Returns:
        ``(samples, ends)``: row i holds ``samples[ends[i - 1]:ends[i]]``, in rising order. The same lengths give the
        same rows.

    >>> samples, ends = best_fit_decreasing(np.array([3, 7, 5, 3]), 10)
    >>> [part.tolist() for part in np.split(samples, ends[:-1])]
    [[0, 1], [2, 3]]
    """
    assert len(lengths) == 0 or (lengths.min() > 0 and lengths.max() <= capacity), "cut to capacity before"
    row_of = np.empty(len(lengths), np.int64)
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where rows_with_room[r] has any: the least room that is enough is one bit operation away
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            row, room = num_rows, capacity
            num_rows += 1
        row_of[sample] = row
        room -= length
        if room:
            rows_with_room[room].append(row)
            rooms |= 1 << room
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of, minlength=num_rows))
