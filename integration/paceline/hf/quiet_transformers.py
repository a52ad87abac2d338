"""transformers without its logs and bars, where what it would say is not about what the user does."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as log


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Keep transformers from logging and warning, and from drawing progress bars unless ``bars``.

    What was set before comes back.
    """
    level, hide = log.get_verbosity(), not bars and log.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.set_verbosity(logging.CRITICAL + 1)
        if hide:
            log.disable_progress_bar()
        try:
            yield
        finally:
            log.set_verbosity(level)
            if hide:
                log.enable_progress_bar()
