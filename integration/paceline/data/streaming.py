"""Data that is read as it is needed: in a seeded order, without end, and resumable at any row.

``RawStream`` reads the shards of an epoch in a seeded order, and gives out each ``shuffle_buffer_size`` rows of them, a
chunk, in a seeded order. ``RowStream`` makes rows of a batch of windows of such rows. A position is where a chunk and a
window begin and how much of them was given out; to resume is to make both again. So what was read ahead or half packed
is never lost (the buffer of ``IterableDataset.shuffle`` is), and no more than one window is tokenized again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from datasets import IterableDataset

from .chat import Sample
from .rows import Collator, Row, best_fit_decreasing, digest

CHUNK = 1000
"""Rows in a chunk that is not shuffled."""

WINDOW = 64
"""A window is samples for at least this many full rows of a batch: packing wastes less than one row of them."""

ROWS_PER_TOKENIZATION = 32
DIGESTED_ROWS = 8

T = TypeVar("T")
Place = dict[str, Any]
"""A position in a stream, as JSON."""

logger = logging.getLogger(__name__)


class RawStream:
    """Rows of ``dataset``, a dictionary each, epoch after epoch.

    Args:
        columns: old name -> new name of those to keep.
        shuffle_buffer_size: rows that are shuffled together; 0: the data's own order.
        what: the flag with the data's name, for errors.
    """

    def __init__(
        self, dataset: IterableDataset, columns: dict[str, str], shuffle_buffer_size: int, seed: int, what: str
    ) -> None:
        self._dataset, self._columns, self.what = dataset, columns, what
        self.column_names = list(columns.values())
        known = dataset.features
        self.features = None if known is None else {new: known[old] for old, new in columns.items()}
        """Kinds of the columns, under their new names; None: not known."""
        self._buffer_size, self.shuffled, self._seed = shuffle_buffer_size, shuffle_buffer_size > 0, seed

    def first(self, num_rows: int | None) -> list[dict[str, Any]]:
        """The first rows in the data's own order; None: all.

        Raises:
            ValueError: the data cannot be read.
        """
        with readable(self.what):
            return [self._named(row) for row in itertools.islice(self._dataset, num_rows)]

    @cached_property
    def identity(self) -> dict[str, str | int]:
        """The identity of this stream, for a checkpoint; independent of the data's place."""
        return {
            "shards": self._dataset.num_shards,
            "first_rows": digest(self.first(DIGESTED_ROWS)),
            "shuffle_buffer_size": self._buffer_size,
        }

    def rows_from(self, at: Place | None) -> Iterator[tuple[list[dict[str, Any]], Place]]:
        """Read from ``at`` on (None: the beginning): some rows at a time and the place after them; none: an epoch ends.

        Raises:
            ValueError: the data cannot be read, or has changed.
        """
        at = at or _epoch(0)
        while True:
            reader = self._read(at)
            while True:
                chunk = self._chunk(reader)
                _check_unchanged(self.what, at["given"], len(chunk))
                if not chunk:
                    break
                rows = [row for row, _, _ in chunk]
                if self.shuffled:
                    rows = _shuffled(rows, self._seed, at["epoch"], at["chunk"])
                for start in range(at["given"], len(rows), ROWS_PER_TOKENIZATION):
                    some = rows[start : start + ROWS_PER_TOKENIZATION]
                    yield some, {**at, "given": start + len(some)}
                _, place, shard = chunk[-1]
                at = {**at, "chunk": at["chunk"] + 1, "shard": place, "inside": shard.state_dict(), "given": 0}
            at = _epoch(at["epoch"] + 1)
            yield [], at

    def _chunk(self, reader: Iterator[T]) -> list[T]:
        with readable(self.what):
            return list(itertools.islice(reader, self._buffer_size or CHUNK))

    def _read(self, at: Place) -> Iterator[tuple[dict[str, Any], int, IterableDataset]]:
        """The epoch from the chunk at ``at`` on: each row with its shard and the shard's place in the epoch's order."""
        order = list(range(self._dataset.num_shards))
        if self.shuffled:
            order = _shuffled(order, self._seed, at["epoch"])
        for place in range(at["shard"], len(order)):
            shard = self._dataset.shard(len(order), order[place])
            if place == at["shard"] and at["inside"] is not None:
                shard.load_state_dict(deepcopy(at["inside"]))
            for row in shard:
                yield self._named(row), place, shard

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        return {new: row.get(old) for old, new in self._columns.items()}


