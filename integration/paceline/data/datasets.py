"""All of a run's data, for training and for evaluation: rows of batches, in order.

:func:`prepare` makes them of the rows that :func:`paceline.data.reading.read` found, whose columns say what they are
(:mod:`samples`): blocks of running text, padded samples or packed ones (:mod:`rows`), or a stream of these
(:mod:`streaming`). :class:`TrainingBatches` puts them in order (:mod:`batch_plan`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..hf.arguments import DataArguments
from .batch_plan import BatchPlan, TrainingBatches
from .chat import use_chat_template
from .packing import require_packable
from .reading import RawData, progress_bars
from .rows import Collator, Rows
from .samples import HELD_OUT, kind_of, make_blocks, make_samples, recipe, sample_maker
from .streaming import RawStream, RowStream

DEFAULT_BLOCK_SIZE = 1024

logger = logging.getLogger(__name__)


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

    @property
    def num_samples(self) -> int | None:
        """Rows for a :class:`BatchPlan`; a stream has no number of them."""
        return None if isinstance(self.train, RowStream) else len(self.train)

    def training_batches(self, plan: BatchPlan) -> TrainingBatches:
        return TrainingBatches(self.train, plan, self.recipe)


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
    completion_only = data_args.completion_only_loss
    # one rank of a node tokenizes, the others find its work in the cache
    overwrite_cache = data_args.overwrite_cache and os.environ.get("LOCAL_RANK", "0") == "0"
    mapping = {"num_proc": data_args.preprocessing_num_workers, "load_from_cache_file": not overwrite_cache}

    def is_joined(dataset: Dataset | RawStream) -> bool:
        return kind_of(dataset.column_names) in ("text", "line") and not data_args.packing

    def rows(dataset: Dataset, limit: int | None, what: str) -> Rows:
        joined = is_joined(dataset)
        with progress_bars(progress):
            samples = make_samples(dataset, tokenizer, None if joined else block_size, completion_only, what, **mapping)
            if joined:
                samples = make_blocks(samples, block_size, what, **mapping)
        if limit is not None:
            samples = samples.select(range(min(limit, len(samples))))
        return Rows(samples, collate, block_size if joined or data_args.packing else None)

    made_by = recipe(kinds[0], tokenizer, completion_only)
    held_out = None if raw.held_out is None else rows(raw.held_out, data_args.max_eval_samples, HELD_OUT)
    if isinstance(raw.train, Dataset):
        return Data(rows(raw.train, data_args.max_train_samples, "training data"), held_out, block_size, made_by)
    train = raw.train
    make = sample_maker(kinds[0], tokenizer, block_size, completion_only, train.what, train.features)
    stream = RowStream(train, make, collate, block_size, seed, joined=is_joined(train))
    return Data(stream, held_out, block_size, made_by)


def choose_block_size(requested: int | None, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """Tokens in a row: ``requested``, or what model and tokenizer can take, :data:`DEFAULT_BLOCK_SIZE` at most.

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
