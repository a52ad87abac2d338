"""Costs of a run's steps, from the reports that its ranks make at each tuning interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from ..measure.recurring import recurring_mean
from ..measure.speeds import Speeds
from ..measure.work import Seen, separate
from ..planning.rebalance import Uneven
from ..planning.repartition import ItemCosts, Layout
from ..schedules.costs import Again, Costs
from ..schedules.directions import chunks_of
from .cells import Cells
from .measured_links import MeasuredLinks
from .measured_memory import MeasuredMemory
from .rank_reports import Report, Routes
from .stage_times import StageTimes, beside_s, whole_times
from .step_spans import OF_SCHEDULE, step_spans
from .timed_items import TimedItems


@dataclass
class MeasuredCosts:
    """Costs of a run's steps as measured so far, on the rank that decides; each tuning interval adds to them.

    Args:
        routes: device of each stage, one route a direction.
        has_flush: steps do not run into each other.
        of_first_replica: times are those of the first replica, whose share of a step is its own; otherwise, where
            replicas differ, the slowest counts.
        parts: boundaries over the items, if a partition is chosen.
    """

    routes: Routes
    has_flush: bool = True
    of_first_replica: bool = False
    parts: tuple[int, ...] = ()
    step_s: float = 0.0
    """Seconds of a step besides its schedule."""
    measured_s: float = 0.0
    """A step, as it was in the last tuning interval."""
    _slowness: Speeds | None = None
    """Seconds of each cell for its work, followed over the intervals."""

    def __post_init__(self) -> None:
        self.cells = Cells(self.routes)
        self._memory = MeasuredMemory(self.cells)
        self._times, self._links = StageTimes(self.cells), MeasuredLinks(self.cells)
        self._layers = TimedItems(self.cells.num_devices)

    @property
    def items(self) -> tuple[ItemCosts, ...]:
        """Costs of each item, once layers were timed, with what its experts take longer because they are unevenly
        busy."""
        return self._layers.items

    @property
    def guessed(self) -> tuple[int, ...]:
        """Devices that could be compared with the others by sizes only."""
        return self._layers.guessed

    @property
    def split_factor(self) -> float:
        """How many times as long as a whole backward the two parts of a split one take."""
        return self._times.split_factor

    @property
    def saved_bytes(self) -> dict[int, list[float]]:
        """Bytes that a live micro-batch keeps, by its size, one number a stage."""
        return self._memory.saved_bytes

    @property
    def room_bytes(self) -> list[float]:
        """Bytes that activations may take, one number a device."""
        return self._memory.room_bytes

    @property
    def state_bytes(self) -> list[float]:
        """Bytes for each parameter, one number a device."""
        return self._memory.state_bytes

    @property
    def moved_bytes(self) -> float:
        """Bytes that go with a parameter to another device."""
        return self._memory.moved_bytes

    @property
    def _uneven_s(self) -> dict[int, Uneven]:
        return self._layers.uneven_s

    def update(self, reports: Sequence[Report]) -> None:
        """Take in a report of every rank."""
        everywhere = reports
        if self.of_first_replica:
            reports = [report for report in reports if report.replica == 0]
        replicas: dict[int, list[Report]] = {}
        for report in sorted(reports, key=lambda report: report.device):
            replicas.setdefault(report.replica, []).append(report)
        times = self._times
        before = [{size: list(each) for size, each in known.items()} for known in (times.forward_s, times.backward_s)]
        kept = dict(times.kept_shares)
        measured = times.take(reports)
        self._keep_alike(before, kept)
        if self._layers.update(reports, self.parts[-1] if self.parts else 0):
            self._slowness = Speeds(len(self.cells.numbers))
        self._smooth(replicas)
        times.scale_others(before, measured)
        self._memory.update(everywhere)
        self._links.update(replicas)
        if self.has_flush:
            self._step(replicas)
        else:
            self._window(reports)

    def _keep_alike(self, before: Sequence[dict[int, list[float]]], kept: dict[int, list[float]]) -> None:
        """Backwards of before as if they had kept what is kept now, which tells nothing of the device."""
        _, backward_s = before
        for size in backward_s.keys() & kept.keys():
            again = self._again(size, self._per_stage(size)[0])
            if again is not None:
                less = [(then - now) * s for then, now, s in zip(kept[size], again.kept, again.seconds, strict=True)]
                directions = len(self.cells.numbers) // self.cells.num_stages
                backward_s[size] = [sum(each) for each in zip(backward_s[size], less * directions, strict=True)]

    def _smooth(self, replicas: dict[int, list[Report]]) -> None:
        """Follow each cell's seconds for its work over the intervals: steady under noise, at once when they change."""
        if self._slowness is None:
            return
        work, expected = (
            [sum(item.work_s for item in items[a:b]) for a, b in pairwise(self.parts)]
            for items in (self._layers.measured, self.items)
        )
        sizes = [step.key[1] for pipe in replicas.values() for step in pipe[0].steps]
        if not sizes:
            return
        size = sizes[-1]
        per_cell: list[list[float]] = []
        for cell in self.cells.numbers:
            device, own = self.cells.device(cell), work[cell % self.cells.num_stages]
            chunk = self.cells.held(device).index(cell)
            factor = self._times.split_factor
            per_replica = [whole_times(pipe[device].steps, size, chunk, factor) for pipe in replicas.values()]
            slowest = [max(of_step) for of_step in zip(*per_replica, strict=False)]
            per_cell.append([seconds / own for seconds in slowest] if own > 0 else [])
        self._slowness.update(per_cell)
        for cell, each in enumerate(self._slowness.values):
            now = self._times.forward_s[size][cell] + self._times.backward_s[size][cell]
            if per_cell[cell] and now > 0:
                factor = expected[cell % self.cells.num_stages] * each / now
                self._times.forward_s[size][cell] *= factor
                self._times.backward_s[size][cell] *= factor

    def layout(self, cuts: Sequence[int], memory_bytes: int | None) -> Layout:
        """Describe the partition that runs, for a search of another one.

        Args:
            cuts: where the items may be cut.
            memory_bytes: of each device; None: what its stages have, and what is free.
        """
        of_stages = [sum(item.num_parameters for item in self.items[a:b]) for a, b in pairwise(self.parts)]
        held = [chunks_of(device, self.routes) for device in range(self.cells.num_devices)]
        parameters = [sum(of_stages[stage] for _, stage in own) for own in held]
        limits = [
            float(memory_bytes) if memory_bytes is not None else room + each * count
            for room, each, count in zip(self._memory.room_bytes, self._memory.state_bytes, parameters, strict=True)
        ]
        return Layout(
            *(self.items, self.parts, tuple(cuts), tuple(limits), tuple(self._memory.state_bytes)),
            moved_bytes=self._memory.moved_bytes,
            paused_bytes=self._memory.paused_bytes,
            routes=tuple(tuple(route) for route in self.routes),
        )

    def has_moved(self, parts: Sequence[int]) -> None:
        """Layers lie otherwise from now on; until it is measured, what was predicted counts."""
        times, memory = self._times, self._memory
        if not self.items:
            for known in (times.forward_s, times.backward_s, self._links.message_bytes, *memory.by_size):
                known.clear()
        for size in self.sizes():
            layout, now, stages = self.layout((), None), self.costs(size), self.cells.num_stages
            ways = [
                layout.costs(
                    replace(
                        now,
                        forward_s=tuple(times.forward_s[size][first : first + stages]),
                        backward_s=tuple(times.backward_s[size][first : first + stages]),
                    ),
                    parts,
                )
                for first in self.cells.numbers[::stages]
            ]
            times.forward_s[size] = [seconds for way in ways for seconds in way.forward_s]
            times.backward_s[size] = [seconds for way in ways for seconds in way.backward_s]
            if size in self._links.message_bytes:
                self._links.message_bytes[size] = list(ways[0].message_bytes)
            memory.predict(size, ways[0])
        self.parts = tuple(parts)

    def _step(self, replicas: dict[int, list[Report]]) -> None:
        found = [span for pipe in replicas.values() for span in step_spans(pipe)]
        if found:
            self.step_s = recurring_mean([max(span.whole_s - span.schedule_s, 0.0) for span in found])
            self.measured_s = recurring_mean([span.whole_s for span in found])

    def _window(self, reports: Sequence[Report]) -> None:
        """Steps that run into each other: of each rank by itself, which begins the next one when it likes.

        Beside its schedule a step takes what it does of the rank that waits least for the others.
        """
        beside, whole = [], []
        for index in range(min(len(report.steps) for report in reports)):
            steps = [report.steps[index] for report in reports]
            if all(any(span.kind in OF_SCHEDULE for span in step.spans) for step in steps):
                beside.append(min(map(beside_s, steps)))
                whole.append(max(step.ended_s - step.begun_s for step in steps))
        if beside:
            self.step_s, self.measured_s = recurring_mean(beside), recurring_mean(whole)

    def forget_links(self) -> None:
        """Let the next look at the links count alone."""
        self._links.forget()

    def sizes(self) -> list[int]:
        """Micro-batch sizes whose steps were measured."""
        return self._times.sizes

    def costs(self, size: int) -> Costs:
        """Costs of one micro-batch of ``size`` samples, which was measured."""
        down, up = self._links.between_stages()
        hosts, egress = self._links.of_hosts()
        forward_s, backward_s, speeds = self._per_stage(size)
        # Other sizes tell what one that has not run split is like.
        like = size if size in self._times.weight_shares else min(self._times.weight_shares, default=size)
        shares = self._times.weight_shares.get(like, ()) if len(self.routes) == 1 else ()
        deferred = [num_bytes * size / like for num_bytes in self._memory.deferred_bytes.get(like, ())]
        return Costs(
            forward_s=forward_s,
            backward_s=backward_s,
            message_bytes=self._links.bytes_of(size),
            down=down,
            up=up,
            hosts=hosts,
            egress_bytes_per_s=egress,
            activation_bytes=tuple(self._memory.saved_bytes.get(size, [0.0] * self.cells.num_stages)),
            step_s=self.step_s,
            speeds=speeds,
            weight_s=tuple(share * whole for share, whole in zip(shares, backward_s, strict=bool(shares))),
            deferred_bytes=tuple(deferred),
            ahead_s=self._ahead_s(size, backward_s),
            again=self._again(size, forward_s),
            gradient_share=self._links.gradient_share,
            split_factor=self._times.split_factor,
        )

    def _ahead_s(self, size: int, backward_s: Sequence[float]) -> tuple[float, ...]:
        """Seconds of each stage's backward that run before its gradient is there, the mean of its devices."""
        shares = self._times.ahead_shares.get(size, ())
        if not any(shares):
            return ()
        means = [fmean(shares[stage :: self.cells.num_stages]) for stage in range(self.cells.num_stages)]
        return tuple(min(share, 1.0) * whole for share, whole in zip(means, backward_s, strict=True))

    def _again(self, size: int, forward_s: Sequence[float]) -> Again | None:
        """Activations that are computed again, or kept. What was not computed again by itself takes a forward."""
        like = size if size in self._memory.again_bytes else min(self._memory.again_bytes, default=size)
        if not any(self._memory.again_bytes.get(like, ())):
            return None
        sizes = [num_bytes * size / like for num_bytes in self._memory.again_bytes[like]]
        of_cells = self._times.again_parts.get(like, [0.0] * len(self.cells.numbers))
        parts = [
            list(filter(None, of_cells[stage :: self.cells.num_stages])) or [1.0]
            for stage in range(self.cells.num_stages)
        ]
        return Again(
            seconds=tuple(
                fmean(own) * forth if num_bytes else 0.0
                for own, forth, num_bytes in zip(parts, forward_s, sizes, strict=True)
            ),
            num_bytes=tuple(sizes),
            layer_bytes=tuple(whole / layers for whole, layers in zip(sizes, self._memory.again_layers, strict=True)),
            kept=tuple(self._times.kept_shares.get(size, [0.0] * self.cells.num_stages)),
            room_bytes=tuple(self._memory.again_room_bytes),
            is_collective=self._memory.keeps_all_or_nothing,
        )

    def _per_stage(self, size: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds of each stage's forward and backward on a device of speed 1, and the devices' speeds.

        With one direction a stage is on one device, and its seconds are taken as they are.
        """
        if len(self.routes) == 1:
            return tuple(self._times.forward_s[size]), tuple(self._times.backward_s[size]), ()
        both = zip(self._times.forward_s[size], self._times.backward_s[size], strict=True)
        found = separate(
            [
                Seen(cell % self.cells.num_stages, self.cells.device(cell), cell % self.cells.num_stages, *seconds)
                for cell, seconds in enumerate(both)
            ],
            {},
        )
        forward_s, backward_s = zip(*(found.work[stage] for stage in range(self.cells.num_stages)), strict=True)
        return forward_s, backward_s, found.speeds
