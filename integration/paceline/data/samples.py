"""Kinds of rows, by their columns, and how they become samples of tokens. The README has the table."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ..hf.arguments import DataArguments
from . import chat, instructions
from .chat import IGNORED, Sample, messages_sample, pair_sample, without_filled
from .instructions import messages_of, pair_of
from .rows import digest

HELD_OUT = "held-out data"
"""Rows that training does not see, in messages."""

_OR_NONE = ", or --validation_split_percentage 0 to hold none out"

Kind = Literal["text", "line", "messages", "prompt_completion", "instruction", "conversations"]

TEXT, LINE, TOOLS = "text", "line", "tools"

TOKENS_PER_GROUPING = 1 << 22

logger = logging.getLogger(__name__)

_COLUMNS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), (TOOLS,)),
    "prompt_completion": (("prompt", "completion"), (TOOLS,)),
    "conversations": (("conversations",), ("system", TOOLS)),
    "instruction": (("instruction", "output"), ("system", "input")),
}
"""Required and optional columns of each kind of several columns; the first two kinds win over the others."""


def kind_of(columns: Iterable[str]) -> Kind:
    """The kind of rows that :func:`choose_columns` has chosen the columns of."""
    names = set(columns)
    found = (kind for kind, (required, _) in _COLUMNS.items() if names.issuperset(required))
    return next(found, "line" if LINE in names else "text")


def choose_columns(what: str, columns: Sequence[str], strings: Sequence[str], args: DataArguments) -> dict[str, str]:
    """Which columns are the sample: old name -> new name, in the table's words.

    Args:
        what: the flag with the data's name, for errors.
        strings: those of ``columns`` that hold strings.

    Raises:
        ValueError: the columns are of two kinds, or of none.
    """
    there, listed = set(columns), ", ".join(columns)
    kind: Kind | None = args.sample_kind or ("text" if args.text_column is not None else None)
    is_chosen = kind is not None
    complete: list[Kind] = [other for other, (required, _) in _COLUMNS.items() if there.issuperset(required)]
    others = [other for other in complete if other in ("conversations", "instruction")]
    if kind is None:
        found = [other for other in complete if other not in others] + (["text"] if TEXT in strings else [])
        if len(found) > 1:
            raise ValueError(
                f"{what}: the columns {listed} are samples of more than one kind ({', '.join(found)}). "
                f"Remedy: --sample_kind with one of them."
            )
        half = {"prompt", "completion"} - there
        if not found and not others and len(half) == 1:
            raise ValueError(
                f"{what}: the columns {listed} have no `{half.pop()}`. Remedy: add it, or --text_column to train on a "
                "text."
            )
        kind = [*found, *others, "text"][0]
    if kind != "text":
        assert kind is not None
        required, optional = _COLUMNS[kind]
        if kind not in complete:
            raise ValueError(
                f"{what}: --sample_kind {kind} needs {' and '.join(required)}; the columns are {listed}. "
                "Remedy: rename them, or another --sample_kind."
            )
        return {name: name for name in (*required, *optional) if name in there}
    column = args.text_column or (TEXT if TEXT in strings else next(iter(strings), None))
    if column is None or column not in strings:
        asked = "" if args.text_column is None else f" {column!r}"
        raise ValueError(
            f"{what}: there is no column{asked} of strings; the columns are {listed}. "
            f"Remedy: --text_column with one that has strings ({', '.join(strings) or 'there is none'})."
        )
    if not is_chosen and (others or (column != TEXT and len(columns) > 1)):
        remedy = "--text_column for another one" if len(strings) > 1 else "the names messages, or prompt and completion"
        remedy = f"--sample_kind {others[0]} for the others" if others else remedy
        logger.warning("%s: of the columns %s only %r is learned. Remedy: %s", what, listed, column, remedy)
    return {column: TEXT}


def texts_of(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Every text in ``rows``, for training a tokenizer on."""
    for row in rows:
        for name, value in row.items():
            said = [value]
            if isinstance(value, (list, tuple)):
                said = [m.get("content") or m.get("value") for m in value if isinstance(m, dict)]
            if name != TOOLS:
                yield from (text for text in said if isinstance(text, str))


