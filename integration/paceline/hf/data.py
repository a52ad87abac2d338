"""From files or a hub data set to micro-batches of token blocks.

``load_raw`` reads text, ``tokenize_and_group`` cuts it into blocks, :class:`BatchPlan` orders them: which samples make
a step depends on the seed and the global batch only, not on how ranks and micro-batches share it.

Legend: B micro-batch size, S block size, M micro-batches per step, D data-parallel size, G = M·D·B global batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset, Features, List, Value, load_dataset
from datasets import config as datasets_config
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from . import standard_library
from .arguments import BUILDERS, DataArguments, extension

TEXT, LINE = "text", "line"
"""The one column of raw data: ``text``, a document a row; ``line``, rows that continue one another."""

DEFAULT_BLOCK_SIZE = 1024
TOKENS_PER_GROUPING = 1 << 22

logger = logging.getLogger(__name__)


def load_raw(
    data_args: DataArguments, *, cache_dir: str | None = None, token: str | None = None, progress: bool = True
) -> tuple[Dataset, Dataset | None]:
    """Training and held-out text, each with the one column :data:`TEXT` or :data:`LINE`.

    Without a validation set the first ``validation_split_percentage`` of the rows are held out, as in run_clm.py; of
    the embedded corpus whole files are. None where nothing is held out. Several processes may call it at once.

    Raises:
        ValueError: data that cannot be read, that is empty, or without the text column.
    """
    percentage = data_args.validation_split_percentage
    validation: Dataset | None = None
    with _progress_bars(progress):
        if data_args.dataset_name is not None:
            what = f"--dataset_name {data_args.dataset_name}"
            splits = _load(
                what, data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir, token=token
            )
            if "train" not in splits:
                raise ValueError(f"{what}: needs a split `train`, but has {', '.join(splits)}. Remedy: --train_file.")
            train = _text_only(what, splits["train"], data_args.text_column)
            if "validation" in splits:
                validation = _text_only(f"{what}, validation", splits["validation"], data_args.text_column)
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


def _load(what: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return load_dataset(*args, **kwargs)
    except Exception as error:  # readers raise what they like: StopIteration for a JSON file of blanks
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__ or cause
        reason = " ".join(str(cause).split())[:400] or type(cause).__name__
        raise ValueError(f"{what}: cannot be read: {reason}. Remedy: check the name and the content.") from error


def _read(what: str, paths: Sequence[str | Path], data_args: DataArguments, cache_dir: str | None) -> Dataset:
    kind = extension(paths[0])
    options: dict[str, Any] = {}
    if kind == "txt":
        options = {"keep_linebreaks": data_args.keep_linebreaks}
    elif kind == "py":
        options = {"sample_by": "document"}
    files = [str(Path(p).resolve()) for p in paths]
    data = _load(what, BUILDERS[kind], data_files={"train": files}, split="train", cache_dir=cache_dir, **options)
    data = _text_only(what, data, data_args.text_column)
    return data.rename_column(TEXT, LINE) if kind == "txt" and data_args.keep_linebreaks else data


def _text_only(what: str, data: Dataset, column: str | None) -> Dataset:
    if len(data) == 0:
        raise ValueError(f"{what}: must have rows, but has none. Remedy: other data.")
    strings = [c for c in data.column_names if getattr(data.features[c], "dtype", None) in ("string", "large_string")]
    asked = "" if column is None else f" {column!r}"
    if column is None:
        column = TEXT if TEXT in strings else next(iter(strings), None)
    if column not in strings:
        raise ValueError(
            f"{what}: there is no column{asked} of strings; the columns are {', '.join(data.column_names)}. "
            f"Remedy: --text_column with one that has strings ({', '.join(strings) or 'there is none'})."
        )
    data = data.select_columns([column])
    return data if column == TEXT else data.rename_column(column, TEXT)


def choose_block_size(requested: int | None, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """S: ``requested``, or what model and tokenizer can take, :data:`DEFAULT_BLOCK_SIZE` at most, with a warning.

    Raises:
        ValueError: the model has fewer positions than ``requested``.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    limit = min(tokenizer.model_max_length, positions) if positions > 0 else tokenizer.model_max_length
    if requested is None:
        if limit > DEFAULT_BLOCK_SIZE:
            logger.warning("block_size is %d; the model takes more, change it with --block_size", DEFAULT_BLOCK_SIZE)
        return min(limit, DEFAULT_BLOCK_SIZE)
    if 0 < positions < requested:
        raise ValueError(f"--block_size {requested}: the model has {positions} positions. Remedy: {positions} or less.")
    if requested > limit:
        logger.warning("block_size is %d and not %d: the tokenizer's model_max_length", limit, requested)
    return min(requested, limit)


