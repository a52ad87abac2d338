"""Import large packages without looking for garbage among them all the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY_OBJECTS = 100_000


@contextmanager
def few_collections() -> Iterator[None]:
    """Within it, unreachable reference cycles are looked for after so many new objects, not after 700.

    Importing torch, DeepSpeed and transformers makes a million objects that stay. The collector goes through them again
    and again as they come, for a fifth of the time of the imports.
    """
    before = gc.get_threshold()
    gc.set_threshold(MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
