"""Measure one rank's steps: seconds of its computations and waits, bytes that a micro-batch keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from ..measure.clock import Clock
from ..measure.layer_timer import LayerTimer
from ..measure.recorder import Recorded, Recorder, SavedBytes
from ..schedules.schedule import BACKWARD, FORWARD
from .early_room import Extent, Recomputed
from .movable_layers import Layers
from .rank_reports import WAIT, LayerReport

Received = TypeVar("Received")


class Meter:
    """Books what a rank does while a program runs. Nothing here is collective.

    Args:
        module: the rank's part of the model, all of its chunks.
    """

    def __init__(self, clock: Clock, module: nn.Module, device: torch.device) -> None:
        self.clock, self.recorder = clock, Recorder(clock.now)
        self.saved_bytes: dict[int, dict[int, float]] = {}
        """Bytes that a live micro-batch keeps on this rank, by micro-batch size and chunk, as far as measured."""
        self._deferred_bytes: dict[int, dict[int, float]] = {}
        """The same of one between the backward of the inputs and that of the weights."""
        self._most_deferred_bytes: dict[int, dict[int, float]] = {}
        """The most that it can be, until it is measured."""
        self.recomputed_bytes: dict[int, dict[int, Recomputed]] = {}
        """Bytes that a micro-batch's layers keep once they are computed again, by micro-batch size and chunk."""
        self.again_room_bytes = 0.0
        """Bytes that all that was alive might take in the last step of which that was decided."""
        self.keeps_all_or_nothing = False
        """Whether a step keeps all of them or none."""
        self.measures_memory_of: int | None = None
        """Micro-batch size of which each chunk's next forward tells what it keeps, if that is not known."""
        self.measured_numbers: dict[int, int] = {}
        """By chunk, the number of the micro-batch that tells it; where there is none it is the next one."""
        self._module, self._device = module, device
        self._layer_timers: list[LayerTimer] = []
        """By chunk, while layers are timed."""

    @property
    def times_single_layers(self) -> bool:
        """Whether each layer is timed by itself now."""
        return bool(self._layer_timers)

    def compute(self, kind: str, number: int, run: Callable[[], None], chunk: int = 0) -> None:
        """Time a forward or a backward of a chunk."""
        clock, recorder = self.clock, self.recorder
        is_timed = bool(self._layer_timers) and kind in (FORWARD, BACKWARD)
        timer = self._layer_timers[chunk] if is_timed else None
        start = clock.now()
        if timer is not None:
            timer.begin(kind)
        size = self.measures_memory_of
        is_known = size is None or chunk in self.saved_bytes.get(size, ())
        if kind == FORWARD and size is not None and not is_known and self.is_measured(number, chunk):
            self._measure_memory(run, size, chunk)
            recorder.leave_out(kind, number, chunk)
        else:
            run()
        if timer is not None:
            timer.end(kind)
        end = clock.now()
        clock.add_compute(start, end)
        recorder.add(Recorded(kind, number, start, end, chunk))

    @property
    def deferred_bytes(self) -> dict[int, dict[int, float]]:
        """Bytes of a micro-batch between the backward of its inputs and that of the weights, by size and chunk: as
        measured, or what they are at most, where that is known."""
        most, known = self._most_deferred_bytes, self._deferred_bytes
        return {size: {**most.get(size, {}), **known.get(size, {})} for size in most.keys() | known.keys()}

    def deferred(self, num_bytes: Callable[[], int], chunk: int) -> None:
        """Note what a chunk's backward of the inputs has left for later, where that is not known."""
        size = self.measures_memory_of
        if size is not None and chunk not in self._deferred_bytes.get(size, ()):
            self._deferred_bytes.setdefault(size, {})[chunk] = float(num_bytes())

    def may_defer(self, most_bytes: Callable[[], float | None], chunk: int) -> None:
        """Note what a chunk's backward of the inputs would leave for later at most, where that is not known."""
        size = self.measures_memory_of
        if size is not None and chunk not in self._most_deferred_bytes.get(size, ()):
            most = most_bytes()
            if most is not None:
                self._most_deferred_bytes.setdefault(size, {})[chunk] = most

    def is_measured(self, number: int, chunk: int) -> bool:
        """Whether a micro-batch tells what those of its size keep."""
        return self.measured_numbers.get(chunk, number) == number

    def lacks_memory_of(self, chunk: int, *, splits: bool, recomputes: bool) -> bool:
        """Whether the memory of a chunk's micro-batches is still to be measured.

        Args:
            splits: also between both parts of split backwards.
            recomputes: also of layers that are computed again.
        """
        size = self.measures_memory_of
        if size is None:
            return False
        lacks_deferred = splits and chunk not in self._deferred_bytes.get(size, ())
        lacks_recomputed = recomputes and chunk not in self.recomputed_bytes.get(size, ())
        return chunk not in self.saved_bytes.get(size, ()) or lacks_deferred or lacks_recomputed

    def counts_recomputed(self, chunk: int) -> bool:
        """Whether the bytes of a chunk's recomputed layers are still to be counted."""
        size = self.measures_memory_of
        return size is not None and chunk not in self.recomputed_bytes.get(size, ())

    def recomputed(self, num_bytes: float | None, extent: Extent | None, chunk: int, num_layers: int = 1) -> None:
        """Note what the activations of a micro-batch keep that were computed again, if they were counted."""
        if self.measures_memory_of is not None and num_bytes is not None and extent is not None:
            of_size = self.recomputed_bytes.setdefault(self.measures_memory_of, {})
            of_size[chunk] = Recomputed(extent, num_bytes, num_layers)

    def update(self, kind: str, run: Callable[[], None]) -> None:
        """Record when gradients are reduced (``"reduce"``) or an update is made (``"step"``)."""
        start = self.clock.now()
        run()
        self.recorder.add(Recorded(kind, -1, start, self.clock.now()))

    def wait(self, take: Callable[[], Received], number: int, chunk: int = 0) -> Received:
        """Book the time until a chunk's message is there as idle."""
        start = self.clock.now()
        value = take()
        end = self.clock.now()
        self.clock.add_idle(start, end)
        self.recorder.add(Recorded(WAIT, number, start, end, chunk))
        return value

    def _measure_memory(self, run: Callable[[], None], size: int, chunk: int) -> None:
        with SavedBytes(self._module, self._device) as saved:
            run()
        self.saved_bytes.setdefault(size, {})[chunk] = float(saved.num_bytes)

    def time_layers(self, layers: Layers) -> None:
        """Time each layer in the steps from here to :meth:`stop_timing_layers`."""
        for stage in layers.held:
            modules, before, after = layers.timed(stage)
            self._layer_timers.append(
                LayerTimer(
                    modules,
                    self._device,
                    stage=self._module,
                    before=before,
                    after=after,
                    again=layers.recomputed_together(stage),
                    now=self.clock.now,
                )
            )
            self._layer_timers[-1].install()

    def stop_timing_layers(self, layers: Layers, micro_batch_size: int) -> dict[int, LayerReport]:
        """Times of the layers of this rank since :meth:`time_layers`; none if layers have moved since."""
        timers = self._remove_layer_timers()
        return {
            item: LayerReport(layers.kind(item), layers.num_parameters(item), times, micro_batch_size)
            for timer in timers
            for item, times in timer.result().items()
        }

    def _remove_layer_timers(self) -> list[LayerTimer]:
        timers, self._layer_timers = self._layer_timers, []
        for timer in timers:
            timer.remove()
        return timers

    def forget_memory(self, size: int) -> None:
        """Micro-batches of a size have become much larger: the next step measures again what they keep."""
        for known in (self.saved_bytes, self._deferred_bytes, self._most_deferred_bytes, self.recomputed_bytes):
            known.pop(size, None)

    def forget_stage(self) -> None:
        """The rank's layers have changed: what was measured of them no longer counts."""
        self._remove_layer_timers()
        self.saved_bytes.clear()
        self._deferred_bytes.clear()
        self._most_deferred_bytes.clear()
        self.recomputed_bytes.clear()
        self.recorder.forget()
