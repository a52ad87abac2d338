"""DeepSpeed's monitors, which a run outlives."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deepspeed.monitor.monitor import MonitorMaster

from ..messages import reason

logger = logging.getLogger("paceline")


class OutlivedMonitors(MonitorMaster):
    """Monitors of DeepSpeed, of which one that cannot be written ends with a warning: the run matters more."""

    def __init__(self, begun: MonitorMaster) -> None:
        self.__dict__.update(vars(begun))

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        """Write ``(name, value, samples so far)``."""
        for name, one in tuple(vars(self).items()):
            if not name.endswith("_monitor") or one is None:
                continue
            try:
                one.write_events(event_list)
            except OSError as error:
                logger.warning("%s ends before sample %d: %s", type(one).__name__, event_list[0][2], reason(error))
                setattr(self, name, None)
