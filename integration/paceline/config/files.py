"""DeepSpeed configs from files, as strict JSON: no duplicate keys, no NaN, no comments."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_SECRET = re.compile(r"(^|_)(key|token|password|secret)$", re.IGNORECASE)
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")|(-?Infinity|NaN)|([{}\[\],:])')


def read_ds_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config of one's own: a deep copy of a dict, or what a JSON file holds.

    DeepSpeed reads Hjson and accepts more; what this accepts, everybody accepts.

    Raises:
        ValueError: no such file, not strict JSON, or not an object; with the file, line and column.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give the path of a DeepSpeed JSON.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the path of a DeepSpeed JSON.") from None
    try:
        config = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except _Duplicate:
        key, first, second = _find_duplicate(text)
        raise ValueError(
            f'{path}, {_place(text, second)}: duplicate key "{key}", first at {_place(text, first)}; keep one of them.'
        ) from None
    except _Constant as error:
        at = next(token.start() for token in _TOKEN.finditer(text) if token[2])
        raise ValueError(f"{path}, {_place(text, at)}: {error} is not JSON; write a number or null.") from None
    except RecursionError:
        raise ValueError(f"{path}: too many brackets inside each other; a DeepSpeed config has a few.") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{path}: {error}; write a number that can be meant.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds {type(config).__name__}, a DeepSpeed config is an object {{...}}.")
    _check_kind(path, config)
    return config


def without_secrets(config: Any) -> Any:
    """``config``, to be shown: values of keys that name a key, a token, a password or a secret say ``"hidden"``."""
    if isinstance(config, Mapping):
        return {
            name: "hidden" if value and _SECRET.search(str(name)) else without_secrets(value)
            for name, value in config.items()
        }
    return [without_secrets(each) for each in config] if isinstance(config, (list, tuple)) else config


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model's own config, no key of which DeepSpeed would miss or complain of."""
    from .known import SECTION, TOP_LEVEL

    own = next((key for key in ("model_type", "architectures") if key in config), None)
    if own is not None and not config.keys() & {*TOP_LEVEL, SECTION}:
        raise ValueError(
            f"{path}: \"{own}\" is a key of a model's config, and none is DeepSpeed's: give a DeepSpeed JSON "
            f"(`paceline plan` writes one); whether the model can be a pipeline, `paceline check-model {path.parent}` "
            "says."
        )


class _Duplicate(Exception):
    pass


class _Constant(Exception):
    pass


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