def tokenize_and_group(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    max_samples: int | None = None,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
    progress: bool = True,
    what: str = "training data",
) -> Dataset:
    """Blocks of ``block_size`` tokens, column ``input_ids`` (int32; they are the labels too).

    All rows are joined and cut; the remainder of each :data:`TOKENS_PER_GROUPING` tokens is dropped. A document ends
    with the tokenizer's end token if it has one; lines continue one another and get no special tokens. Both steps are
    cached by the fingerprint of data and tokenizer; ``num_proc`` does not change the result.

    Raises:
        ValueError: fewer tokens than one block.
    """
    (column,) = dataset.column_names
    documents = column == TEXT
    eos = tokenizer.eos_token_id if documents else None
    features = Features({"input_ids": List(Value("int32"))})

    # closures, not module functions: datasets then hashes their code, so that a changed rule makes a new cache entry
    def tokenize(rows: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        texts = [text for text in rows[column] if text]
        if not texts:
            return {"input_ids": []}
        # verbose: no warning that a document is longer than the model takes, it is cut into blocks
        ids = tokenizer(texts, add_special_tokens=documents, verbose=False)["input_ids"]
        return {"input_ids": [i if eos is None or i[-1:] == [eos] else [*i, eos] for i in ids]}

    def group(rows: pa.Table) -> pa.Table:
        tokens = rows["input_ids"].combine_chunks().flatten()
        num_blocks = len(tokens) // block_size
        offsets = pa.array(np.arange(num_blocks + 1, dtype=np.int32) * block_size)
        return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens[: num_blocks * block_size])})

    with _progress_bars(progress):
        tokenized = dataset.map(
            tokenize,
            batched=True,
            num_proc=num_proc,
            remove_columns=[column],
            features=features,
            load_from_cache_file=not overwrite_cache,
            desc=f"tokenizing {what}",
        )
        num_tokens = pc.sum(pc.list_value_length(tokenized.data.column("input_ids"))).as_py() or 0
        if num_tokens < block_size:
            raise ValueError(
                f"{what}: {len(dataset)} rows have {num_tokens} tokens, less than one block of {block_size}. "
                "Remedy: more text, or a smaller --block_size."
            )
        per_batch = max(TOKENS_PER_GROUPING, 64 * block_size)
        blocks = tokenized.with_format("arrow").map(
            group,
            batched=True,
            batch_size=-(-len(tokenized) * per_batch // num_tokens),
            remove_columns=["input_ids"],
            features=features,
            load_from_cache_file=not overwrite_cache,
            desc=f"cutting {what} into blocks of {block_size}",
        )
    blocks = blocks.with_format(None)
    return blocks if max_samples is None else blocks.select(range(min(max_samples, len(blocks))))


@dataclass(frozen=True)
class BatchPlan:
    """Who trains on which sample when.

    Step t of an epoch takes samples ``[t·G, (t+1)·G)`` of the epoch's permutation; of these, sample
    ``m·(D·B) + r·B + i`` is row i of micro-batch m on data-parallel rank r. So the samples of a step are the same for
    every D, B, M with the same G. The incomplete last global batch of an epoch is dropped.

    >>> BatchPlan(num_samples=10, micro_batch_size=2, micro_batches_per_step=2).steps_per_epoch
    2

    Raises:
        ValueError: fewer samples than one global batch.
    """

    num_samples: int
    micro_batch_size: int
    micro_batches_per_step: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        assert min(self.micro_batch_size, self.micro_batches_per_step) > 0, self
        assert 0 <= self.data_parallel_rank < self.data_parallel_size, self
        if self.num_samples < self.global_batch_size:
            raise ValueError(
                f"{self.num_samples} training samples: less than one global batch, {self.micro_batches_per_step} "
                f"micro-batches of {self.micro_batch_size} on {self.data_parallel_size} data-parallel ranks = "
                f"{self.global_batch_size}. Remedy: smaller --gradient_accumulation_steps, "
                "--per_device_train_batch_size or --block_size, or more data."
            )

    @property
    def global_batch_size(self) -> int:
        return self.micro_batches_per_step * self.data_parallel_size * self.micro_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.global_batch_size

    def order(self, epoch: int) -> Tensor:
        """This rank's sample indices in ``epoch``, int64 ``[steps_per_epoch, M, B]``."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        used = self.steps_per_epoch * self.global_batch_size
        permutation = torch.randperm(self.num_samples, generator=generator)[:used]
        shape = (self.steps_per_epoch, self.micro_batches_per_step, self.data_parallel_size, self.micro_batch_size)
        return permutation.view(shape)[:, :, self.data_parallel_rank]


def micro_batches(dataset: Dataset, plan: BatchPlan, first_step: int = 0) -> Iterator[dict[str, Tensor]]:
    """Endlessly, M per step: ``{"input_ids": [B, S], "labels": [B, S]}``, int64, one tensor under two names.

    ``first_step`` counts from the beginning of training: 0, or the number of steps a checkpoint has done.
    """
    assert len(dataset) == plan.num_samples, (len(dataset), plan)
    first_epoch, skipped = divmod(first_step, plan.steps_per_epoch)
    samples = dataset.with_format("torch", columns=["input_ids"])
    for epoch in itertools.count(first_epoch):
        for indices in plan.order(epoch)[skipped:].flatten(0, 1):
            yield _batch(samples, indices.tolist())
        skipped = 0


def evaluation_batches(
    dataset: Dataset, micro_batch_size: int, data_parallel_rank: int = 0, data_parallel_size: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Every sample once over all ranks: rank r has samples r, r + D, ...; the last micro-batch may be smaller.

    Ranks may have different numbers of micro-batches, also none.
    """
    samples = dataset.with_format("torch", columns=["input_ids"])
    mine = range(data_parallel_rank, len(dataset), data_parallel_size)
    for start in range(0, len(mine), micro_batch_size):
        yield _batch(samples, list(mine[start : start + micro_batch_size]))


def _batch(samples: Dataset, indices: list[int]) -> dict[str, Tensor]:
    input_ids = samples[indices]["input_ids"]
    return {"input_ids": input_ids, "labels": input_ids}


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    # a user's HF_DATASETS_DISABLE_PROGRESS_BARS has priority, datasets warns where code says otherwise
    hide = not wanted and not are_progress_bars_disabled() and datasets_config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
