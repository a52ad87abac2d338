"""Instructions (Alpaca's columns) as prompts with completions, and ShareGPT's conversations as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""What ShareGPT's ``from`` says, and the role that this is."""

_ALONE = "Below is an instruction that describes a task. "
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
)  # fmt: skip
_RESPOND = "Write a response that appropriately completes the request.\n\n"


def pair_of(row: Mapping[str, Any], has_template: bool) -> tuple[Any, Any]:
    """Prompt and completion of a row of instructions, both strings or both messages; without an output: ``""``, ``""``.

    Args:
        has_template: the tokenizer has a chat template; without one, the prompt is Alpaca's own text.

    Raises:
        ValueError: a column is not a string.
    """
    names = ("system", "instruction", "input", "output")
    for name in names:
        value = row.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"{name!r} must be a string, but is a {type(value).__name__}. Remedy: correct the data, or "
                "--text_column to train on one column as it is."
            )
    system, task, context, output = (row.get(name) or "" for name in names)
    if not output:
        return "", ""
    if has_template:
        asked = "\n\n".join(part for part in (task, context) if part)
        told = [{"role": "system", "content": system}] if system else []
        return [*told, {"role": "user", "content": asked}], [{"role": "assistant", "content": output}]
    before = f"{system}\n\n" if system else ""
    head = _WITH_INPUT if context else _ALONE
    given = f"### Input:\n{context}\n\n" if context else ""
    return f"{before}{head}{_RESPOND}### Instruction:\n{task}\n\n{given}### Response:\n", output


def messages_of(row: Mapping[str, Any]) -> list[Any]:
    """The messages of a row of conversations; turns that have a ``role`` and a ``content`` are messages already.

    Raises:
        ValueError: a turn says nobody that is known, or what it has is no text.
    """
    turns = row["conversations"]
    if not isinstance(turns, (list, tuple)):
        raise ValueError(
            "'conversations' must be a list of turns, each with a `from` and a `value`, but is a "
            f"{type(turns).__name__}. Remedy: correct the data."
        )
    system = row.get("system")
    found: list[Any] = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or turn.get("role") is not None:
            found.append(turn)  # judged as a message
            continue
        speaker, value = turn.get("from"), turn.get("value")
        role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None or not isinstance(value, str):
            raise ValueError(
                f"turn {index} of 'conversations' is from {speaker!r} with a value that is a {type(value).__name__}: "
                f"a turn must be from one of {', '.join(ROLES)}, with a string. Remedy: convert it to `messages`, each "
                "with a `role` and a `content`."
            )
        found.append({"role": role, "content": value})
    return found
