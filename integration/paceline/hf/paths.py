"""Paths that people give where a name on the hub may stand too."""

from __future__ import annotations

import os
from pathlib import Path


def is_missing(source: str | Path) -> bool:
    """Whether a path is meant that does not exist; transformers would take it for a name on the hub, and say so.

    >>> is_missing("./nowhere"), is_missing("Qwen/Qwen3-0.6B")
    (True, False)
    """
    text = str(source)
    is_path = isinstance(source, Path) or text.startswith((".", "/", "~")) or text.endswith(("/", ".json"))
    # Path's own `exists` fails for names that no file can have.
    return (is_path or text.count("/") > 1) and not os.path.exists(text)
