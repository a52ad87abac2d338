"""Calls that all ranks make: one that waits for the others says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .watch import EVERYONE, WATCH

logger = logging.getLogger("paceline")

REMIND_AFTER_S = 30.0


@contextmanager
def expecting_all(call: str, rank: int) -> Iterator[None]:
    """Around the first collective of ``call``, such as ``save_model``, which scripts make on rank 0 alone by mistake.

    Rank 0 warns after :data:`REMIND_AFTER_S`, and the watch ends a job whose other ranks do not come within its limit.
    """
    text = f"{call} has waited {REMIND_AFTER_S:g} s for other ranks: call it on all ranks, not on rank 0 alone."
    reminder = threading.Timer(REMIND_AFTER_S, logger.warning, [text])
    reminder.daemon = True
    if rank == 0:
        reminder.start()
    try:
        with WATCH.waiting(call, EVERYONE):
            yield
    finally:
        reminder.cancel()
