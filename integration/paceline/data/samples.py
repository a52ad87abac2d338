"""Kinds of rows, by their columns, and how they become samples of tokens.

=====================================  ========================================================================
columns                                sample
=====================================  ========================================================================
``text``                               a document and the end token; the loss is on all of it
``line``                               a line of a text file, which continues the one before
``messages`` (``tools``)               a conversation through the chat template; the loss is on the assistant's turns
``prompt``, ``completion`` (``tools``) strings, or messages; the loss is on the completion
``instruction``, ``output``            Alpaca's (``input``): a prompt and a completion (:mod:`.instructions`)
``conversations``                      ShareGPT's (``system``, ``tools``): messages, likewise
=====================================  ========================================================================
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ..hf.arguments import DataArguments
from . import chat, instructions
from .chat import IGNORED, Sample, messages_sample, pair_sample
from .instructions import CONVERSATIONS, INPUT, INSTRUCTION, OUTPUT, SYSTEM, messages_of, pair_of

Kind = Literal["text", "line", "messages", "prompt_completion", "instruction", "conversations"]

TEXT, LINE, MESSAGES, PROMPT, COMPLETION, TOOLS = "text", "line", "messages", "prompt", "completion", "tools"

logger = logging.getLogger(__name__)


def kind_of(columns: Iterable[str]) -> Kind:
    """The kind of rows that :func:`choose_columns` has chosen the columns of."""
    names = set(columns)
    if MESSAGES in names:
        return "messages"
    if PROMPT in names:
        return "prompt_completion"
    if CONVERSATIONS in names:
        return "conversations"
    if INSTRUCTION in names:
        return "instruction"
    return "line" if LINE in names else "text"


def choose_columns(what: str, columns: Sequence[str], strings: Sequence[str], args: DataArguments) -> dict[str, str]:
    """Which columns are the sample: old name -> new name, in the table's words.

    Args:
        what: the flag with the data's name, for errors.
        strings: those of ``columns`` that hold strings.

    Raises:
        ValueError: the columns are of two kinds, or of none.
    """
    there = set(columns)
    found: list[Kind] = []
    if MESSAGES in there:
        found.append("messages")
    if {PROMPT, COMPLETION} <= there:
        found.append("prompt_completion")
    if args.text_column is not None or TEXT in strings:
        found.append("text")
    listed = ", ".join(columns)
    kind: Kind | None = args.sample_kind or ("text" if args.text_column is not None else None)
    if kind is None and len(found) > 1:
        raise ValueError(
            f"{what}: the columns {listed} are samples of more than one kind ({', '.join(found)}). "
            f"Remedy: --sample_kind with one of them."
        )
    others: list[Kind] = [other for other in ("conversations", "instruction") if set(_COLUMNS[other][0]) <= there]
    if kind is None and not found and not others and len({PROMPT, COMPLETION} & there) == 1:
        missing = COMPLETION if PROMPT in there else PROMPT
        raise ValueError(
            f"{what}: the columns {listed} have no `{missing}`. Remedy: add it, or --text_column to train on a text."
        )
    kind = kind or [*found, *others, "text"][0]
    if kind == "text":
        column = _text_column(what, columns, strings, args.text_column)
        is_chosen = args.sample_kind is not None or args.text_column is not None
        if not is_chosen and (others or (column != TEXT and len(strings) > 1)):
            remedy = f"--sample_kind {others[0]} for the others" if others else "--text_column for another one"
            logger.warning("%s: of the columns %s only %r is learned. Remedy: %s", what, listed, column, remedy)
        return {column: TEXT}
    assert kind is not None
    wanted, more = _COLUMNS[kind]
    if not set(wanted) <= there:
        raise ValueError(
            f"{what}: --sample_kind {kind} needs {' and '.join(wanted)}; the columns are {listed}. "
            "Remedy: rename them, or another --sample_kind."
        )
    return {name: name for name in (*wanted, *(name for name in more if name in there))}


_COLUMNS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": ((MESSAGES,), (TOOLS,)),
    "prompt_completion": ((PROMPT, COMPLETION), (TOOLS,)),
    "conversations": ((CONVERSATIONS,), (SYSTEM, TOOLS)),
    "instruction": ((INSTRUCTION, OUTPUT), (SYSTEM, INPUT)),
}
"""Required and optional columns of each kind of several columns."""


def _text_column(what: str, columns: Sequence[str], strings: Sequence[str], column: str | None) -> str:
    asked = "" if column is None else f" {column!r}"
    if column is None:
        column = TEXT if TEXT in strings else next(iter(strings), None)
    if column is None or column not in strings:
        raise ValueError(
            f"{what}: there is no column{asked} of strings; the columns are {', '.join(columns)}. "
            f"Remedy: --text_column with one that has strings ({', '.join(strings) or 'there is none'})."
        )
    return column


def texts_of(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Every text in ``rows``, for training a tokenizer on."""
    for row in rows:
        for name, value in row.items():
            if name == TOOLS or value is None:
                continue
            if isinstance(value, str):
                yield value
            elif isinstance(value, (list, tuple)):
                said = (m.get("content") or m.get("value") for m in value if isinstance(m, dict))
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
    made: dict[str, str | int] = {"tokenizer": _digest(identity)}
    if kind not in ("text", "line"):
        made["completion_only_loss"] = completion_only
        made["chat_template"] = _digest(tokenizer.chat_template)
    return made


