"""Rows of data that the flags name: files, directories, hub names, or the embedded corpus; at once or as a stream.

Rows come with the columns of one kind of sample (:mod:`paceline.data.samples`), under the names that it has there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from datasets import config as datasets_config
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ..hf.arguments import BUILDERS, DataArguments, extension
from . import standard_library
from .samples import LINE, TEXT, choose_columns, require_text
from .streaming import RawStream

LEAST_HELD_OUT_ROWS = 1000

FIRST_ROWS = 8
"""Rows that show what a column without a type holds."""

logger = logging.getLogger(__name__)


def load_raw(
    data_args: DataArguments, *, cache_dir: str | None = None, token: str | None = None, progress: bool = True
) -> tuple[Dataset, Dataset | None]:
    """Training and held-out rows, with the columns of one kind of sample.

    Without a validation set the first ``validation_split_percentage`` of the rows are held out, as in run_clm.py; of
    the embedded corpus whole files are. None where nothing is held out. Several processes may call it at once.

    Raises:
        ValueError: data that cannot be read, that is empty, or without the columns of a sample.
    """
    percentage = data_args.validation_split_percentage
    validation: Dataset | None = None
    with progress_bars(progress):
        if data_args.dataset_name is not None:
            what = f"--dataset_name {data_args.dataset_name}"
            splits = _load(
                what, data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir, token=token
            )
            if "train" not in splits:
                raise ValueError(f"{what}: needs a split `train`, but has {', '.join(splits)}. Remedy: --train_file.")
            train = _columns_of(what, splits["train"], data_args)
            if "validation" in splits:
                validation = _columns_of(f"{what}, validation", splits["validation"], data_args)
        elif data_args.train_file is not None:
            what = f"--train_file {data_args.train_file}"
            train = _read(what, [data_args.train_file], data_args, cache_dir)
            if data_args.validation_file is not None:
                name = f"--validation_file {data_args.validation_file}"
                validation = _read(name, [data_args.validation_file], data_args, cache_dir)
        else:
            what, percentage = "the embedded corpus", 0
            files = standard_library.source_files()
            mine, held_out = standard_library.split(files, data_args.validation_split_percentage)
            train = _read(what, mine, data_args, cache_dir)
            validation = _read(what, held_out, data_args, cache_dir) if held_out else None
        if validation is not None or percentage == 0:
            return train, validation
        num_held_out = min(round(len(train) * percentage / 100), len(train) - 1)
        if num_held_out == 0:
            logger.warning("%s: nothing is held out, %d %% of its %d rows is no row", what, percentage, len(train))
            return train, None
        return train.select(range(num_held_out, len(train))), train.select(range(num_held_out))


def open_stream(
    data_args: DataArguments, *, seed: int, cache_dir: str | None = None, token: str | None = None
) -> tuple[RawStream, Dataset | None]:
    """Training rows as they are read, and held-out rows, read at once: those of ``validation_file`` or of the split
    ``validation``, as many as ``max_eval_samples`` may need. None is held out of the stream itself.

    Raises:
        ValueError: data that cannot be read, that is empty, or without the columns of a sample.
    """
    options = {"cache_dir": cache_dir, "streaming": True}
    held_out: IterableDataset | None = None
    if data_args.dataset_name is not None:
        what, lines = f"--dataset_name {data_args.dataset_name}", False
        splits = _load(what, data_args.dataset_name, data_args.dataset_config_name, token=token, **options)
        if "train" not in splits:
            raise ValueError(f"{what}: needs a split `train`, but has {', '.join(splits)}. Remedy: --train_file.")
        data, held_out = splits["train"], splits.get("validation")
    else:
        assert data_args.train_file is not None, "the flags were checked"
        what, lines = f"--train_file {data_args.train_file}", _has_lines(data_args.train_file, data_args)
        data = _load(what, **_files([data_args.train_file], data_args), split="train", **options)
        if data_args.validation_file is not None:
            held_out = _load(
                f"--validation_file {data_args.validation_file}",
                **_files([data_args.validation_file], data_args),
                split="train",
                **options,
            )
    # lines continue one another: their order stays
    buffer_size = 0 if lines else data_args.shuffle_buffer_size
    stream = RawStream(data, _stream_columns(what, data, data_args, lines), buffer_size, seed, what)
    if held_out is None:
        logger.warning("%s: nothing is held out of a stream. For an evaluation: --validation_file", what)
        return stream, None
    what = f"{what}, validation"
    lines = data_args.validation_file is not None and _has_lines(data_args.validation_file, data_args)
    held_out_rows = RawStream(held_out, _stream_columns(what, held_out, data_args, lines), 0, seed, what)
    limit = data_args.max_eval_samples
    num_rows = None if limit is None else max(limit, LEAST_HELD_OUT_ROWS)  # short texts share a block
    return stream, Dataset.from_list(_guarded(what, lambda: held_out_rows.first(num_rows)))


def _stream_columns(what: str, data: IterableDataset, data_args: DataArguments, lines: bool) -> dict[str, str]:
    """Choose columns of a stream, which may not know them before its first rows are read."""
    first: list[dict[str, Any]] = _guarded(what, lambda: list(data.take(FIRST_ROWS)))
    if not first:
        raise ValueError(f"{what}: must have rows, but has none. Remedy: other data.")
    columns = list(first[0])
    strings = [c for c in columns if any(isinstance(row.get(c), str) for row in first)]
    chosen = choose_columns(what, columns, strings, data_args)
    return dict.fromkeys(chosen, LINE) if lines else chosen


def _load(what: str, *args: Any, **kwargs: Any) -> Any:
    return _guarded(what, lambda: load_dataset(*args, **kwargs))


def _guarded(what: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # readers raise what they like: StopIteration for a JSON file of blanks
        cause: BaseException = error
        while cause.__cause__ is not None:  # a context is what a reader tried before or besides
            cause = cause.__cause__
        reason = " ".join(str(cause).split())[:400] or type(cause).__name__
        raise ValueError(f"{what}: cannot be read: {reason}. Remedy: check the name and the content.") from error


def _read(what: str, paths: Sequence[str | Path], data_args: DataArguments, cache_dir: str | None) -> Dataset:
    data = _load(what, **_files(paths, data_args), split="train", cache_dir=cache_dir)
    data = _columns_of(what, data, data_args)
    return data.rename_column(TEXT, LINE) if _has_lines(paths[0], data_args) else data


def _files(paths: Sequence[str | Path], data_args: DataArguments) -> dict[str, Any]:
    """Arguments of ``load_dataset`` for these files."""
    kind = extension(paths[0])
    options: dict[str, Any] = {}
    if kind == "txt":
        options = {"keep_linebreaks": data_args.keep_linebreaks}
    elif kind == "py":
        options = {"sample_by": "document"}
    return {"path": BUILDERS[kind], "data_files": {"train": [str(Path(p).resolve()) for p in paths]}, **options}


def _has_lines(path: str | Path, data_args: DataArguments) -> bool:
    return extension(path) == "txt" and data_args.keep_linebreaks


def _columns_of(what: str, data: Dataset, data_args: DataArguments) -> Dataset:
    if len(data) == 0:
        raise ValueError(f"{what}: must have rows, but has none. Remedy: other data.")
    typed = {c for c in data.column_names if getattr(data.features[c], "dtype", None) in ("string", "large_string")}
    # values of several types in a JSON file make a column of JSON; it is a text by its first rows, as in a stream
    mixed = {c for c in data.column_names if type(data.features[c]).__name__ == "Json"}
    first = list(data.select_columns(sorted(mixed)).take(FIRST_ROWS)) if mixed else []
    mixed = {c for c in mixed if any(isinstance(row[c], str) for row in first)}
    strings = [c for c in data.column_names if c in typed | mixed]
    columns = choose_columns(what, data.column_names, strings, data_args)
    for column in mixed & {old for old, new in columns.items() if new == TEXT}:
        for index, value in enumerate(data[column]):
            require_text(f"{what}: row {index} (from 0)", column, value)
    data = data.select_columns(list(columns))
    return data.rename_columns({old: new for old, new in columns.items() if old != new})


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
