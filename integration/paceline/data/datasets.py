"""All of a run's data: from the flags to rows of batches, for training and for evaluation.

:func:`read` finds the rows (:mod:`reading`), their columns say what they are (:mod:`samples`), and :func:`prepare`
makes rows of batches of them: blocks of running text (:mod:`blocks`), padded samples or packed ones (:mod:`rows`), or a
stream of these (:mod:`streaming`). :class:`TrainingBatches` puts them in order (:mod:`batches`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..hf.arguments import DataArguments
from .batch_plan import BatchPlan, TrainingBatches, evaluation_batches
from .chat import use_chat_template
from .packing import require_packable
from .reading import load_raw, open_stream, progress_bars
from .rows import Blocks, Collator, Packed, Padded, Rows
from .samples import kind_of, make_samples, recipe, sample_maker, texts_of
from .streaming import RawStream, RowStream
from .text_blocks import choose_block_size, tokenize_and_group


@dataclass(frozen=True)
class RawData:
    """Rows as they were found; ``held_out`` is None where nothing is held out."""

    train: Dataset | RawStream
    held_out: Dataset | None

    def texts(self, num_rows: int) -> list[str]:
        """The texts of the first ``num_rows`` training rows."""
        train = self.train
        rows = train.first(num_rows) if isinstance(train, RawStream) else islice(train, num_rows)
        return list(texts_of(rows))


def read(data_args: DataArguments, *, seed: int, cache_dir: str | None = None, token: str | None = None) -> RawData:
    """Read what the flags name, or with ``--streaming`` begin to. Several processes may call it at once.

    Raises:
        ValueError: data that cannot be read, that is empty, or without the columns of a sample.
    """
    if data_args.streaming:
        with progress_bars(False):
            return RawData(*open_stream(data_args, seed=seed, cache_dir=cache_dir, token=token))
    return RawData(*load_raw(data_args, cache_dir=cache_dir, token=token, progress=False))


@dataclass(frozen=True)
class Data:
    """Rows of batches.

    Args:
        train: rows that can be had in any order, or a stream of them.
        held_out: None where nothing is held out.
        block_size: tokens in a row at most.
        recipe: what made samples of the training rows, for checkpoints.
    """

    train: Rows | RowStream
    held_out: Rows | None
    block_size: int
    recipe: Mapping[str, str | int]

    def plan(
        self,
        *,
        micro_batch_size: int,
        micro_batches_per_step: int,
        data_parallel_size: int,
        data_parallel_rank: int = 0,
        seed: int,
        island: int = 0,
        num_islands: int = 1,
    ) -> BatchPlan:
        """The assignment of rows to steps and ranks; one for :class:`TrainingBatches`."""
        return BatchPlan(
            num_samples=None if isinstance(self.train, RowStream) else len(self.train),
            micro_batch_size=micro_batch_size,
            micro_batches_per_step=micro_batches_per_step,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            seed=seed,
            island=island,
            num_islands=num_islands,
        )

    def training_batches(self, plan: BatchPlan) -> TrainingBatches:
        return TrainingBatches(self.train, plan, self.recipe)

    def evaluation_batches(
        self, micro_batch_size: int, data_parallel_rank: int = 0, data_parallel_size: int = 1
    ) -> Iterator[dict[str, Tensor]]:
        """Every held-out row once over all replicas."""
        assert self.held_out is not None
        return evaluation_batches(self.held_out, micro_batch_size, data_parallel_rank, data_parallel_size)


def prepare(
    raw: RawData,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    *,
    seed: int,
    attn_implementation: str | None = None,
    progress: bool = True,
) -> Data:
    """Tokenize, pack, cut: rows of batches for the model of ``config``. ``--chat_template_path`` changes ``tokenizer``.

    Raises:
        ValueError: rows that are not what their columns say, a model that cannot take them so, too little data.
    """
    if data_args.chat_template_path is not None:
        use_chat_template(tokenizer, data_args.chat_template_path)
    block_size = choose_block_size(data_args.block_size, tokenizer, config)
    multiple = data_args.pad_to_multiple_of
    if multiple is not None and block_size % multiple:
        raise ValueError(
            f"--pad_to_multiple_of {multiple}: the block size {block_size} is no multiple of it, the longest rows "
            f"could not be padded. Remedy: --block_size {max(block_size // multiple, 1) * multiple}, or leave it out."
        )
    kinds = [kind_of(part.column_names) for part in (raw.train, raw.held_out) if part is not None]
    if data_args.packing and "line" in kinds:
        raise ValueError(
            "--packing: the lines of a txt file continue one another and are no samples to pack. Remedy: "
            "--no_keep_linebreaks (each line a document), or leave --packing out (they are cut into full blocks)."
        )
    if data_args.packing:
        require_packable(config)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    collate = Collator(
        pad_token_id=0 if pad is None else pad,  # masked or without labels: any token will do
        pad_to_multiple_of=multiple,
        packed=data_args.packing,
        joined="flash" in (attn_implementation or ""),
    )

    # one rank of a node tokenizes, the others find its work in the cache
    overwrite_cache = data_args.overwrite_cache and os.environ.get("LOCAL_RANK", "0") == "0"

    def rows(dataset: Dataset, limit: int | None, what: str) -> Rows:
        if kind_of(dataset.column_names) in ("text", "line") and not data_args.packing:
            blocks = tokenize_and_group(
                dataset,
                tokenizer,
                block_size,
                max_samples=limit,
                num_proc=data_args.preprocessing_num_workers,
                overwrite_cache=overwrite_cache,
                progress=progress,
                what=what,
            )
            return Blocks(blocks)
        with progress_bars(progress):
            samples = make_samples(
                dataset,
                tokenizer,
                block_size,
                completion_only=data_args.completion_only_loss,
                num_proc=data_args.preprocessing_num_workers,
                overwrite_cache=overwrite_cache,
                what=what,
            )
        if limit is not None:
            samples = samples.select(range(min(limit, len(samples))))
        return Packed(samples, collate, block_size) if data_args.packing else Padded(samples, collate)

    kind = kind_of(raw.train.column_names)
    made_by = recipe(kind, tokenizer, data_args.completion_only_loss)
    held_out = None if raw.held_out is None else rows(raw.held_out, data_args.max_eval_samples, "held-out data")
    if isinstance(raw.train, Dataset):
        return Data(rows(raw.train, data_args.max_train_samples, "training data"), held_out, block_size, made_by)
    joined = kind in ("text", "line") and not data_args.packing
    make = sample_maker(kind, tokenizer, block_size, data_args.completion_only_loss, raw.train.what)
    return Data(RowStream(raw.train, make, collate, block_size, seed, joined=joined), held_out, block_size, made_by)
