"""Rows of data that the flags name: files, directories, hub names, or the embedded corpus; at once or as a stream.

Rows come with the columns of one kind of sample (:mod:`paceline.data.samples`), under the names that it has there.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, IterableDataset, load_dataset
from datasets import config as datasets_config
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ..hf.arguments import BUILDERS, DataArguments, extension
from . import standard_library
from .samples import LINE, TEXT, choose_columns, require_text, texts_of
from .streaming import RawStream, readable

LEAST_HELD_OUT_ROWS = 1000

FIRST_ROWS = 8
"""Rows that show what a column without a type holds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RawData:
    """Rows as they were found; ``held_out`` is None where nothing is held out."""

    train: Dataset | RawStream
    held_out: Dataset | None

    def texts(self, num_rows: int) -> list[str]:
        """The texts of the first ``num_rows`` training rows."""
        train = self.train
        return list(texts_of(train.first(num_rows) if isinstance(train, RawStream) else islice(train, num_rows)))


def read(args: DataArguments, *, seed: int, cache_dir: str | None = None, token: str | None = None) -> RawData:
    """Read what the flags name, or with ``--streaming`` begin to. Several processes may call it at once.

    Without a validation set the first ``validation_split_percentage`` of the rows are held out, as in run_clm.py; of
    the embedded corpus whole files are. None is held out of a stream; its validation set is read at once, as many rows
    as ``max_eval_samples`` may need.

    Raises:
        ValueError: data that cannot be read, that is empty, or without the columns of a sample.
    """
    with progress_bars(False):
        percentage = args.validation_split_percentage
        held_out: Dataset | RawStream | None = None
        if args.dataset_name is not None:
            what = f"--dataset_name {args.dataset_name}"
            options = {"cache_dir": cache_dir, "token": token, "streaming": args.streaming}
            with readable(what):
                if Path(args.dataset_name, datasets_config.DATASET_STATE_JSON_FILENAME).is_file():  # one saved split
                    saved = Dataset.load_from_disk(args.dataset_name)
                    splits = {"train": saved.to_iterable_dataset() if args.streaming else saved}
                else:
                    splits = load_dataset(args.dataset_name, args.dataset_config_name, **options)
            if "train" not in splits:
                raise ValueError(f"{what}: needs a split `train`, but has {', '.join(splits)}. Remedy: --train_file.")
            train = _rows(what, splits["train"], args, seed)
            if "validation" in splits:
                held_out = _rows(f"{what}, validation", splits["validation"], args)
        elif args.train_file is not None:
            what = f"--train_file {args.train_file}"
            train = _files(what, [args.train_file], args, cache_dir, seed)
            if args.validation_file is not None:
                name = f"--validation_file {args.validation_file}"
                held_out = _files(name, [args.validation_file], args, cache_dir)
        else:
            what, percentage = "the embedded corpus", 0
            mine, others = standard_library.split(standard_library.source_files(), args.validation_split_percentage)
            train = _files(what, mine, args, cache_dir)
            held_out = _files(what, others, args, cache_dir) if others else None
        if isinstance(train, RawStream):
            if held_out is None:
                logger.warning("%s: nothing is held out of a stream. For an evaluation: --validation_file", what)
                return RawData(train, None)
            assert isinstance(held_out, RawStream)
            limit = args.max_eval_samples
            num_rows = None if limit is None else max(limit, LEAST_HELD_OUT_ROWS)  # short texts share a block
            # with the stream's own features: Arrow finds no type for tool calls whose arguments are of several
            features = None if held_out.features is None else Features(held_out.features)
            return RawData(train, Dataset.from_list(held_out.first(num_rows), features=features))
        assert not isinstance(held_out, RawStream)
        if held_out is not None or percentage == 0:
            return RawData(train, held_out)
        num_held_out = min(round(len(train) * percentage / 100), len(train) - 1)
        if num_held_out == 0:
            logger.warning("%s: nothing is held out, %d %% of its %d rows is no row", what, percentage, len(train))
            return RawData(train, None)
        return RawData(train.select(range(num_held_out, len(train))), train.select(range(num_held_out)))


def _files(
    what: str, paths: Sequence[str | Path], args: DataArguments, cache_dir: str | None, seed: int | None = None
) -> Dataset | RawStream:
    kind = extension(paths[0])
    options: dict[str, Any] = {"cache_dir": cache_dir, "streaming": args.streaming, "split": "train"}
    if kind == "txt":
        options["keep_linebreaks"] = args.keep_linebreaks
    elif kind == "py":
        options["sample_by"] = "document"
    files = [glob.escape(str(Path(path).resolve())) for path in paths]  # it takes them for patterns
    with readable(what):
        data = load_dataset(BUILDERS[kind], data_files={"train": files}, **options)
    return _rows(what, data, args, seed, lines=kind == "txt" and args.keep_linebreaks)


def _rows(
    what: str, data: Dataset | IterableDataset, args: DataArguments, seed: int | None = None, lines: bool = False
) -> Dataset | RawStream:
    """The columns of ``data`` that are the sample. A stream is shuffled if there is a seed, but not lines: they
    continue one another."""
    features = data.features or {}
    typed = {name for name, kind in features.items() if getattr(kind, "dtype", None) in ("string", "large_string")}
    # a stream may not know its columns; values of several types in a JSON file make a column of JSON
    untyped = [name for name, kind in features.items() if type(kind).__name__ == "Json"]
    with readable(what):
        looked_at = data.select_columns([*typed, *untyped] or list(features)[:1]) if features else data
        first: list[dict[str, Any]] = list(looked_at.take(FIRST_ROWS))
    if not first:
        raise ValueError(f"{what}: must have rows, but has none. Remedy: other data.")
    names = list(features or first[0])
    strings = [name for name in names if name in typed or any(isinstance(row.get(name), str) for row in first)]
    columns = choose_columns(what, names, strings, args)
    if lines:
        columns = dict.fromkeys(columns, LINE)
    if isinstance(data, IterableDataset):
        return RawStream(data, columns, 0 if lines or seed is None else args.shuffle_buffer_size, seed or 0, what)
    for name in (name for name, new in columns.items() if new == TEXT and name in untyped):
        for index, value in enumerate(data[name]):
            require_text(f"{what}: row {index} (from 0)", name, value)
    return data.select_columns(list(columns)).rename_columns({old: new for old, new in columns.items() if old != new})


@contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    # a user's HF_DATASETS_DISABLE_PROGRESS_BARS has priority, datasets warns where code says otherwise
    hide = not wanted and not are_progress_bars_disabled() and datasets_config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
