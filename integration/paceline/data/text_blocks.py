"""Running text as blocks of one length: all documents joined and cut, as run_clm.py does it.

Legend: S block size.
"""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset, Features, List, Value
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from .reading import progress_bars
from .samples import TEXT

DEFAULT_BLOCK_SIZE = 1024
TOKENS_PER_GROUPING = 1 << 22

logger = logging.getLogger(__name__)


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

    with progress_bars(progress):
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
