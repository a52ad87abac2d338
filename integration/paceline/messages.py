"""Messages for people, whatever they wrote."""

from __future__ import annotations

import io
import sys

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


def print_anything() -> None:
    """Have stdout show what its encoding lacks, such as names of files that are no text, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
