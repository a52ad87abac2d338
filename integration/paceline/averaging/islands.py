"""Numbers of islands, and which samples are whose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..config.averaging_keys import AveragingConfig
from ..messages import brief

ISLAND = "PACELINE_ISLAND"
"""In the environment: the island's number."""

_MOST_DIGITS = 9


def island_number(section: AveragingConfig) -> tuple[int, int]:
    """``(number of this island, number of shares of the data)``.

    Raises:
        ValueError: the environment does not say, or says one that has no share.
    """
    shares = section.islands or section.min_islands
    written = os.environ.get(ISLAND)
    if written is None or not written.isdecimal() or len(written) > _MOST_DIGITS:
        found = "is not set" if written is None else f"is {brief(repr(written), 100)}"
        raise ValueError(
            f"paceline.averaging is there and {ISLAND} {found}: say which island this is, from 0, with --island N "
            f"or {ISLAND}=N in the environment."
        )
    if int(written) >= shares:
        raise ValueError(
            f"this is island {written}, and the data are divided into {shares} shares, for islands 0 to {shares - 1}: "
            'give it another number, or write "islands" into paceline.averaging.'
        )
    return int(written), shares


def island_share(section: Mapping[str, Any] | AveragingConfig, length: int) -> range:
    """Samples of ``length`` that are this island's: one in as many as there are shares."""
    config = section if isinstance(section, AveragingConfig) else AveragingConfig.model_validate(dict(section))
    island, shares = island_number(config)
    return range(island, length, shares)


def separate_monitors(monitors: Any, section: AveragingConfig | None) -> None:
    """Add the island's number to the folders that DeepSpeed's monitors write: islands may share JSON and file system.

    Args:
        monitors: DeepSpeed's ``monitor_config``.
    """
    written = [each for each in (monitors.tensorboard, monitors.csv_monitor) if each.enabled]
    if section is not None and written:
        island, _ = island_number(section)
        for each in written:
            each.job_name += f"-island{island}"
