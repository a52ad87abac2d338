"""Data that is read as it is needed: in a seeded order, without end, and resumable at any row.

``RawStream`` shuffles by chunks: the shards of an epoch are read in a seeded order, and of each ``shuffle_buffer_size``
rows read, all are given out in a seeded order. So a position is where the chunk begins and how many of its rows were
given out; the rows in the buffer, which ``datasets`` would lose, are read again. ``RowStream`` turns windows of such
rows into rows of a batch; a position in it is that of the window's first row and how many of its rows are gone, so no
more than one window is tokenized again. What was read ahead, or half packed, is in neither position and never lost.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
from datasets import IterableDataset
from torch import Tensor

from .chat import Sample
from .packing import best_fit_decreasing
from .rows import Collator, Row

CHUNK = 1000
"""Rows in a chunk that is not shuffled."""

WINDOW = 64
"""A window is samples for at least this many full rows of a batch: packing wastes less than one row of them."""

ROWS_PER_TOKENIZATION = 32
DIGESTED_ROWS = 8

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
        self._dataset, self.columns, self.what = dataset, columns, what
        self._buffer_size, self._seed = shuffle_buffer_size, seed
        self._chunk: list[dict[str, Any]] | None = None  # not read yet
        self._given = 0
        self._begin: dict[str, Any] = {"epoch": 0, "chunk": 0, "shard": 0, "inside": None}
        self._identity: dict[str, str | int] | None = None
        self._end: dict[str, Any] | None = None
        self._reader: Iterator[tuple[dict[str, Any], int, IterableDataset]] | None = None

    @property
    def column_names(self) -> list[str]:
        return list(self.columns.values())

    @property
    def shuffled(self) -> bool:
        return self._buffer_size > 0

    def first(self, num_rows: int | None) -> list[dict[str, Any]]:
        """The first rows in the data's own order, None: all; moves nothing.

        Raises:
            ValueError: the data cannot be read.
        """
        with _readable(self.what):
            return [self._named(row) for row in itertools.islice(self._dataset, num_rows)]

    def take(self, num_rows: int) -> list[dict[str, Any]]:
        """The next rows: ``num_rows`` or fewer; none where an epoch is over, then the next call begins another.

        Raises:
            ValueError: the data cannot be read.
        """
        if self._chunk is None:
            self._chunk = self._read_chunk()
            _check_unchanged(self.what, self._given, len(self._chunk))
        if self._given == len(self._chunk):
            self._go_on()
        rows = self._chunk[self._given : self._given + num_rows]
        self._given += len(rows)
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {**self._begin, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = {name: state[name] for name in ("epoch", "chunk", "shard", "inside")}
        self._end, self._reader = None, None
        self._chunk, self._given = None, state["given"]

    def identity(self) -> dict[str, str | int]:
        """The identity of this stream, for a checkpoint; independent of the data's place."""
        if self._identity is None:
            rows = str(self.first(DIGESTED_ROWS)).encode()
            self._identity = {
                "shards": self._dataset.num_shards,
                "first_rows": hashlib.sha256(rows).hexdigest()[:16],
                "shuffle_buffer_size": self._buffer_size,
            }
        return self._identity

    def _go_on(self) -> None:
        """Read the next chunk; where the epoch is over, an empty one that stands for its end."""
        if self._end is not None:
            self._begin, self._end = self._end, None
        self._chunk, self._given = self._read_chunk(), 0
        if not self._chunk:
            self._begin = {"epoch": self._begin["epoch"] + 1, "chunk": 0, "shard": 0, "inside": None}
            self._end, self._reader = None, None

    def _read_chunk(self) -> list[dict[str, Any]]:
        """The rows of the chunk at ``_begin``, in the order in which they are given out."""
        if self._reader is None:
            self._reader = self._read()
        with _readable(self.what):
            taken = list(itertools.islice(self._reader, self._buffer_size or CHUNK))
        rows = [row for row, _, _ in taken]
        if taken:
            _, place, shard = taken[-1]
            self._end = {
                "epoch": self._begin["epoch"],
                "chunk": self._begin["chunk"] + 1,
                "shard": place,
                "inside": shard.state_dict(),
            }
        if self.shuffled:
            order = np.random.default_rng([self._seed, self._begin["epoch"], self._begin["chunk"]])
            rows = [rows[i] for i in order.permutation(len(rows))]
        return rows

    def _read(self) -> Iterator[tuple[dict[str, Any], int, IterableDataset]]:
        """The rest of the epoch from where the chunk begins: row, place of its shard in the epoch's order, shard."""
        num_shards = self._dataset.num_shards
        shards = np.arange(num_shards)
        if self.shuffled:
            shards = np.random.default_rng([self._seed, self._begin["epoch"]]).permutation(num_shards)
        first, inside = self._begin["shard"], self._begin["inside"]
        for place in range(first, num_shards):
            shard = self._dataset.shard(num_shards, int(shards[place]))
            if inside is not None:
                shard.load_state_dict(deepcopy(inside))
                inside = None
            for row in shard:
                yield self._named(row), place, shard

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        return {new: row.get(old) for old, new in self.columns.items()}


