"""DeepSpeed's monitors, which a run outlives."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deepspeed.monitor.monitor import Monitor, MonitorMaster

from ..messages import reason

logger = logging.getLogger("paceline")

SECTIONS = {
    "tb_monitor": "tensorboard",
    "wandb_monitor": "wandb",
    "csv_monitor": "csv_monitor",
    "comet_monitor": "comet",
}
"""Monitors of DeepSpeed, by attribute, and their sections of the JSON."""


class OutlivedMonitors(MonitorMaster):
    """Monitors of DeepSpeed, of which one that cannot be written ends with a warning: the run matters more."""

    def __init__(self, begun: MonitorMaster) -> None:
        self.__dict__.update(vars(begun))

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        """Write ``(name, value, samples so far)``."""
        for name, section in SECTIONS.items():
            one: Monitor | None = getattr(self, name)
            try:
                if one is not None:
                    one.write_events(event_list)
            except OSError as error:
                logger.warning("%s ends before sample %d: %s", section, event_list[0][2], reason(error))
                setattr(self, name, None)
