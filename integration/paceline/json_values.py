"""JSON files that people write: a strict reader, and checks of the values in them.

Without pydantic, which takes longer to import than ``paceline partition`` takes to answer. Messages name the file, the
place in it, the value, the rule and the remedy.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, isfinite
from pathlib import Path
from typing import Any, NoReturn

_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")|(-?Infinity|NaN)|([{}\[\],:])')
_MOST_SHOWN = 40


class _Duplicate(Exception):
    """A key stands twice in an object."""


class _Constant(Exception):
    """NaN or an infinity."""


def read_text(path: str | os.PathLike[str], remedy: str, *, label: str | None = None) -> str:
    """The text of a file.

    Args:
        remedy: what to give instead, without a full stop.
        label: of the file in messages; by default its path.

    Raises:
        ValueError: no such file, or one that is not UTF-8 text.
    """
    if not os.fspath(path):
        raise ValueError(f"the name of a file is empty; {remedy}.")
    label = label or str(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{label}: {error.strerror}; {remedy}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{label}: not UTF-8 text (byte {error.start}); {remedy}.") from None
    except ValueError:  # a name with a null byte
        raise ValueError(f"{label}: not a path; {remedy}.") from None


def read_json(path: str | os.PathLike[str], remedy: str, *, label: str | None = None) -> Any:
    """The value that a file holds as strict JSON: no duplicate keys, no NaN, no comments.

    Args:
        remedy: what to give instead, without a full stop.
        label: of the file in messages; by default its path.

    Raises:
        ValueError: no such file, or not strict JSON; with the line and the column.
    """
    text = read_text(path, remedy, label=label)
    label = label or str(path)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        remedy = _correction(text) or remedy
        raise ValueError(f"{label}, line {error.lineno}, column {error.colno}: {error.msg}; {remedy}.") from None
    except _Duplicate:
        key, first, second = _find_duplicate(text)
        raise ValueError(
            f'{label}, {_place(text, second)}: duplicate key "{key}", first at {_place(text, first)}; keep one of them.'
        ) from None
    except _Constant as error:
        at = next(token.start() for token in _TOKEN.finditer(text) if token[2])
        raise ValueError(f"{label}, {_place(text, at)}: {error} is not JSON; write a number or null.") from None
    except RecursionError:
        raise ValueError(f"{label}: too many brackets inside each other; {remedy}.") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{label}: {error}; choose units that bring it near 1.") from None


def _correction(text: str) -> str:
    """Remedy for a file that was meant to be JSON, as its beginning tells; empty where nothing tells so."""
    start = text.lstrip()
    if start.startswith("\ufeff"):
        return "save the file as UTF-8 without a BOM"
    if start.startswith(("//", "/*", "#")):
        return "delete the comments, which JSON does not have"
    return "correct the JSON there" if start.startswith(("{", "[")) else ""


@contextmanager
def within(label: str) -> Iterator[None]:
    """Name ``label`` first in the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def known_keys(label: str, values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for a key of ``label`` that is not one of ``names``."""
    names = list(names)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            remedy = f'did you mean "{near[0]}"?' if near else f"choose from {', '.join(names)}."
            raise ValueError(f"{json.dumps(key)} is not a key of {label}; {remedy}")


def as_object(label: str, value: Any, names: Iterable[str]) -> dict[str, Any]:
    """``value`` if it is an object that has no keys but ``names``, else a ValueError."""
    names = list(names)
    if not isinstance(value, dict):
        raise ValueError(f"{label} is {short(value)}: give an object with {', '.join(names)}.")
    known_keys(label, value, names)
    return value


def as_list(label: str, value: Any) -> list[Any]:
    """``value`` if it is a list, else a ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{label} is {'missing' if value is None else short(value)}: give a list.")
    return value


def as_number(label: str, value: Any) -> int | float:
    """``value`` if it is a number to compute with, else a ValueError; an int stays one: sums of bytes are exact."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{label} is {short(value)}: give a number.")
    if value and not 1e-60 <= abs(value) <= 1e60:
        raise ValueError(f"{label} is too large or too small to be computed with: choose units that bring it near 1.")
    return value


def as_whole(label: str, value: Any) -> int:
    """``value`` if it is a whole number, else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{label} is {short(value)}: give a whole number.")
    return value


def as_rate(label: str, value: Any) -> float:
    """A rate or a limit; null is none, which is infinite."""
    return inf if value is None else as_number(label, value)


def or_null(value: float | None) -> float | None:
    """``value`` for a JSON, which has no infinity."""
    return value if value is not None and isfinite(value) else None


def short(value: Any) -> str:
    """A value as JSON has it, for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise _Duplicate
    return unique


def _no_constant(name: str) -> NoReturn:
    raise _Constant(name)


def _place(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"


def _find_duplicate(text: str) -> tuple[str, int, int]:
    """The first duplicate key, its first and its second offset; the json module tells no positions of keys."""
    objects: list[dict[str, int] | None] = []  # per open bracket: keys and where they are; None for a list
    before = ""
    for token in _TOKEN.finditer(text):
        string, _, mark = token.groups()
        keys = objects[-1] if objects else None
        if string and keys is not None and before in ("{", ","):
            key = json.loads(string)
            if key in keys:
                return key, keys[key], token.start()
            keys[key] = token.start()
        elif mark in ("{", "["):
            objects.append({} if mark == "{" else None)
        elif mark in ("}", "]"):
            objects.pop()
        before = mark
    raise AssertionError("no duplicate key")
