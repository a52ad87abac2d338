"""Predicted cost of a pipeline with other boundaries, and the search for the best ones.

Everything is derived from the run's own measurements: the time of each stage with the layers it has, and how much of
that each layer is. So the prediction for the partition that runs is the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, inf
from statistics import median
from typing import NamedTuple

from ..schedules.costs import Again, Costs
from ..schedules.directions import chunks_of
from .blocks import Block, Device, DoesNotFit
from .partition import partition
from .refine import refine
from .shared_devices import Live, loads_s

REFINE_ACTIONS = 100_000
"""Forwards and backwards that a search may simulate: some tenths of a second."""

LARGE = 1 << 18
"""Bytes of a message whose seconds are those of its link."""


class ItemCosts(NamedTuple):
    """One item (layer) of a pipeline, for one micro-batch of the size that was measured.

    Args:
        forward_s, backward_s: on a device of speed 1.
        saved_bytes: kept from its forward to its backward.
        output_bytes: handed on to the next item.
        num_parameters: all that it has.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    num_parameters: float = 0.0

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Layout:
    """The boundaries of a pipeline's items, and the costs of moving them.

    Args:
        items: what each costs.
        parts: boundaries over the items, ``(0, …, L)``, one more than there are stages.
        cuts: where else the items may be cut, rising.
        limit_bytes: of each device, for states and live micro-batches together.
        state_bytes: of each device, for each parameter there.
        moved_bytes: what goes with a parameter that changes its device: value, master, states.
        paused_bytes: those of them that training waits for; None: all. The others move beside steps.
        routes: device of each stage, one route a direction; empty: stage s is on device s.
    """

    items: tuple[ItemCosts, ...]
    parts: tuple[int, ...]
    cuts: tuple[int, ...]
    limit_bytes: tuple[float, ...]
    state_bytes: tuple[float, ...]
    moved_bytes: float = 0.0
    paused_bytes: float | None = None
    routes: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.parts) - 1

    @property
    def num_devices(self) -> int:
        return len(self.limit_bytes)

    @property
    def _routes(self) -> tuple[tuple[int, ...], ...]:
        return self.routes or (tuple(range(self.num_stages)),)

    @property
    def _is_shared(self) -> bool:
        """Whether a device holds several stages."""
        return len(self._routes) * self.num_stages > self.num_devices

    def costs(self, now: Costs, parts: Sequence[int]) -> Costs:
        """Costs of a step with other boundaries, from ``now``, those with :attr:`parts`.

        A stage's forward changes as the forwards of its items on a device of speed 1 do, likewise all else. A stage
        whose items take no time tells nothing of its device, which is then taken to be a typical one.
        """
        saved_bytes = [item.saved_bytes for item in self.items]
        backward_s = self._scaled(now.backward_s, [item.backward_s for item in self.items], parts)
        of_whole = list(zip(now.backward_s, backward_s, strict=True))

        def parts_of(seconds: Sequence[float]) -> tuple[float, ...]:
            pairs = zip(seconds, of_whole, strict=bool(seconds))
            return tuple(part / whole * then if whole else 0.0 for part, (whole, then) in pairs)

        forward_s = self._scaled(now.forward_s, [item.forward_s for item in self.items], parts)
        return replace(
            now,
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=parts_of(now.weight_s),
            ahead_s=parts_of(now.ahead_s),
            again=self._again(now, forward_s, parts),
            activation_bytes=self._scaled(now.activation_bytes, saved_bytes, parts),
            deferred_bytes=self._scaled(now.deferred_bytes, saved_bytes, parts),
            message_bytes=tuple(
                self._message_bytes(measured, before, after)
                for measured, before, after in zip(now.message_bytes, self.parts[1:-1], parts[1:-1], strict=True)
            ),
        )

    def _again(self, now: Costs, forward_s: Sequence[float], parts: Sequence[int]) -> Again | None:
        """Layers that arrive from another stage are computed again as they were there.

        Args:
            forward_s: of the stages with ``parts``.
        """
        again = now.again
        if again is None or tuple(parts) == self.parts:
            return again
        work = [item.forward_s for item in self.items]
        before = zip(again.seconds, _by_stage(work, self.parts), now.forward_s, strict=True)
        at_speed_1 = self._of_layers([own * whole / forth if forth else 0.0 for own, whole, forth in before], parts)
        after = zip(at_speed_1, _by_stage(work, parts), forward_s, strict=True)
        return replace(
            again,
            seconds=tuple(own * forth / whole if whole else 0.0 for own, whole, forth in after),
            num_bytes=self._of_layers(again.num_bytes, parts),
            layer_bytes=tuple(size or max(again.layer_bytes) for size in again.layer_bytes),
        )

    def _of_layers(self, measured: Sequence[float], parts: Sequence[int]) -> tuple[float, ...]:
        """Sums of the stages with other boundaries, where each layer takes along its part, by its forward."""
        layers, each = [0.0, *(item.forward_s for item in self.items[1:-1]), 0.0], list[float]()
        for (start, stop), own in zip(pairwise(self.parts), measured, strict=True):
            whole = fsum(layers[start:stop])
            each += [own * layer / whole if whole else 0.0 for layer in layers[start:stop]]
        return tuple(_by_stage(each, parts))

    def _scaled(self, measured: Sequence[float], of_items: Sequence[float], parts: Sequence[int]) -> tuple[float, ...]:
        if not measured:
            return ()
        before, after = _by_stage(of_items, self.parts), _by_stage(of_items, parts)
        rates = [all_s / own for all_s, own in zip(measured, before, strict=True) if own > 0 and all_s > 0]
        typical = median(rates) if rates else 0.0
        return tuple(
            now * (to / own) if own > 0 and now > 0 else (now if to == own else typical * to)
            for now, own, to in zip(measured, before, after, strict=True)
        )

    def _message_bytes(self, measured: float, before: int, after: int) -> float:
        now, then = self.items[before - 1].output_bytes, self.items[after - 1].output_bytes
        return measured * then / now if now > 0 and then > 0 else measured

    def need_bytes(self, now: Costs, parts: Sequence[int], live: Sequence[Live]) -> tuple[float, ...]:
        """Bytes of states and live micro-batches of each device.

        Args:
            live: micro-batches of each device.
        """
        then = self.costs(now, parts)
        kept = then.activation_bytes or (0.0,) * self.num_stages
        deferred = then.deferred_bytes or kept
        states = _by_stage([item.num_parameters for item in self.items], parts)
        found = []
        for device, (each, own) in enumerate(zip(self.state_bytes, live, strict=True)):
            held = [stage for _, stage in chunks_of(device, self._routes)]
            sizes = [of_stage[stage] for of_stage in (kept, deferred) for stage in held]
            alive = max(fsum(n * size for n, size in zip(some, sizes, strict=False)) for some in own)
            found.append(fsum(states[stage] for stage in held) * each + alive)
        return tuple(found)

    def fits(self, now: Costs, parts: Sequence[int], live: Sequence[Live]) -> bool:
        """Whether :meth:`need_bytes` of every device is within its limit."""
        needed = self.need_bytes(now, parts, live)
        return all(need <= limit for need, limit in zip(needed, self.limit_bytes, strict=True))

    def sent_bytes(self, parts: Sequence[int]) -> tuple[float, ...]:
        """Bytes that each device sends in a migration to these boundaries, one pipeline."""
        sent = [0.0] * self.num_devices
        for (source, _), num_bytes in self._flows(parts).items():
            sent[source] += num_bytes
        return tuple(sent)

    def _flows(self, parts: Sequence[int]) -> dict[tuple[int, int], float]:
        """Bytes by the devices that they leave and come to."""
        flows: dict[tuple[int, int], float] = {}
        for item, costs in enumerate(self.items):
            before, after = stage_of(self.parts, item), stage_of(parts, item)
            there = {route[before] for route in self._routes}
            for route in self._routes:
                if route[after] not in there:
                    way = route[before], route[after]
                    flows[way] = flows.get(way, 0.0) + costs.num_parameters * self.moved_bytes
        return flows

    def migration_s(
        self,
        now: Costs,
        parts: Sequence[int],
        rebuild_s: float,
        earlier_bytes_per_s: float | None = None,
        idle_s: float = 0.0,
    ) -> float:
        """Seconds that moving the items would take from training.

        Args:
            rebuild_s: all that is not sending.
            idle_s: of a step, in which links have nothing to do: what moves beside it costs nothing for so long.
            earlier_bytes_per_s: at which items moved before. Small messages take as long as they do for other reasons
                than the link: then the faster of the two rates counts.
        """
        hosts = now.hosts or tuple(range(self.num_devices))
        leaving: dict[int, float] = {}  # by host
        within: dict[tuple[int, int], float] = {}  # by devices of one host
        for (source, target), num_bytes in self._flows(parts).items():
            if hosts[source] == hosts[target]:
                within[source, target] = num_bytes
            else:
                leaving[hosts[source]] = leaving.get(hosts[source], 0.0) + num_bytes
        tells = max(now.message_bytes, default=0.0) >= LARGE

        def seconds(num_bytes: float, rate: float) -> float:
            if earlier_bytes_per_s is not None and not (tells and rate < inf):
                rate = max(rate if rate < inf else 0.0, earlier_bytes_per_s)
            return num_bytes / rate

        egress = now.egress_bytes_per_s or (inf,) * (max(hosts) + 1)
        links = [link.bytes_per_s for link in (*now.down, *now.up)]
        inside = median([rate for rate in links if rate < inf] or [inf])
        taken = [seconds(num_bytes, egress[host]) for host, num_bytes in leaving.items()]
        taken += [seconds(num_bytes, inside) for num_bytes in within.values()]
        whole_s = max(taken, default=0.0)
        share = 1.0 if self.paused_bytes is None or not self.moved_bytes else self.paused_bytes / self.moved_bytes
        return rebuild_s + share * whole_s + max(0.0, (1 - share) * whole_s - idle_s)

    def best(
        self,
        now: Costs,
        live: Sequence[Live],
        step_s: Callable[[tuple[int, ...]], float],
        num_actions: int,
        known: Sequence[int] | None = None,
        refused: Collection[tuple[int, ...]] = (),
    ) -> tuple[tuple[int, ...], float]:
        """The boundaries with the shortest step that fit in memory, and the seconds of that step.

        The exact split by bottleneck (of devices with several stages: the split whose largest sum is smallest, as far
        as a local search finds it), what runs, and what is ``known``, are taken as starts of a local search with
        ``step_s``: the answer is never worse than one of them.

        Args:
            live: micro-batches of each device, by the schedule that is meant.
            step_s: seconds of a step with given boundaries.
            num_actions: of a step, which tell what one call of ``step_s`` takes.
            known: boundaries that fit and are thought to be good.
            refused: boundaries that could not be, whatever the numbers say.
        """
        edges = (0, *self.cuts, len(self.items))
        starts = [tuple(parts) for parts in (self.parts, known) if parts is not None and set(parts) <= set(edges)]
        if not self._is_shared:
            with suppress(DoesNotFit):  # by sums; what runs is there, whatever it takes
                starts.append(tuple(edges[cut] for cut in self._by_bottleneck(now, edges, live)))
        elif self.parts in starts:
            starts.append(tuple(edges[cut] for cut in self._by_sums(now, edges, live)))
        budget = max(20, REFINE_ACTIONS // max(1, num_actions) // max(1, len(starts)))
        at = {edge: number for number, edge in enumerate(edges)}

        def items(cuts: Sequence[int]) -> tuple[int, ...]:
            return tuple(edges[cut] for cut in cuts)

        reached = [
            refine(
                [at[edge] for edge in start],
                lambda cuts: step_s(items(cuts)),
                fits=lambda cuts: items(cuts) not in refused and self.fits(now, items(cuts), live),
                budget=budget,
            )
            for start in dict.fromkeys(starts)
            if start not in refused
        ]
        if not reached:
            return self.parts, step_s(self.parts)
        cuts, seconds = min(reached, key=lambda one: one[1])
        return items(cuts), seconds

    def _by_bottleneck(self, now: Costs, edges: Sequence[int], live: Sequence[Live]) -> Sequence[int]:
        """Boundaries over ``edges``, one stage a device."""
        peaks = [max(map(sum, own)) for own in live]
        return partition(self._blocks(now, edges), self._devices(now), _links(now), live=peaks).boundaries

    def _by_sums(self, now: Costs, edges: Sequence[int], live: Sequence[Live]) -> Sequence[int]:
        """Boundaries over ``edges`` by the sums of devices that hold several stages; it begins with what runs."""
        blocks, devices = self._blocks(now, edges), self._devices(now)
        return refine(
            [edges.index(part) for part in self.parts],
            lambda cuts: max(loads_s(cuts, blocks, devices, self._routes)),
            fits=lambda cuts: self.fits(now, [edges[cut] for cut in cuts], live),
        )[0]

    def _blocks(self, now: Costs, edges: Sequence[int]) -> list[Block]:
        state = max(self.state_bytes)
        scale = _ratio(now.message_bytes, [self.items[cut - 1].output_bytes for cut in self.parts[1:-1]])
        kept = _ratio(now.activation_bytes, _by_stage([item.saved_bytes for item in self.items], self.parts))
        return [
            Block(
                fsum(item.work_s for item in self.items[start:stop]),
                scale * self.items[stop - 1].output_bytes,
                state * fsum(item.num_parameters for item in self.items[start:stop]),
                kept * fsum(item.saved_bytes for item in self.items[start:stop]),
            )
            for start, stop in pairwise(edges)
        ]

    def _devices(self, now: Costs) -> list[Device]:
        of_stages = _by_stage([item.work_s for item in self.items], self.parts)
        both = [f + b for f, b in zip(now.forward_s, now.backward_s, strict=True)]
        held = [[stage for _, stage in chunks_of(device, self._routes)] for device in range(self.num_devices)]
        work = [fsum(of_stages[stage] for stage in stages) for stages in held]
        faster = now.speeds or (1.0,) * self.num_devices
        seconds = [fsum(both[stage] for stage in stages) / speed for stages, speed in zip(held, faster, strict=True)]
        speeds = [own / taken if own > 0 and taken > 0 else 0.0 for own, taken in zip(work, seconds, strict=True)]
        typical = median([speed for speed in speeds if speed] or [1.0])
        return [Device(s or typical, limit) for s, limit in zip(speeds, self.limit_bytes, strict=True)]


def _links(costs: Costs) -> list[float]:
    """Bytes a second between neighbouring stages, one a device, the slower of both ways."""
    hosts = costs.hosts or tuple(range(len(costs.forward_s)))

    def leaving(stage: int, to: int) -> float:
        alone = not costs.egress_bytes_per_s or hosts[stage] == hosts[to]
        return inf if alone else costs.egress_bytes_per_s[hosts[stage]]

    return [
        min(down.bytes_per_s, up.bytes_per_s, leaving(stage, stage + 1), leaving(stage + 1, stage))
        for stage, (down, up) in enumerate(zip(costs.down, costs.up, strict=True))
    ]


def _by_stage(of_items: Sequence[float], parts: Sequence[int]) -> list[float]:
    return [fsum(of_items[start:stop]) for start, stop in pairwise(parts)]


def stage_of(parts: Sequence[int], item: int) -> int:
    """The stage that holds ``item`` under the boundaries ``parts``."""
    return next(stage for stage, stop in enumerate(parts[1:]) if item < stop)


def _ratio(measured: Sequence[float], expected: Sequence[float]) -> float:
    found = [a / b for a, b in zip(measured, expected, strict=True) if b > 0] if measured else []
    return median(found) if found else 1.0


def item_costs(
    work: Mapping[int, tuple[float, float]], others: Mapping[int, tuple[float, float, float]], num_items: int
) -> tuple[ItemCosts, ...]:
    """All items of a pipeline in order; one that was not seen costs nothing.

    Args:
        work: item -> forward and backward seconds on a device of speed 1.
        others: item -> saved bytes, output bytes, parameters.
    """
    return tuple(
        ItemCosts(*work.get(item, (0.0, 0.0)), *others.get(item, (0.0, 0.0, 0.0))) for item in range(num_items)
    )
