"""Conversations and prompts with their completions as tokens, and which of the tokens have a loss.

A sample is ``(input_ids, labels)``, two lists of one length; a label is the token itself, or -100 where there is no
loss. Which tokens belong to a completion is found by characters: a token that reaches into the completion's text
belongs to it, as transformers has it for templates with ``{% generation %}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

IGNORED = -100

Sample = tuple[list[int], list[int]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def use_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Give ``tokenizer`` the chat template of ``path``: a Jinja file, or a directory with a tokenizer that has one.

    Raises:
        ValueError: there is none.
    """
    if Path(path).is_dir():
        template = AutoTokenizer.from_pretrained(path).chat_template
    elif Path(path).is_file():
        template = Path(path).read_text(encoding="utf-8")
    else:
        template = None
    if not template:
        raise ValueError(
            f"--chat_template_path {path}: must be a Jinja file, or a directory with a tokenizer that has a chat "
            "template. Remedy: check the path; each node of the job needs it."
        )
    tokenizer.chat_template = template


def messages_sample(
    tokenizer: PreTrainedTokenizerBase, messages: Any, tools: Any = None, completion_only: bool = True
) -> Sample:
    """A conversation through the chat template; the loss is on the assistant's turns, or on everything.

    Raises:
        ValueError: these are not messages, or the template cannot tell which tokens are the assistant's.
    """
    messages = _checked("messages", messages)
    if completion_only and _GENERATION.search(_template(tokenizer)):
        _require_fast(tokenizer)
        encoded = _apply(tokenizer, messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids = list(encoded["input_ids"])
        return ids, [i if mine else IGNORED for i, mine in zip(ids, encoded["assistant_masks"], strict=True)]
    text = _apply(tokenizer, messages, tools)
    if not completion_only:
        return _encode(tokenizer, text, [(0, len(text))])
    spans = []
    for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
        before = _apply(tokenizer, messages[: max(index, 1)], tools, add_generation_prompt=True)
        with_turn = _apply(tokenizer, messages[: index + 1], tools)
        if index == 0:  # most templates cannot render what comes before, a conversation without a message
            head = before.removeprefix(with_turn)
            before = with_turn[: with_turn.find(head) + len(head)] if head in with_turn else ""
        if not (with_turn.startswith(before) and text.startswith(with_turn)):
            raise ValueError(
                f"the chat template changes what came before when a message is added (message {index}), so the "
                "assistant's tokens cannot be told from it. Remedy: --chat_template_path with a template that has "
                "{% generation %} around the assistant's turns, or --no_completion_only_loss."
            )
        spans.append((len(before), len(with_turn)))
    return _encode(tokenizer, text, spans)


def pair_sample(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, completion: Any, tools: Any = None, completion_only: bool = True
) -> Sample:
    """A prompt with its completion, both strings or both messages; the loss is on the completion, or on everything.

    Strings are joined as they are and end with the tokenizer's end token; messages go through the chat template.

    Raises:
        ValueError: of other types, or the template changes the prompt when the completion is added.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            return [], []
        text, start = prompt + completion, len(prompt)
        ids, labels = _encode(tokenizer, text, [(start, len(text))], add_special_tokens=True)
        eos = tokenizer.eos_token_id
        if eos is not None:
            if ids[-1:] != [eos]:
                ids, labels = [*ids, eos], [*labels, eos]
            labels[-1] = eos
        return ids, (labels if completion_only else list(ids))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError(
            f"'prompt' is a {type(prompt).__name__} and 'completion' a {type(completion).__name__}: both must be "
            "strings, or both lists of messages. Remedy: correct the data."
        )
    if completion is not None and len(completion) == 0:
        return [], []
    asked, answer = _checked("prompt", prompt), _checked("completion", completion)
    before = _apply(tokenizer, asked, tools, add_generation_prompt=asked[-1]["role"] != "assistant")
    text = _apply(tokenizer, asked + answer, tools)
    if completion_only and not text.startswith(before):
        raise ValueError(
            "the chat template changes the prompt when the completion is added, so their tokens cannot be told apart. "
            "Remedy: another template by --chat_template_path, or --no_completion_only_loss."
        )
    return _encode(tokenizer, text, [(len(before) if completion_only else 0, len(text))])


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]], add_special_tokens: bool = False
) -> Sample:
    """``text`` as tokens, with labels where a token reaches into one of ``spans`` (characters, in rising order)."""
    _require_fast(tokenizer)
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    labels = [IGNORED] * len(ids)
    at = 0
    for index, (start, end) in enumerate(encoded["offset_mapping"]):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at < len(spans) and start < end and end > spans[at][0]:
            labels[index] = ids[index]
    return ids, labels


def _require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} cannot say which characters a token stands for, which finding the completion "
            "needs. Remedy: a fast tokenizer by --tokenizer_name, or a `text` column."
        )


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Any, tools: Any, **options: Any) -> Any:
    """The conversation as the template has it: a string, or tokens with ``tokenize``."""
    _template(tokenizer)
    try:
        tools = (json.loads(tools) if isinstance(tools, str) else tools) or None
        return tokenizer.apply_chat_template(messages, tools=tools, **{"tokenize": False} | options)
    except Exception as error:  # templates raise what they like
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template does not take a conversation of {roles}: {' '.join(str(error).split())}. Remedy: "
            "correct the data, or --chat_template_path with another template."
        ) from error


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            "messages need a chat template, and the tokenizer has none. Remedy: --chat_template_path with a Jinja "
            "file, or the tokenizer of a chat model by --tokenizer_name."
        )
    return tokenizer.get_chat_template()


def without_filled(value: Any, kind: Any) -> Any:
    """``value`` without the keys that Arrow filled with None: in a typed column each dictionary has those of all rows.

    Args:
        kind: its feature, of the datasets library; dictionaries in a column of JSON have their own keys, and keep them.
    """
    if isinstance(kind, Mapping) and isinstance(value, Mapping):
        return {key: without_filled(item, kind[key]) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_filled(item, getattr(kind, "feature", None)) for item in value]
    return value


def _checked(column: str, messages: Any) -> list[dict[str, Any]]:
    """``messages`` without keys whose value is None."""
    rule = f"{column!r} must be a list of messages, each with a `role` and a `content`, both strings"
    if not isinstance(messages, (list, tuple)) or not messages:
        found = "it is empty" if messages in ([], ()) else f"it is a {type(messages).__name__}"
        raise ValueError(f"{rule}; {found}. Remedy: correct the data.")
    cleaned = []
    for index, given in enumerate(messages):
        if not isinstance(given, dict):
            raise ValueError(f"{rule}; message {index} is a {type(given).__name__}. Remedy: correct the data.")
        message = {key: value for key, value in given.items() if value is not None}
        content = message.get("content", "" if message.get("tool_calls") else None)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise ValueError(
                f"{rule}; message {index} has {', '.join(message) or 'nothing'}"
                f"{'' if content is None else f' with a content that is a {type(content).__name__}'}. "
                "Remedy: rename or convert them."
            )
        cleaned.append(message)
    return cleaned