class RowStream:
    """Rows of a batch from a :class:`RawStream`, without end.

    Args:
        make: rows of the data to samples, see :func:`paceline.data.samples.sample_maker`.
        collate: rows of a batch to a micro-batch; where it packs, samples are packed by windows.
        length: tokens in a row at most.
        joined: all samples are one text, which is cut into rows; what a window leaves goes into the next one.
    """

    def __init__(
        self,
        raw: RawStream,
        make: Callable[[Sequence[dict[str, Any]]], list[Sample | None]],
        collate: Collator,
        length: int,
        seed: int,
        *,
        joined: bool,
    ) -> None:
        self._raw, self._make, self.collate = raw, make, collate
        self.length, self._seed, self._joined = length, seed, joined
        self._warned = False
        self._at: Place = {"raw": None, "rest": [], "window": 0}
        self._window: list[Row] = []
        self._given = 0
        self._windows: Iterator[tuple[list[Row], Place]] | None = None

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if self._windows is None:
            self._windows = self._make_windows(self._at)
            self._window, self._at = next(self._windows)
            _check_unchanged(self._raw.what, self._given, len(self._window))
        while self._given == len(self._window):
            self._window, self._at = next(self._windows)
            self._given = 0
        self._given += 1
        return self._window[self._given - 1]

    def state_dict(self) -> Place:
        return {**self._at, "given": self._given}

    def load_state_dict(self, state: Place) -> None:
        self._at = {name: value for name, value in state.items() if name != "given"}
        self._given = state["given"]
        self._windows = None  # ranks without data read nothing

    def identity(self) -> dict[str, str | int]:
        kind = "joined" if self._joined else "packed" if self.collate.packed else "padded"
        return {"rows": kind, "block_size": self.length, **self._raw.identity}

    def _make_windows(self, at: Place) -> Iterator[tuple[list[Row], Place]]:
        """Each window from ``at`` on, in the order in which it is given out, with the place where it begins."""
        raw = self._raw.rows_from(at["raw"])
        while True:
            samples, end = self._samples(raw, len(at["rest"]))
            rest: list[int] = []
            if self._joined:
                tokens = np.concatenate([np.asarray(at["rest"], np.int64), *(ids for ids, _ in samples)])
                used = len(tokens) // self.length * self.length
                window = [[(block, block)] for block in tokens[:used].reshape(-1, self.length)]
                rest = tokens[used:].tolist()
            elif self.collate.packed:
                order, ends = best_fit_decreasing(np.array([len(ids) for ids, _ in samples]), self.length)
                window = [[samples[i] for i in part] for part in np.split(order, ends[:-1])]
            else:
                window = [[sample] for sample in samples]
            yield _shuffled(window, self._seed, at["window"]) if self._raw.shuffled else window, at
            at = {"raw": end, "rest": rest, "window": at["window"] + 1}

    def _samples(self, raw: Iterator[tuple[list[dict[str, Any]], Place]], num_left: int) -> tuple[Row, Place]:
        """The samples of a window, after ``num_left`` tokens that the one before left, and the place after them."""
        samples: Row = []
        num_tokens, num_ends = num_left, 0
        while True:
            rows, end = next(raw)
            num_ends += not rows
            if num_ends == 2 and not samples:
                raise ValueError(f"{self._raw.what}: has no row with a token to train on. Remedy: other data.")
            for sample in self._make(rows):
                if sample is not None:
                    samples.append((np.asarray(sample[0], np.int64), np.asarray(sample[1], np.int64)))
                    num_tokens += len(sample[0])
                elif not self._warned:
                    self._warned = True
                    logger.warning(
                        "%s: a row has no token to train on within %d tokens (an empty completion, a prompt that is "
                        "too long): it is dropped, and others like it",
                        self._raw.what, self.length,
                    )  # fmt: skip
            # a window ends with the epoch, unless it is not even one block
            if num_tokens >= (WINDOW if rows else int(self._joined)) * self.length and num_tokens > 0:
                return samples, end


def _epoch(number: int) -> Place:
    return {"epoch": number, "chunk": 0, "shard": 0, "inside": None, "given": 0}


def _shuffled(items: list[T], *seed: int) -> list[T]:
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def _check_unchanged(what: str, num_given: int, num_there: int) -> None:
    if num_given > num_there:
        raise ValueError(
            f"{what}: has changed since the checkpoint was saved, {num_given} rows were given out where there are "
            f"{num_there} now. Remedy: the data and the tokenizer of the interrupted run, or a new run."
        )


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn whatever a reader raises into a ValueError that names ``what``."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # a context is what a reader tried before or besides
            cause = cause.__cause__
        reason = " ".join(str(cause).split())[:400] or type(cause).__name__
        raise ValueError(f"{what}: cannot be read: {reason}. Remedy: check the name and the content.") from error