class RowStream:
    """Rows of a batch from a :class:`RawStream`, without end.

    Args:
        make: rows of the data to samples, see :func:`paceline.data.samples.sample_maker`.
        collate: rows of a batch to a micro-batch; where it packs, samples are packed by windows.
        block_size: tokens in a row at most.
        joined: all samples are one text, which is cut into rows; what a window leaves goes into the next one.
    """

    def __init__(
        self,
        raw: RawStream,
        make: Callable[[Sequence[dict[str, Any]]], list[Sample | None]],
        collate: Collator,
        block_size: int,
        seed: int,
        *,
        joined: bool,
    ) -> None:
        self._raw, self._make, self._collate = raw, make, collate
        self.length, self._seed, self._joined = block_size, seed, joined
        self._window: list[Row] | None = None  # not made yet
        self._given = 0
        self._num_windows = 0
        self._rest: list[int] = []
        self._begin: dict[str, Any] = {"raw": raw.state_dict(), "rest": [], "window": 0}
        self._warned = False

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        batch = self._collate(rows)
        return batch | {"labels": batch["input_ids"]} if self._joined else batch

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if self._window is None:
            self._window = self._make_window()
            _check_unchanged(self._raw.what, self._given, len(self._window))
        while self._given == len(self._window):
            self._begin = {"raw": self._raw.state_dict(), "rest": self._rest, "window": self._num_windows}
            self._window, self._given = self._make_window(), 0
        self._given += 1
        return self._window[self._given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {**self._begin, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = {name: state[name] for name in ("raw", "rest", "window")}
        self._raw.load_state_dict(state["raw"])
        self._rest, self._num_windows = list(state["rest"]), state["window"]
        self._window, self._given = None, state["given"]

    def identity(self) -> dict[str, str | int]:
        kind = "joined" if self._joined else "packed" if self._collate.packed else "padded"
        return {"rows": kind, "block_size": self.length, **self._raw.identity()}

    def _make_window(self) -> list[Row]:
        samples: list[Row] = []
        num_tokens, num_ends = len(self._rest), 0
        while num_tokens < WINDOW * self.length:
            rows = self._raw.take(ROWS_PER_TOKENIZATION)
            if not rows:
                num_ends += 1
                if num_tokens > 0 and not (self._joined and num_tokens < self.length):
                    break  # a window ends with the epoch, unless it is not even one block
                if num_ends == 2 and num_tokens == len(self._rest):
                    raise ValueError(f"{self._raw.what}: has no row with a token to train on. Remedy: other data.")
                continue
            for sample in self._make(rows):
                if sample is None:
                    self._warn_of_dropped()
                    continue
                ids, labels = sample
                samples.append([(np.asarray(ids, np.int64), np.asarray(labels, np.int64))])
                num_tokens += len(ids)
        window = self._cut(samples) if self._joined else self._pack(samples) if self._collate.packed else samples
        if self._raw.shuffled:
            order = np.random.default_rng([self._seed, self._num_windows])
            window = [window[i] for i in order.permutation(len(window))]
        self._num_windows += 1
        return window

    def _cut(self, samples: list[Row]) -> list[Row]:
        parts = [np.asarray(self._rest, np.int64), *(ids for ((ids, _),) in samples)]
        tokens = np.concatenate(parts)
        used = len(tokens) // self.length * self.length
        self._rest = tokens[used:].tolist()
        return [[(block, block)] for block in tokens[:used].reshape(-1, self.length)]

    def _pack(self, samples: list[Row]) -> list[Row]:
        lengths = np.array([len(ids) for ((ids, _),) in samples], np.int64)
        order, ends = best_fit_decreasing(lengths, self.length)
        return [[samples[i][0] for i in part] for part in np.split(order, ends[:-1])]

    def _warn_of_dropped(self) -> None:
        if not self._warned:
            logger.warning(
                "%s: a row has no token to train on within %d tokens (an empty completion, a prompt that is too "
                "long): it is dropped, and others like it",
                self._raw.what, self.length,
            )  # fmt: skip
        self._warned = True


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # readers raise what they like
        raise ValueError(
            f"{what}: cannot be read: {' '.join(str(error).split())[:400] or type(error).__name__}. Remedy: "
            "check the name and the content."
        ) from error


def _check_unchanged(what: str, num_given: int, num_there: int) -> None:
    if num_given > num_there:
        raise ValueError(
            f"{what}: has changed since the checkpoint was saved, {num_given} rows were given out where there are "
            f"{num_there} now. Remedy: the data and the tokenizer of the interrupted run, or a new run."
        )