def _digest(value: Any) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def sample_maker(
    kind: Kind, tokenizer: PreTrainedTokenizerBase, max_length: int, completion_only: bool, what: str = "training data"
) -> Callable[[Sequence[dict[str, Any]]], list[Sample | None]]:
    """A function from rows to samples of at most ``max_length`` tokens; None: without a label, to be dropped.

    Long documents become several samples, long conversations and completions lose their end. Lines become one sample
    each, of any length.

    Raises:
        ValueError: (the function) a row is not what its kind says.
    """
    eos = tokenizer.eos_token_id

    def texts(rows: Sequence[dict[str, Any]]) -> list[Sample | None]:
        column = TEXT if kind == "text" else LINE
        for row in rows:
            require_text(what, column, row[column])
        given = [row[column] for row in rows if row[column]]
        if not given:
            return []
        samples: list[Sample | None] = []
        for tokens in tokenizer(given, add_special_tokens=kind == "text", verbose=False)["input_ids"]:
            ids = list(tokens)
            if kind == "text" and eos is not None and ids[-1:] != [eos]:
                ids.append(eos)
            step = max_length if kind == "text" else max(len(ids), 1)
            samples += [(part, part) for start in range(0, len(ids), step) if (part := ids[start : start + step])]
        return samples

    def completions(rows: Sequence[dict[str, Any]]) -> list[Sample | None]:
        samples: list[Sample | None] = []
        for row in rows:
            try:
                if kind in ("messages", "conversations"):
                    messages = row[MESSAGES] if kind == "messages" else messages_of(row)
                    ids, labels = messages_sample(tokenizer, messages, row.get(TOOLS), completion_only)
                else:
                    is_pair = kind == "prompt_completion"
                    pair = (row[PROMPT], row[COMPLETION]) if is_pair else pair_of(row, bool(tokenizer.chat_template))
                    ids, labels = pair_sample(tokenizer, *pair, row.get(TOOLS), completion_only)
            except ValueError as error:
                raise ValueError(f"{what}: {error} The row: {str(row)[:200]}") from error
            ids, labels = ids[:max_length], labels[:max_length]
            # the first token has nothing before it to be predicted from
            samples.append((ids, labels) if any(label != IGNORED for label in labels[1:]) else None)
        return samples

    return texts if kind in ("text", "line") else completions


def make_samples(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    completion_only: bool = True,
    num_proc: int | None = None,
    overwrite_cache: bool = False,
    what: str = "training data",
) -> Dataset:
    """All samples of ``dataset``: columns ``input_ids``, ``labels`` and their ``length`` (int32), cached as blocks are.

    Rows without any label are dropped with one warning that counts them.

    Raises:
        ValueError: a row is not what its columns say, or no sample is left.
    """
    kind = kind_of(dataset.column_names)
    columns = list(dataset.column_names)
    make = sample_maker(kind, tokenizer, max_length, completion_only, what)
    rules = inspect.getsource(chat) + inspect.getsource(instructions) + inspect.getsource(sample_maker)

    # a closure with the rules' source: datasets hashes it, so that a changed rule makes a new cache entry
    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        assert rules
        out: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": []}
        for sample in make([dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]):
            ids, labels = sample or ([], [])
            out["input_ids"].append(ids)
            out["labels"].append(labels)
            out["length"].append(len(ids))
        return out

    tokens = List(Value("int32"))
    made = dataset.map(
        encode,
        batched=True,
        num_proc=num_proc,
        remove_columns=columns,
        features=Features({"input_ids": tokens, "labels": tokens, "length": Value("int32")}),
        load_from_cache_file=not overwrite_cache,
        desc=f"tokenizing {what}",
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
        raise ValueError(
            f"{what}: none of the {len(dataset)} rows has a token to train on. Remedy: other data, or a larger "
            "--block_size."
        )
    return made
