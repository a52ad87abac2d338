"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that measures its stage: seconds and bytes."""

from __future__ import annotations

from typing import Any

import torch

from ..measure.layer_timer import LayerTimer
from ..measure.recorder import Recorder, SavedBytes
from ..optim.sharded import ShardedOptimizer
from .rank_reports import LayerReport


class Measuring:
    """What the controller asks of a rank. Nothing here is collective."""

    def _start_measuring(self: Any) -> None:
        self.recorder = Recorder(self.clock.now)
        self.saved_bytes: dict[int, float] = {}
        """What a live micro-batch keeps on this stage, by micro-batch size, as far as it was measured."""
        self.layer_timer: LayerTimer | None = None
        self.layer_reports: dict[int, LayerReport] = {}
        """What this rank says of its layers when the ranks are next brought together."""

    def _measure_memory(self: Any, run: Any, arguments: dict[str, Any]) -> None:
        """The first forward with a micro-batch size tells what a live micro-batch keeps."""
        with SavedBytes(self.module, torch.device(self.device)) as saved:
            run(**arguments)
        self.saved_bytes[self.cut] = float(saved.num_bytes)

    def time_layers(self: Any) -> None:
        """Time each layer in the steps from here to :meth:`stop_timing_layers`."""
        layers, before, after = self.layers.timed()
        self.layer_timer = LayerTimer(
            layers, torch.device(self.device), stage=self.module, before=before, after=after, now=self.clock.now
        )
        self.layer_timer.install()

    def stop_timing_layers(self: Any) -> dict[int, LayerReport]:
        """What the layers of this stage took since :meth:`time_layers`."""
        timer, self.layer_timer = self.layer_timer, None
        assert timer is not None, "time_layers begins it"
        timer.remove()
        return {
            item: LayerReport(self.layers.kind(item), self.layers.num_parameters(item), times, self.cut)
            for item, times in timer.result().items()
        }

    def take_layer_reports(self: Any) -> dict[int, LayerReport]:
        """:attr:`layer_reports`, once."""
        found, self.layer_reports = self.layer_reports, {}
        return found

    def bytes_per_parameter(self: Any) -> float:
        """What each parameter of the stage takes on this rank, with all that belongs to it."""
        values, parameters = self._value_bytes()
        return (values + self._other_bytes()) / parameters if parameters else 0.0

    def moved_bytes_per_parameter(self: Any) -> float:
        """What of that goes with a parameter to another stage: all but its gradient."""
        values, parameters = self._value_bytes()
        gradients = self.optimizer.gradient_bytes() if isinstance(self.optimizer, ShardedOptimizer) else 0
        return (values + self._other_bytes() - gradients) / parameters if parameters else 0.0

    def _value_bytes(self: Any) -> tuple[int, int]:
        parameters = list(self.module.parameters())
        return sum(p.numel() * p.element_size() for p in parameters), sum(p.numel() for p in parameters)

    def _other_bytes(self: Any) -> int:
        return self.optimizer.num_bytes() if isinstance(self.optimizer, ShardedOptimizer) else 0
