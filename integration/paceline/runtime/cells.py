"""Where the stages of a pipeline lie, each direction's for itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedules.directions import chunks_of
from .rank_reports import Routes


@dataclass(frozen=True)
class Cells:
    """One stage of one direction, on the device that holds it, is a *cell*.

    They are numbered as those of a :class:`~paceline.schedules.schedule.Schedule`.

    Args:
        routes: device of each stage, one route a direction.
    """

    routes: Routes

    @property
    def num_stages(self) -> int:
        """Stages of one direction."""
        return len(self.routes[0])

    @property
    def num_devices(self) -> int:
        return max(self.routes[0]) + 1

    @property
    def numbers(self) -> range:
        """All cells."""
        return range(len(self.routes) * self.num_stages)

    def device(self, cell: int) -> int:
        direction, stage = divmod(cell, self.num_stages)
        return self.routes[direction][stage]

    def held(self, device: int) -> list[int]:
        """Cells of a device, by chunk."""
        return [direction * self.num_stages + stage for direction, stage in chunks_of(device, self.routes)]
