"""Memory that a run's micro-batches and parameters take, and that there is for them, as ranks have reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from ..schedules.costs import Costs
from .cells import Cells
from .rank_reports import Report


@dataclass
class MeasuredMemory:
    """Bytes as measured so far; of a stage, those of the rank that needs most."""

    cells: Cells
    saved_bytes: dict[int, list[float]] = field(default_factory=dict)
    """Bytes that a live micro-batch keeps, by its size, one number a stage."""
    deferred_bytes: dict[int, list[float]] = field(default_factory=dict)
    """The same from the backward of the inputs to that of the weights, where backwards were split."""
    again_bytes: dict[int, list[float]] = field(default_factory=dict)
    """Bytes that it keeps more where nothing is computed again."""
    again_layers: list[int] = field(default_factory=list)
    """Layers of each stage that this is of, at least 1."""
    keeps_all_or_nothing: bool = False
    again_room_bytes: list[float] = field(default_factory=list)
    """Bytes that all that is alive may take where some of it is kept so, one number a device."""
    room_bytes: list[float] = field(default_factory=list)
    """Bytes that activations may take, one number a device."""
    state_bytes: list[float] = field(default_factory=list)
    """Bytes for each parameter, one number a device."""
    moved_bytes: float = 0.0
    """Bytes that go with a parameter to another device."""
    paused_bytes: float = 0.0
    """Those that training waits for."""

    def update(self, reports: Sequence[Report]) -> None:
        """Take in a report of every rank: memory must suffice on all of them."""
        by_device = [[r for r in reports if r.device == device] for device in range(self.cells.num_devices)]
        self.state_bytes = [max(r.state_bytes for r in own) for own in by_device]
        self.moved_bytes = max(r.moved_bytes for r in reports)
        self.paused_bytes = max(r.paused_bytes for r in reports)
        self.room_bytes = [min(r.room_bytes for r in own) for own in by_device]
        self._take_bytes(self.saved_bytes, [(report.device, report.saved_bytes) for report in reports])
        self._take_bytes(self.deferred_bytes, [(report.device, report.deferred_bytes) for report in reports])
        self._take_bytes(self.again_bytes, [(report.device, report.again_bytes) for report in reports])
        self.again_layers = [1] * self.cells.num_stages
        self.keeps_all_or_nothing = any(report.keeps_all_or_nothing for report in reports)
        rooms = [inf] * self.cells.num_devices
        for report in reports:
            for chunk, layers in report.again_layers.items():
                self.again_layers[self.cells.held(report.device)[chunk] % self.cells.num_stages] = layers
            rooms[report.device] = min(rooms[report.device], report.again_room_bytes)
        self.again_room_bytes = rooms

    @property
    def by_size(self) -> tuple[dict[int, list[float]], ...]:
        """Bytes of micro-batches, by their size."""
        return self.saved_bytes, self.deferred_bytes, self.again_bytes

    def predict(self, size: int, costs: Costs) -> None:
        """Take micro-batches' bytes from a prediction, as far as they were measured."""
        again = None if costs.again is None else costs.again.num_bytes
        for known, found in zip(self.by_size, (costs.activation_bytes, costs.deferred_bytes, again), strict=True):
            if size in known and found is not None:
                known[size] = list(found)

    def _take_bytes(
        self, known: dict[int, list[float]], found: Sequence[tuple[int, dict[int, dict[int, float]]]]
    ) -> None:
        for size in {size for _, sizes in found for size in sizes}:
            per_stage = known[size] = [0.0] * self.cells.num_stages
            for device, sizes in found:
                for chunk, num_bytes in sizes.get(size, {}).items():
                    stage = self.cells.held(device)[chunk] % self.cells.num_stages
                    per_stage[stage] = max(per_stage[stage], num_bytes)