def require_text(where: str, column: str, value: Any) -> None:
    """Raises ValueError if ``value`` is neither a string nor None; ``where``: the data and its row."""
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{where}: {column!r} must be a string, but is a {type(value).__name__}: {str(value)[:100]}. Remedy: "
            "convert it or remove the row; --text_column for another column."
        )


def recipe(kind: Kind, tokenizer: PreTrainedTokenizerBase, completion_only: bool) -> dict[str, str | int]:
    """The recipe of samples from rows of ``kind``, for a checkpoint: of long things a digest.

    A tokenizer is identified by its vocabulary and special tokens; its files differ with versions of its libraries.
    """
    identity = [sorted(tokenizer.get_vocab().items()), list(tokenizer("")["input_ids"]), tokenizer.eos_token_id]
    made: dict[str, str | int] = {"tokenizer": digest(identity)}
    if kind not in ("text", "line"):
        made["completion_only_loss"] = completion_only
        made["chat_template"] = digest(tokenizer.chat_template)
    return made


def sample_maker(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    completion_only: bool,
    what: str = "training data",
    features: Mapping[str, Any] | None = None,
) -> Callable[[Sequence[dict[str, Any]]], list[Sample | None]]:
    """A function from rows to samples of at most ``max_length`` tokens; None: without a label, to be dropped.

    Long texts become several samples, long conversations and completions lose their end.

    Args:
        features: the rows' kinds of columns, where they are known.

    Raises:
        ValueError: (the function) a row is not what its kind says.
    """
    eos = tokenizer.eos_token_id

    def texts(rows: Sequence[dict[str, Any]]) -> list[Sample | None]:
        for row in rows:
            require_text(what, kind, row[kind])
        given = [row[kind] for row in rows if row[kind]]
        samples: list[Sample | None] = []
        # verbose: no warning that a document is longer than the model takes, it is cut
        for tokens in tokenizer(given, add_special_tokens=kind == TEXT, verbose=False)["input_ids"] if given else ():
            has_end = kind == LINE or eos is None or tokens[-1:] == [eos]
            ids = tokens if has_end else [*tokens, eos]
            step = max_length or max(len(ids), 1)
            samples += [(part, part) for start in range(0, len(ids), step) if (part := ids[start : start + step])]
        return samples

    def sample(row: dict[str, Any]) -> Sample | None:
        if features is not None:
            row = {name: without_filled(value, features[name]) for name, value in row.items()}
        try:
            if kind in ("messages", "conversations"):
                messages = row["messages"] if kind == "messages" else messages_of(row)
                ids, labels = messages_sample(tokenizer, messages, row.get(TOOLS), completion_only)
            else:
                is_pair = kind == "prompt_completion"
                pair = (row["prompt"], row["completion"]) if is_pair else pair_of(row, bool(tokenizer.chat_template))
                ids, labels = pair_sample(tokenizer, *pair, row.get(TOOLS), completion_only)
        except ValueError as error:
            raise ValueError(f"{what}: {error} The row: {str(row)[:200]}") from error
        # the first token has nothing before it to be predicted from
        has_label = any(label != IGNORED for label in labels[1:max_length])
        return (ids[:max_length], labels[:max_length]) if has_label else None

    return texts if kind in (TEXT, LINE) else lambda rows: [sample(row) for row in rows]


