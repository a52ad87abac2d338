"""Batches of a Trainer as a pipeline takes them: what concerns the model, and evaluations several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..hf.masks import IGNORED
from .micro_batches import FILLER
from .replica_shares import ReplicaShares

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys of a batch that say again what its position_ids say: where samples that were packed begin."""


Samples = tuple[list[Mapping[str, object]], object]
"""Batches of a step, and their number of items, as Trainer reads them."""


class StepsOfEpoch:
    """The steps of an epoch for a Trainer, and for an engine that reads them ahead of it: each is read once.

    Args:
        read: the samples of the next step, of so many batches at most.
        num_micro_batches: of a step.
        fills: a last step of fewer is trained on, not left out.
    """

    def __init__(self, read: Callable[[int], Samples], num_micro_batches: int, *, fills: bool) -> None:
        self._read, self._num_micro_batches, self._fills = read, num_micro_batches, fills
        self._kept: deque[Samples | Exception] = deque()
        """Steps that one of both has not had yet."""
        self._num_forgotten = self._num_given = self._num_taken = 0
        self._micro_batches: Iterator[object] = iter(())

    def samples(self, num_batches: int) -> Samples:
        """Those of the next step, for the Trainer."""
        found = self._step(self._num_given, num_batches)
        self._num_given += 1
        return found

    def trained(self) -> None:
        """The Trainer's steps are trained on: a stage in the middle has taken no micro-batch of them."""
        self._num_taken = max(self._num_taken, self._num_given)
        while self._num_forgotten < min(self._num_given, self._num_taken):
            self._kept.popleft()
            self._num_forgotten += 1

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        """The next micro-batch, for the engine."""
        for micro_batch in self._micro_batches:
            return micro_batch
        batches, _ = self._step(self._num_taken, self._num_micro_batches)
        missing = self._num_micro_batches - len(batches)
        if not batches or (missing and not self._fills):
            raise StopIteration
        self._num_taken += 1
        self._micro_batches = iter([*map(without_extras, batches), *[FILLER] * missing])
        return next(self._micro_batches)

    def _step(self, number: int, num_batches: int) -> Samples:
        if number == self._num_forgotten + len(self._kept):
            try:
                self._kept.append(self._read(num_batches))
            except Exception as error:  # the loader goes on as if it had ended
                self._kept.append(error)
        found = self._kept[number - self._num_forgotten]
        if isinstance(found, Exception):
            raise found
        return found


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

    def __init__(self, preprocess: Callable[[Tensor, Tensor | None], object] | None) -> None:
        self._preprocess = preprocess
        self.has_labels = True
        """Whether the data have labels, and not only those that fill their place."""

    def __call__(self, logits: Tensor, labels: Tensor) -> object:
        return logits if self._preprocess is None else self._preprocess(logits, labels if self.has_labels else None)


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
                if self._see is not None:
                    self._see.has_labels = batch.get("labels") is not None
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
