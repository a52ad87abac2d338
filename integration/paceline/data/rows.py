"""Rows of a batch, however they are made: a block of running text, one padded sample, or several packed samples.

Legend: B rows in a batch, S its length.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from .chat import IGNORED
from .packing import best_fit_decreasing

Row = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""The samples in a row, each as token ids and labels of one length."""

_DIGESTED_SAMPLES = 64


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
        position_ids = torch.zeros(shape, dtype=torch.int64)
        for index, row in enumerate(rows):
            start = 0
            for ids, label in row:
                end = start + len(ids)
                input_ids[index, start:end] = torch.tensor(ids)
                labels[index, start:end] = torch.tensor(label)
                if self.packed:
                    labels[index, start] = IGNORED
                    position_ids[index, start:end] = torch.arange(len(ids))
                start = end
            position_ids[index, start:] = torch.arange(shape[1] - start)
        batch = {"input_ids": input_ids, "labels": labels}
        if self.packed:
            return batch | {"position_ids": position_ids}
        if min(lengths) < shape[1]:
            batch["attention_mask"] = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
        return batch


class Rows(ABC):
    """Rows that can be had by their number, in any order."""

    length: int
    """Tokens that attend to one another in a row, on average."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """A micro-batch of the rows ``indices``, ``[len(indices), S]`` each tensor."""

    @abstractmethod
    def identity(self) -> dict[str, str | int]:
        """The identity of these rows, for a checkpoint; numbers and content, no paths."""


class Blocks(Rows):
    """``dataset`` has ``input_ids`` of one length, its own labels: one tensor under two names."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._samples = dataset.with_format("torch", columns=["input_ids"])
        self.length = len(dataset[0]["input_ids"]) if len(dataset) else 0

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        input_ids = self._samples[indices]["input_ids"]
        return {"input_ids": input_ids, "labels": input_ids}

    def identity(self) -> dict[str, str | int]:
        return {"samples": len(self), "block_size": self.length, "content": _digest(self._dataset)}


class Padded(Rows):
    """One sample a row; ``dataset`` has ``input_ids``, ``labels`` and ``length``."""

    def __init__(self, dataset: Dataset, collate: Collator) -> None:
        self._dataset, self._collate = dataset, collate
        self.length = round(_lengths(dataset).mean())

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        return self._collate([[sample] for sample in _samples(self._dataset, indices)])

    def identity(self) -> dict[str, str | int]:
        return {"samples": len(self), "content": _digest(self._dataset)}


class Packed(Rows):
    """Samples packed by best fit decreasing into rows of at most ``block_size`` tokens."""

    def __init__(self, dataset: Dataset, collate: Collator, block_size: int) -> None:
        self._dataset, self._collate, self._block_size = dataset, collate, block_size
        lengths = _lengths(dataset)
        self.length = round(lengths.mean())
        self._order, self._ends = best_fit_decreasing(lengths, block_size)

    def __len__(self) -> int:
        return len(self._ends)

    def samples_of(self, row: int) -> list[int]:
        """Numbers of the samples in ``row``."""
        return self._order[self._ends[row - 1] if row else 0 : self._ends[row]].tolist()

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        members = [self.samples_of(row) for row in indices]
        samples = iter(_samples(self._dataset, [sample for row in members for sample in row]))
        return self._collate([[next(samples) for _ in row] for row in members])

    def identity(self) -> dict[str, str | int]:
        return {
            "samples": len(self._dataset),
            "rows": len(self),
            "block_size": self._block_size,
            "content": _digest(self._dataset),
        }


def _samples(dataset: Dataset, indices: list[int]) -> Row:
    found = dataset.with_format("numpy", columns=["input_ids", "labels"])[indices]
    return [
        (np.asarray(ids, np.int64), np.asarray(labels, np.int64))
        for ids, labels in zip(found["input_ids"], found["labels"], strict=True)
    ]


def _lengths(dataset: Dataset) -> NDArray[np.int64]:
    return np.asarray(dataset.with_format("arrow", columns=["length"])[:]["length"], np.int64)


def _digest(dataset: Dataset) -> str:
    """A digest of the number of samples and of some, evenly spread: independent of the data's place and cache."""
    spread = np.unique(np.linspace(0, len(dataset) - 1, _DIGESTED_SAMPLES).astype(int)).tolist() if len(dataset) else []
    some = dataset[spread]
    digested = [len(dataset), *(list(map(list, some[name])) for name in ("input_ids", "labels") if name in some)]
    return hashlib.sha256(str(digested).encode()).hexdigest()[:16]