def make_samples(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    completion_only: bool = True,
    what: str = "training data",
    **mapping: Any,
) -> Dataset:
    """All samples of ``dataset``: columns ``input_ids`` and ``length`` (int32), and ``labels`` where some are masked.

    Cached by the fingerprint of data, tokenizer and rules. Rows without any label are dropped with one warning that
    counts them.

    Args:
        mapping: more for ``Dataset.map``; ``num_proc`` does not change the result.

    Raises:
        ValueError: a row is not what its columns say, or no sample is left.
    """
    kind = kind_of(dataset.column_names)
    make = sample_maker(kind, tokenizer, max_length, completion_only, what, dataset.features)
    names = ["input_ids"] if kind in (TEXT, LINE) else ["input_ids", "labels"]
    rules = inspect.getsource(chat) + inspect.getsource(instructions) + inspect.getsource(sample_maker)

    # a closure with the rules' source: datasets hashes it, so that a changed rule makes a new cache entry
    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        assert rules
        samples = make([dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])
        found = [sample or ([], []) for sample in samples]
        columns: dict[str, list[Any]] = {name: [sample[i] for sample in found] for i, name in enumerate(names)}
        return columns | {"length": [len(ids) for ids, _ in found]}

    made = dataset.map(
        encode,
        batched=True,
        remove_columns=dataset.column_names,
        features=Features(dict.fromkeys(names, List(Value("int32"))) | {"length": Value("int32")}),
        desc=f"tokenizing {what}",
        **mapping,
    )
    kept = np.flatnonzero(made.data.column("length").to_numpy())
    num_dropped = len(made) - len(kept)
    if num_dropped:
        logger.warning(
            "%s: %d of %d samples have no token to train on within %d tokens (empty completions, prompts that are "
            "too long): dropped",
            what, num_dropped, len(made), max_length,
        )  # fmt: skip
        made = made.select(kept)
    if len(made) == 0:
        cause, remedy = "", "other data, or a larger --block_size"
        if completion_only and not _have_answers(dataset, kind):
            cause = ", as no conversation has a turn of the assistant's"
            remedy = "correct the roles, or --no_completion_only_loss to train on all turns"
        raise ValueError(
            f"{what}: none of the {len(dataset)} rows has a token to train on{cause}. Remedy: {remedy}"
            f"{_OR_NONE if what == HELD_OUT else ''}."
        )
    return made


def _have_answers(dataset: Dataset, kind: Kind) -> bool:
    """Whether there is a turn of the assistant's, in rows that are conversations."""
    if kind not in ("messages", "conversations"):
        return True
    conversations = (row["messages"] if kind == "messages" else messages_of(row) for row in dataset)
    return any(message["role"] == "assistant" for messages in conversations for message in messages)


def make_blocks(samples: Dataset, block_size: int, what: str = "training data", **mapping: Any) -> Dataset:
    """Texts of :func:`make_samples` joined and cut into blocks of ``block_size`` tokens, as run_clm.py does it.

    The remainder of each :data:`TOKENS_PER_GROUPING` tokens is dropped. Cached as samples are.

    Raises:
        ValueError: fewer tokens than one block.
    """
    num_tokens = int(samples.data.column("length").to_numpy().sum(dtype=np.int64))
    if num_tokens < block_size:
        raise ValueError(
            f"{what}: {len(samples)} rows have {num_tokens} tokens, less than one block of {block_size}. "
            f"Remedy: more text, or a smaller --block_size{_OR_NONE if what == HELD_OUT else ''}."
        )

    def group(rows: pa.Table) -> pa.Table:
        tokens = rows["input_ids"].combine_chunks().flatten()
        num_blocks = len(tokens) // block_size
        offsets = np.arange(num_blocks + 1, dtype=np.int32) * block_size
        blocks = pa.ListArray.from_arrays(pa.array(offsets), tokens[: num_blocks * block_size])
        return pa.table({"input_ids": blocks, "length": np.full(num_blocks, block_size, np.int32)})

    return (
        samples.with_format("arrow")
        .map(
            group,
            batched=True,
            batch_size=-(-len(samples) * max(TOKENS_PER_GROUPING, 64 * block_size) // num_tokens),
            features=samples.features,
            desc=f"cutting {what} into blocks of {block_size}",
            **mapping | {"num_proc": None},  # each process would drop a remainder
        )
        .with_format(None)
    )
