"""Answers that depend on a model's config alone, found once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from transformers import PretrainedConfig

Answer = TypeVar("Answer")


def once_a_config(find: Callable[..., Answer]) -> Callable[..., Answer]:
    """Remember what ``find(config, **options)`` has returned; an error is raised anew each time.

    Args:
        find: depends on nothing but its arguments, and returns what nobody changes.
    """
    answers: dict[Any, Answer] = {}

    @wraps(find)
    def found(config: PretrainedConfig, **options: Any) -> Answer:
        key = (_facts(config), tuple(sorted(options.items())))
        if " at 0x" in repr(key):  # of an object that does not tell what it holds
            return find(config, **options)
        if key not in answers:
            answers[key] = find(config, **options)
        return answers[key]

    return found


def _facts(value: Any) -> Any:
    """All that a config holds, private choices such as the implementation of attention included."""
    if isinstance(value, PretrainedConfig):
        return type(value), tuple((name, _facts(held)) for name, held in sorted(vars(value).items()))
    return repr(value)
