"""Batches of a Trainer as a pipeline takes them: what concerns the model, and evaluations several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..hf.masks import IGNORED
from .replica_shares import ReplicaShares

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys of a batch that say again what its position_ids say: where samples that were packed begin."""


class Predicts(Protocol):
    """An engine's evaluation of several batches at a time."""

    def predict(
        self, batches: Iterable[object], see: Callable[[Tensor, Tensor], object] | None = None
    ) -> Iterator[tuple[Tensor, object]]: ...


class Batch(dict[str, object]):
    """An evaluation batch, and what a pipeline makes of it."""

    outcome: tuple[Tensor, object]


class Seeing:
    """What an evaluation keeps of logits, on the last stage."""

    def __init__(self, preprocess: Callable[[Tensor, Tensor], object] | None) -> None:
        self._preprocess = preprocess

    def __call__(self, logits: Tensor, labels: Tensor) -> object:
        return logits if self._preprocess is None else self._preprocess(logits, labels)


class EvaluatedAhead:
    """A data loader of an evaluation whose batches are evaluated, several at a time, before they are handed out."""

    def __init__(
        self, engine: Predicts, loader: DataLoader[Mapping[str, object]], see: Seeing | None, shares: ReplicaShares
    ) -> None:
        self._engine, self._loader, self._see, self._shares = engine, loader, see, shares

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        read: list[Batch] = []

        def batches() -> Iterator[object]:
            for batch in self._loader:
                read.append(Batch(batch))
                yield _with_labels(without_extras(batch))

        # One is held back: of the last of all some rows only fill it up.
        held: Batch | None = None
        source = batches()
        try:
            for outcome in self._engine.predict(source, self._see):
                if held is not None:
                    yield held
                if not read:  # a stage in the middle reads no data
                    next(source)
                held = read.pop(0)
                held.outcome = outcome
            if held is not None:
                rows = getattr(self._loader, "remainder", 0)
                if rows < 0:  # a stream's, or one as full as the others: no row only fills it up
                    rows = self._shares.replicas * len(torch.as_tensor(held["input_ids"]))
                self._shares.rows_at_end = rows
                yield held
        finally:
            self._shares.rows_at_end = 0


def without_extras(batch: Mapping[str, object]) -> dict[str, object]:
    """Of Trainer's batch what concerns the model."""
    told_again = _PACKED if "position_ids" in batch else ()
    return {
        name: value
        for name, value in batch.items()
        if value is not None and name != "num_items_in_batch" and name not in told_again
    }


def _with_labels(batch: dict[str, object]) -> dict[str, object]:
    if "labels" in batch:
        return batch
    return {**batch, "labels": torch.full_like(torch.as_tensor(batch["input_ids"]), IGNORED)}
