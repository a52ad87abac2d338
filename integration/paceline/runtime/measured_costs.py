"""Costs of a run's steps, from the reports that its ranks make at each tuning interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum, inf
from statistics import fmean, median

from ..measure.links import Links, Message
from ..measure.recorder import Recorded, StepTimes
from ..measure.recurring import recurring_mean, without_once
from ..measure.speeds import Speeds
from ..measure.work import Seen as SeenItem
from ..measure.work import Separated, separate
from ..planning.rebalance import NOT_UNEVEN, Uneven
from ..planning.repartition import ItemCosts, Layout, item_costs
from ..schedules.costs import Again, Costs, Link
from ..schedules.directions import chunks_of
from ..schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from .rank_reports import WAIT, LaneKey, LayerReport, Report, Routes, Seen, is_ring, messages
from .step_spans import OF_SCHEDULE, step_spans

MOST_TIMED = 4096
"""Times of layers that are kept, the newest."""

MOST_SPLIT = 2.0
"""How many times as long as a whole backward a split one is believed to take, at most."""

LEAST_PART = 0.1
"""Smallest share of a layer's time that it would take with evenly busy experts: less is an error of measurement."""


@dataclass
class MeasuredCosts:
    """Costs of a run's steps as measured so far, on the rank that decides; each tuning interval adds to them.

    A *cell* is one stage of one direction, on the device that holds it; they are numbered as those of a
    :class:`~paceline.schedules.schedule.Schedule`.

    Args:
        routes: device of each stage, one route a direction.
        has_flush: steps do not run into each other.
        of_first_replica: times are those of the first replica, whose share of a step is its own; otherwise, where
            replicas differ, the slowest counts.
    """

    routes: Routes
    has_flush: bool = True
    of_first_replica: bool = False
    forward_s: dict[int, list[float]] = field(default_factory=dict)
    """By micro-batch size, one number a cell."""
    backward_s: dict[int, list[float]] = field(default_factory=dict)
    weight_shares: dict[int, list[float]] = field(default_factory=dict)
    """Share of a backward that is the gradients of weights, by micro-batch size, one number a cell, where backwards
    were split."""
    ahead_shares: dict[int, list[float]] = field(default_factory=dict)
    """Share of a backward that ran before its gradient was there, by micro-batch size, one number a cell."""
    again_parts: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of what one micro-batch computed again, as a part of its forward, by micro-batch size, one number a cell;
    0 where that was never measured by itself."""
    again_bytes: dict[int, list[float]] = field(default_factory=dict)
    """Bytes that a micro-batch keeps more where nothing is computed again, by size, one number a stage."""
    again_layers: list[int] = field(default_factory=list)
    """Layers of each stage that this is of, at least 1."""
    kept_shares: dict[int, list[float]] = field(default_factory=dict)
    """Share of it that was kept in the steps whose backwards were measured, by size, one number a stage."""
    keeps_all_or_nothing: bool = False
    again_room_bytes: list[float] = field(default_factory=list)
    """Bytes that what is alive may take on each device."""
    split_factor: float = 1.0
    """How many times as long as a whole backward the two parts of a split one take."""
    message_bytes: dict[int, list[float]] = field(default_factory=dict)
    """By micro-batch size, one number a boundary between stages."""
    gradient_share: float = 1.0
    """Bytes of a gradient's message, as a part of its activation's."""
    saved_bytes: dict[int, list[float]] = field(default_factory=dict)
    """By micro-batch size, one number a stage."""
    deferred_bytes: dict[int, list[float]] = field(default_factory=dict)
    """The same from the backward of the inputs to that of the weights, where backwards were split."""
    room_bytes: list[float] = field(default_factory=list)
    """Bytes that activations may take, one number a device."""
    step_s: float = 0.0
    """Seconds of a step besides its schedule."""
    measured_s: float = 0.0
    """A step, as it was in the last tuning interval."""
    parts: tuple[int, ...] = ()
    """Boundaries over the items, if a partition is chosen."""
    items: tuple[ItemCosts, ...] = ()
    """Costs of each item, once layers were timed, with what its experts take longer because they are unevenly busy."""
    guessed: tuple[int, ...] = ()
    """Devices that could be compared with the others by sizes only."""
    state_bytes: list[float] = field(default_factory=list)
    """Bytes for each parameter, one number a device."""
    moved_bytes: float = 0.0
    """Bytes that go with a parameter to another device."""
    paused_bytes: float = 0.0
    """Those that training waits for."""
    _by_forward: dict[int, list[float]] = field(default_factory=dict)
    """Whole backwards by their forwards, by micro-batch size, one number a cell."""
    _split_by_forward: dict[int, list[float]] = field(default_factory=dict)
    """Likewise of both parts of split ones."""
    _slowness: Speeds | None = None
    """Seconds of each cell for its work, followed over the intervals."""
    _timed: list[tuple[int, int, LayerReport]] = field(default_factory=list)
    """Device, item and times of every layer that was timed, as if its experts had been evenly busy."""
    _even: tuple[ItemCosts, ...] = ()
    """:attr:`items`, if all experts were evenly busy."""
    _uneven_s: dict[int, Uneven] = field(default_factory=dict)
    """Seconds of a sample by item; once layers were timed, on a device of speed 1."""
    _measured_items: tuple[ItemCosts, ...] = ()
    """:attr:`items`, as experts were busy in the last step."""
    _item_speeds: tuple[float, ...] = ()
    """Speed of each device when layers were timed."""
    _item_size: int = 1
    """Samples of a micro-batch when layers were timed."""
    _links: dict[int, Links] = field(default_factory=dict)
    _latency_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Between two devices, both ways."""
    _after: dict[tuple[int, LaneKey], int] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Stages of one direction."""
        return len(self.routes[0])

    @property
    def num_devices(self) -> int:
        return max(self.routes[0]) + 1

    @property
    def _cells(self) -> range:
        return range(len(self.routes) * self.num_stages)

    def _device(self, cell: int) -> int:
        direction, stage = divmod(cell, self.num_stages)
        return self.routes[direction][stage]

    def _held(self, device: int) -> list[int]:
        """Cells of a device, by chunk."""
        return [direction * self.num_stages + stage for direction, stage in chunks_of(device, self.routes)]

    def update(self, reports: Sequence[Report]) -> None:
        """Take in a report of every rank. Memory must suffice on all of them."""
        everywhere = reports
        if self.of_first_replica:
            reports = [report for report in reports if report.replica == 0]
        replicas: dict[int, list[Report]] = {}
        for report in sorted(reports, key=lambda report: report.device):
            replicas.setdefault(report.replica, []).append(report)
        before = [{size: list(each) for size, each in known.items()} for known in (self.forward_s, self.backward_s)]
        kept = dict(self.kept_shares)
        measured = self._compute(reports)
        self._keep_alike(before, kept)
        self._learn_items(reports)
        self._take_uneven(reports)
        self._smooth(replicas)
        self._scale_others(before, measured)
        by_device = [[r for r in everywhere if r.device == device] for device in range(self.num_devices)]
        self.state_bytes = [max(r.state_bytes for r in own) for own in by_device]
        self.moved_bytes = max(r.moved_bytes for r in everywhere)
        self.paused_bytes = max(r.paused_bytes for r in everywhere)
        self.room_bytes = [min(r.room_bytes for r in own) for own in by_device]
        self._take_memory(everywhere)
        self._latency_s = {}
        for replica, pipe in replicas.items():
            self._take_links(replica, pipe)
        if self.has_flush:
            self._step(replicas)
        else:
            self._window(reports)

    def _take_memory(self, reports: Sequence[Report]) -> None:
        self._take_bytes(self.saved_bytes, [(report.device, report.saved_bytes) for report in reports])
        self._take_bytes(self.deferred_bytes, [(report.device, report.deferred_bytes) for report in reports])
        self._take_bytes(self.again_bytes, [(report.device, report.again_bytes) for report in reports])
        self.again_layers = [1] * self.num_stages
        self.keeps_all_or_nothing = any(report.keeps_all_or_nothing for report in reports)
        rooms = [inf] * self.num_devices
        for report in reports:
            for chunk, layers in report.again_layers.items():
                self.again_layers[self._held(report.device)[chunk] % self.num_stages] = layers
            rooms[report.device] = min(rooms[report.device], report.again_room_bytes)
        self.again_room_bytes = rooms

    def _take_bytes(
        self, known: dict[int, list[float]], found: Sequence[tuple[int, dict[int, dict[int, float]]]]
    ) -> None:
        for size in {size for _, sizes in found for size in sizes}:
            per_stage = known[size] = [0.0] * self.num_stages
            for device, sizes in found:
                for chunk, num_bytes in sizes.get(size, {}).items():
                    stage = self._held(device)[chunk] % self.num_stages
                    per_stage[stage] = max(per_stage[stage], num_bytes)

    def _compute(self, reports: Sequence[Report]) -> set[int]:
        """Take in the times of the stages; the micro-batch sizes that they are of."""
        measured: set[int] = set()
        forwards, backwards = self._means(reports, FORWARD), self._means(reports, BACKWARD)
        ahead = self._ahead(reports)
        for size, cells in backwards.items():
            is_first = not any(self._by_forward.get(size, ()))
            self._by_forward[size] = _ratios(_less(cells, ahead.get(size)), forwards.get(size, ()))
            if is_first:  # they may have been split from the start
                self._take_split_factor(size)
        weights = self._means(reports, BACKWARD_WEIGHT)
        for size, inputs in self._means(reports, BACKWARD_INPUT).items():
            pairs = list(zip(inputs, weights.get(size, inputs), strict=True))
            split = [sum(pair) for pair in pairs]
            # By the forward of the same steps: the device may have been another one when backwards were whole.
            self._split_by_forward[size] = _ratios(_less(split, ahead.get(size)), forwards.get(size, ()))
            self._take_split_factor(size)
            backwards[size] = [seconds / self.split_factor for seconds in split]
            self.weight_shares[size] = [own / sum(pair) if (own := pair[1]) else 0.0 for pair in pairs]
        for size, cells in backwards.items():
            self.ahead_shares[size] = _ratios(ahead.get(size, [0.0] * len(cells)), cells)
        for size, cells in self._means(reports, RECOMPUTE).items():
            parts, before = _ratios(cells, forwards.get(size, ())), self.again_parts.get(size, [0.0] * len(cells))
            self.again_parts[size] = [now or then for now, then in zip(parts or before, before, strict=True)]
        for found, known in ((forwards, self.forward_s), (backwards, self.backward_s)):
            for size, cells in found.items():
                before = known.get(size, cells)
                known[size] = [now or then for now, then in zip(cells, before, strict=True)]
            measured |= found.keys()
        self.kept_shares.update((size, self._kept(reports, size)) for size in backwards)
        return measured

    def _kept(self, reports: Sequence[Report], size: int) -> list[float]:
        """Share of the activations that steps kept, the mean of those with a micro-batch size, one number a stage."""
        shares: list[list[float]] = [[] for _ in range(self.num_stages)]
        for report in reports:
            for chunk, cell in enumerate(self._held(report.device)):
                steps = (step for step in report.steps if step.key[1] == size)
                shares[cell % self.num_stages] += [step.kept_shares.get(chunk, 0.0) for step in steps]
        return [fmean(own or [0.0]) for own in shares]

    def _ahead(self, reports: Sequence[Report]) -> dict[int, list[float]]:
        """Seconds of a mean backward that ran before its gradient was there, by micro-batch size, one number a cell."""
        found = self._means(reports, RECOMPUTE)
        for size, cells in found.items():
            counts = {kind: [0] * len(cells) for kind in (RECOMPUTE, BACKWARD, BACKWARD_INPUT)}
            for report in reports:
                for step in report.steps:
                    for kind, of_cells in counts.items() if step.key[1] == size else ():
                        for chunk, cell in enumerate(self._held(report.device)):
                            of_cells[cell] += len(step.durations(kind, chunk))
            again, whole, split = counts.values()
            found[size] = [
                seconds * early / (one + other) if early else 0.0
                for seconds, early, one, other in zip(cells, again, whole, split, strict=True)
            ]
        return found

    def _take_split_factor(self, size: int) -> None:
        """Compare split backwards with whole ones, if both were measured."""
        both = _ratios(self._split_by_forward.get(size, ()), self._by_forward.get(size, ()))
        if factors := [factor for factor in both if factor]:
            self.split_factor = min(max(median(factors), 1.0), MOST_SPLIT)

    def _means(self, reports: Sequence[Report], kind: str) -> dict[int, list[float]]:
        """Seconds of computations of a kind, by micro-batch size, one number a cell; 0 where there were none."""
        found: dict[int, list[float]] = {}
        for report in reports:
            for chunk, cell in enumerate(self._held(report.device)):
                by_size: dict[int, list[StepTimes]] = {}
                for step in report.steps:
                    if step.mean(kind, chunk) is not None:
                        by_size.setdefault(step.key[1], []).append(step)
                for size, steps in by_size.items():
                    cells = found.setdefault(size, [0.0] * len(self._cells))
                    cells[cell] = max(cells[cell], _seconds(steps, kind, chunk))
        return found

    def _scale_others(self, before: Sequence[dict[int, list[float]]], measured: set[int]) -> None:
        """A device that has become slower is slower at every size; those not measured now were measured before.

        By what is known now, not by what was seen: noise that is smoothed away must not add up here.
        """
        for known, then in zip((self.forward_s, self.backward_s), before, strict=True):
            factors = [
                [now / was if now and was else 1.0 for now, was in zip(known[size], then[size], strict=True)]
                for size in measured & known.keys() & then.keys()
            ]
            slower = [median(of_stage) for of_stage in zip(*factors, strict=True)]
            for other in known.keys() - measured if slower else ():
                known[other] = [seconds * factor for seconds, factor in zip(known[other], slower, strict=True)]

    def _keep_alike(self, before: Sequence[dict[int, list[float]]], kept: dict[int, list[float]]) -> None:
        """Backwards of before as if they had kept what is kept now, which tells nothing of the device."""
        _, backward_s = before
        for size in backward_s.keys() & kept.keys():
            again = self._again(size, self._per_stage(size)[0])
            if again is not None:
                less = [(then - now) * s for then, now, s in zip(kept[size], again.kept, again.seconds, strict=True)]
                directions = len(self._cells) // self.num_stages
                backward_s[size] = [sum(each) for each in zip(backward_s[size], less * directions, strict=True)]

    def _learn_items(self, reports: Sequence[Report]) -> None:
        """Cost of each item, from the step in which the layers were timed."""
        timed = [(r.device, item, layer) for r in reports for item, layer in r.layers.items()]
        if not timed or not self.parts:
            return
        # Whether experts are evenly busy tells nothing of a device: it goes with the layer.
        uneven_s = {item: s for r in reports for item, s in (r.uneven_s or {}).items()}
        timed = [(device, item, _evenly(layer, uneven_s.get(item, NOT_UNEVEN))) for device, item, layer in timed]
        # A layer that was timed on two devices tells how they compare.
        size = timed[0][2].size
        self._timed = [*(entry for entry in self._timed if entry[2].size == size), *timed][-MOST_TIMED:]
        found = _separated(self._timed)
        others = {
            item: (layer.times.saved_bytes, layer.times.output_bytes, float(layer.num_parameters))
            for _, item, layer in self._timed
        }
        self.items = self._measured_items = self._even = item_costs(found.work, others, self.parts[-1])
        self.guessed = found.guessed
        unseen = self.num_devices - len(found.speeds)  # the last ones, whose items are functions, which nobody times
        self._item_speeds, self._item_size = (*found.speeds, *[median(found.speeds)] * unseen), size
        self._slowness = Speeds(len(self._cells))

    def _take_uneven(self, reports: Sequence[Report]) -> None:
        """Add to each layer the time that its unevenly busy experts take: it changes with the load, and moves along."""
        for report in reports:
            speed = self._item_speeds[report.device] if self._item_speeds else 1.0
            self._uneven_s |= {item: seconds.times(speed) for item, seconds in (report.uneven_s or {}).items()}
        if self._even and self._uneven_s:
            uneven = [self._uneven_s.get(n, NOT_UNEVEN).times(self._item_size) for n in range(len(self._even))]
            pairs = list(zip(self._even, uneven, strict=True))
            self._measured_items = tuple(_longer(item, seconds.measured) for item, seconds in pairs)
            self.items = tuple(_longer(item, seconds.expected) for item, seconds in pairs)

    def _smooth(self, replicas: dict[int, list[Report]]) -> None:
        """Follow each cell's seconds for its work over the intervals: steady under noise, at once when they change."""
        if self._slowness is None:
            return
        work, expected = (
            [sum(item.work_s for item in items[a:b]) for a, b in pairwise(self.parts)]
            for items in (self._measured_items, self.items)
        )
        sizes = [step.key[1] for pipe in replicas.values() for step in pipe[0].steps]
        if not sizes:
            return
        size = sizes[-1]
        per_cell: list[list[float]] = []
        for cell in self._cells:
            device, own = self._device(cell), work[cell % self.num_stages]
            chunk = self._held(device).index(cell)
            factor = self.split_factor
            per_replica = [_whole_times(pipe[device].steps, size, chunk, factor) for pipe in replicas.values()]
            slowest = [max(of_step) for of_step in zip(*per_replica, strict=False)]
            per_cell.append([seconds / own for seconds in slowest] if own > 0 else [])
        self._slowness.update(per_cell)
        for cell, each in enumerate(self._slowness.values):
            now = self.forward_s[size][cell] + self.backward_s[size][cell]
            if per_cell[cell] and now > 0:
                factor = expected[cell % self.num_stages] * each / now
                self.forward_s[size][cell] *= factor
                self.backward_s[size][cell] *= factor

    def layout(self, cuts: Sequence[int], memory_bytes: int | None) -> Layout:
        """Describe the partition that runs, for a search of another one.

        Args:
            cuts: where the items may be cut.
            memory_bytes: of each device; None: what its stages have, and what is free.
        """
        of_stages = [sum(item.num_parameters for item in self.items[a:b]) for a, b in pairwise(self.parts)]
        held = [chunks_of(device, self.routes) for device in range(self.num_devices)]
        parameters = [sum(of_stages[stage] for _, stage in own) for own in held]
        limits = [
            float(memory_bytes) if memory_bytes is not None else room + each * count
            for room, each, count in zip(self.room_bytes, self.state_bytes, parameters, strict=True)
        ]
        return Layout(
            *(self.items, self.parts, tuple(cuts), tuple(limits), tuple(self.state_bytes)),
            moved_bytes=self.moved_bytes,
            paused_bytes=self.paused_bytes,
            routes=tuple(tuple(route) for route in self.routes),
        )

    def has_moved(self, parts: Sequence[int]) -> None:
        """Layers lie otherwise from now on; until it is measured, what was predicted counts."""
        if not self.items:
            of_size = (self.forward_s, self.backward_s, self.message_bytes, self.saved_bytes, self.deferred_bytes)
            for known in (*of_size, self.again_bytes):
                known.clear()
        for size in self.sizes():
            layout, now, stages = self.layout((), None), self.costs(size), self.num_stages
            ways = [
                layout.costs(
                    replace(
                        now,
                        forward_s=tuple(self.forward_s[size][first : first + stages]),
                        backward_s=tuple(self.backward_s[size][first : first + stages]),
                    ),
                    parts,
                )
                for first in self._cells[::stages]
            ]
            self.forward_s[size] = [seconds for way in ways for seconds in way.forward_s]
            self.backward_s[size] = [seconds for way in ways for seconds in way.backward_s]
            costs = ways[0]
            if size in self.message_bytes:
                self.message_bytes[size] = list(costs.message_bytes)
            if size in self.saved_bytes:
                self.saved_bytes[size] = list(costs.activation_bytes)
            if size in self.deferred_bytes:
                self.deferred_bytes[size] = list(costs.deferred_bytes)
            if size in self.again_bytes and costs.again is not None:
                self.again_bytes[size] = list(costs.again.num_bytes)
        self.parts = tuple(parts)

    def _take_links(self, replica: int, pipe: list[Report]) -> None:
        names = [report.host for report in pipe]
        links = self._links.setdefault(replica, Links([names.index(name) for name in names]))
        seen = messages(pipe, self.routes, self._after)
        latency = {}
        for device, report in enumerate(pipe if is_ring(self.routes) else pipe[:-1]):
            there = (device + 1) % self.num_devices
            latency[device, there] = latency[there, device] = report.latency_s
        for edge, seconds in latency.items():
            self._latency_s[edge] = max(self._latency_s.get(edge, 0.0), seconds)
        links.update(
            (Message(s.source, s.target, s.record.num_bytes, s.record.begun_s, s.record.done_s, s.lane) for s in seen),
            latency,
        )
        self._take_sizes(pipe[0].steps, seen)

    def _take_sizes(self, steps: Sequence[StepTimes], seen: Sequence[Seen]) -> None:
        """Take in the sizes of training's messages; an evaluation's micro-batches may be of another size."""
        found: dict[str, dict[tuple[int, int], list[int]]] = {"activation": {}, "gradient": {}}
        for one in seen:
            step = next((step for step in steps if step.begun_s <= one.record.done_s <= step.ended_s), None)
            if step is not None:
                boundary = one.lane.stage if one.kind == "activation" else one.lane.stage - 1
                found[one.kind].setdefault((step.key[1], boundary), []).append(one.record.num_bytes)
        shares = []
        for (size, boundary), sizes in found["activation"].items():
            self.message_bytes.setdefault(size, [0.0] * (self.num_stages - 1))[boundary] = typical = median(sizes)
            if typical and (size, boundary) in found["gradient"]:
                shares.append(median(found["gradient"][size, boundary]) / typical)
        if shares:
            self.gradient_share = median(shares)

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
                beside.append(min(map(_beside, steps)))
                whole.append(max(step.ended_s - step.begun_s for step in steps))
        if beside:
            self.step_s, self.measured_s = recurring_mean(beside), recurring_mean(whole)

    def forget_links(self) -> None:
        """Let the next look at the links count alone."""
        for links in self._links.values():
            links.forget()

    def sizes(self) -> list[int]:
        """Micro-batch sizes whose steps were measured."""
        return sorted(size for size in self.forward_s if size in self.backward_s)

    def costs(self, size: int) -> Costs:
        """Costs of one micro-batch of ``size`` samples, which was measured."""
        hosts = next(iter(self._links.values())).hosts if self._links else [0] * self.num_devices
        down, up, egress = [], [], {}
        for boundary in range(self.num_stages - 1):
            ways = [(route[boundary], route[boundary + 1]) for route in self.routes]
            latency = max(self._latency_s.get(way, 0.0) for way in ways)
            down.append(Link(min(self._edge(a, b) for a, b in ways), latency, self._variation(ways)))
            up.append(Link(min(self._edge(b, a) for a, b in ways), latency, self._variation([w[::-1] for w in ways])))
        for host in set(hosts):
            egress[host] = min(_rate(links.egress.get(host)) for links in self._links.values())
        forward_s, backward_s, speeds = self._per_stage(size)
        # Other sizes tell what one that has not run split is like.
        like = size if size in self.weight_shares else min(self.weight_shares, default=size)
        shares = self.weight_shares.get(like, ()) if len(self.routes) == 1 else ()
        deferred = [num_bytes * size / like for num_bytes in self.deferred_bytes.get(like, ())]
        return Costs(
            forward_s=forward_s,
            backward_s=backward_s,
            message_bytes=self._message_bytes(size),
            down=tuple(down),
            up=tuple(up),
            hosts=tuple(hosts),
            egress_bytes_per_s=tuple(egress.get(host, inf) for host in range(max(hosts) + 1)),
            activation_bytes=tuple(self.saved_bytes.get(size, [0.0] * self.num_stages)),
            step_s=self.step_s,
            speeds=speeds,
            weight_s=tuple(share * whole for share, whole in zip(shares, backward_s, strict=bool(shares))),
            deferred_bytes=tuple(deferred),
            ahead_s=self._ahead_s(size, backward_s),
            again=self._again(size, forward_s),
            gradient_share=self.gradient_share,
            split_factor=self.split_factor,
        )

    def _ahead_s(self, size: int, backward_s: Sequence[float]) -> tuple[float, ...]:
        """Seconds of each stage's backward that run before its gradient is there, the mean of its devices."""
        shares = self.ahead_shares.get(size, ())
        if not any(shares):
            return ()
        means = [fmean(shares[stage :: self.num_stages]) for stage in range(self.num_stages)]
        return tuple(min(share, 1.0) * whole for share, whole in zip(means, backward_s, strict=True))

    def _again(self, size: int, forward_s: Sequence[float]) -> Again | None:
        """Activations that are computed again, or kept. What was not computed again by itself takes a forward."""
        like = size if size in self.again_bytes else min(self.again_bytes, default=size)
        if not any(self.again_bytes.get(like, ())):
            return None
        sizes = [num_bytes * size / like for num_bytes in self.again_bytes[like]]
        of_cells = self.again_parts.get(like, [0.0] * len(self._cells))
        parts = [list(filter(None, of_cells[stage :: self.num_stages])) or [1.0] for stage in range(self.num_stages)]
        return Again(
            seconds=tuple(
                fmean(own) * forth if num_bytes else 0.0
                for own, forth, num_bytes in zip(parts, forward_s, sizes, strict=True)
            ),
            num_bytes=tuple(sizes),
            layer_bytes=tuple(whole / layers for whole, layers in zip(sizes, self.again_layers, strict=True)),
            kept=tuple(self.kept_shares.get(size, [0.0] * self.num_stages)),
            room_bytes=tuple(self.again_room_bytes),
            is_collective=self.keeps_all_or_nothing,
        )

    def _per_stage(self, size: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds of each stage's forward and backward on a device of speed 1, and the devices' speeds.

        With one direction a stage is on one device, and its seconds are taken as they are.
        """
        if len(self.routes) == 1:
            return tuple(self.forward_s[size]), tuple(self.backward_s[size]), ()
        both = zip(self.forward_s[size], self.backward_s[size], strict=True)
        found = separate(
            [
                SeenItem(cell % self.num_stages, self._device(cell), cell % self.num_stages, *seconds)
                for cell, seconds in enumerate(both)
            ],
            {},
        )
        forward_s, backward_s = zip(*(found.work[stage] for stage in range(self.num_stages)), strict=True)
        return forward_s, backward_s, found.speeds

    def _edge(self, source: int, target: int) -> float:
        return min((_rate(links.edges.get((source, target))) for links in self._links.values()), default=inf)

    def _variation(self, ways: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Multiples of the replica and direction in which messages vary most."""
        found = [links.variation.get(way, ()) for links in self._links.values() for way in ways]
        return max(found, key=lambda multiples: max(multiples, default=0.0), default=())

    def _message_bytes(self, size: int) -> tuple[float, ...]:
        if size in self.message_bytes:
            return tuple(self.message_bytes[size])
        known = next(iter(self.message_bytes), None)
        if known is None:
            return (0.0,) * (self.num_stages - 1)
        return tuple(num_bytes * size / known for num_bytes in self.message_bytes[known])


def _evenly(layer: LayerReport, uneven_s: Uneven) -> LayerReport:
    """A layer that was timed, if its experts had been evenly busy.

    Args:
        uneven_s: of a sample.
    """
    times = layer.times
    whole = times.forward_s + times.backward_s
    part = max(1 - uneven_s.measured * layer.size / whole, LEAST_PART) if whole else 1.0
    even = times._replace(forward_s=times.forward_s * part, backward_s=times.backward_s * part)
    return layer._replace(times=even)


def _longer(item: ItemCosts, seconds: float) -> ItemCosts:
    part = 1 + seconds / item.work_s if item.work_s else 1.0
    return item._replace(forward_s=item.forward_s * part, backward_s=item.backward_s * part)


def _separated(timed: Sequence[tuple[int, int, LayerReport]]) -> Separated:
    """Work of the items and speed of the stages, by what certainly is alike, or if that tells too little, probably."""

    def by(which: int) -> Separated:
        seen = [
            SeenItem(item, stage, layer.kinds[which], layer.times.forward_s, layer.times.backward_s)
            for stage, item, layer in timed
        ]
        # The first item is left out: an embedding takes less time than its weights would tell.
        return separate(seen, {layer.kinds[which]: float(layer.num_parameters) for _, item, layer in timed if item})

    certain = by(0)
    if not certain.guessed:
        return certain
    probable = by(1)
    own: dict[int, list[tuple[float, float]]] = {}  # of each replica
    for stage, item, layer in timed:
        speed = probable.speeds[stage]
        own.setdefault(item, []).append((layer.times.forward_s * speed, layer.times.backward_s * speed))
    work = {item: (median(f for f, _ in each), median(b for _, b in each)) for item, each in own.items()}
    return Separated(work, probable.speeds, probable.guessed)


def _seconds(steps: Sequence[StepTimes], kind: str, chunk: int) -> float:
    """Seconds of a forward or backward and of the host beside it: the mean of what repeats from step to step."""
    usual = without_once(steps, lambda step: step.mean(kind, chunk) or 0.0)
    own = recurring_mean(seconds for step in usual for seconds in step.durations(kind, chunk))
    # What ran before a backward's gradient was there is a computation of its own.
    parts = 2 if kind in (BACKWARD, BACKWARD_INPUT) and usual[-1].durations(RECOMPUTE, chunk) else 1
    return own + parts * fmean(map(_overhead, usual))


def _ratios(values: Sequence[float], by: Sequence[float]) -> list[float]:
    """``values`` by others; 0 where one of both was not measured. Empty: none of one kind were."""
    return [value / other if other else 0.0 for value, other in zip(values, by, strict=bool(values and by))]


def _less(values: Sequence[float], others: Sequence[float] | None) -> list[float]:
    return [max(value - other, 0.0) for value, other in zip(values, others or [0.0] * len(values), strict=True)]


def _whole_times(steps: Sequence[StepTimes], size: int, chunk: int, split_factor: float) -> list[float]:
    """Seconds of a forward, a backward and what comes between, for each step with micro-batches of a size.

    Args:
        split_factor: how many times as long as a whole backward a split one takes.
    """
    found = []
    for step in steps:
        for kinds in ((FORWARD, BACKWARD), (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)):
            seconds = [mean for kind in kinds if (mean := step.mean(kind, chunk)) is not None]
            if step.key[1] == size and len(seconds) == len(kinds):
                factor = split_factor if len(kinds) > 2 else 1.0
                found.append(seconds[0] + fsum(seconds[1:]) / factor + len(kinds) * _overhead(step))
                break
    return found


def _rate(seconds_per_byte: float | None) -> float:
    return inf if not seconds_per_byte else 1 / seconds_per_byte


def _overhead(step: StepTimes) -> float:
    """Seconds of the host beside each computation: time between them in which nothing was waited for."""
    spans, begun_s, ended_s = _schedule_of(step)
    busy = sum(span.end - span.start for span in spans) + _updates_s(step, begun_s, ended_s)
    count = sum(span.kind != WAIT for span in spans)
    return float(max(ended_s - begun_s - busy, 0.0)) / count


def _schedule_of(step: StepTimes) -> tuple[list[Recorded[float]], float, float]:
    """Computations and waits of a step, when the first of them began and the last one ended."""
    spans = [span for span in step.spans if span.kind in OF_SCHEDULE]
    return spans, min(span.start for span in spans), max(span.end for span in spans)


def _updates_s(step: StepTimes, begun_s: float, ended_s: float) -> float:
    """Seconds of updates between two moments: without a flush they are made among the computations."""
    own = (span for span in step.spans if span.kind not in OF_SCHEDULE)
    return fsum(span.end - span.start for span in own if begun_s <= span.start and span.end <= ended_s)


def _beside(step: StepTimes) -> float:
    """Seconds of a rank's step beside its computations, its waits, and the host's work between them."""
    _, begun_s, ended_s = _schedule_of(step)
    whole = step.ended_s - step.begun_s
    return float(max(whole - (ended_s - begun_s) + _updates_s(step, begun_s, ended_s), 0.0))
