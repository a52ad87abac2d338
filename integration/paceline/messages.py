"""Messages for people, whatever they wrote."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Collection, Iterable, Sequence

MOST = 1000
"""Characters of a message."""


def brief(text: str, most: int = MOST) -> str:
    """``text`` or, of a long one, its beginning and its end: what is wrong comes first, what to do last.

    >>> brief("--step 999999999: give a number", 20)
    '--step 9…ve a number'
    """
    if len(text) <= most:
        return text
    head = most * 2 // 5
    return f"{text[:head]}…{text[head + 1 - most :]}"


def reason(error: Exception) -> str:
    """The text of an error, to stand in a sentence: in one line and without a full stop.

    >>> reason(ValueError("no number:\\n  x."))
    'no number: x'
    """
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split()).rstrip(".")


def named(error: Exception) -> str:
    """An error with its type, in one line.

    >>> named(ValueError("no number"))
    'ValueError: no number'
    """
    return " ".join(f"{type(error).__name__}: {error}".split())


def plural(number: int, one: str, many: str | None = None) -> str:
    """A number of things, with their name.

    >>> plural(1, "step"), plural(2000, "step"), plural(2, "switch", "switches")
    ('1 step', '2,000 steps', '2 switches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The one of ``known`` that ``name`` was probably meant to be: the only one that it begins, or the most alike.

    >>> nearest("--stage", ["--stages", "--schedule"]), nearest("sim", ["simulate", "schema"]), nearest("x", ["y"])
    ('--stages', 'simulate', None)
    """
    names = sorted(known)
    begun = [one for one in names if name.strip("-") and one.startswith(name)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return near[0] if near else None


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Lines of a table, whose columns are to the right but for those in ``left``.

    >>> aligned([["rank", "state"], ["0", "up"]], left=[1])
    ['rank  state', '   0  up']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def print_anything() -> None:
    """Have stdout show what its encoding lacks, such as names of files that are no text, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
