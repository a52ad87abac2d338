"""Which layers' experts should lie elsewhere: gains by the loads of a window, against what moving them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from .experts import Placement, device_loads
from .placement import greedy, lower_bound
from .replicas import replicated
from .splitting import split
from .swaps import swapped

LEAST_GAIN = 0.02
"""Experts stay for less than this part of what they take: loads change by as much from window to window."""


@dataclass(frozen=True)
class LayerLoad:
    """The experts of one layer, and what they were asked for.

    Args:
        loads: tokens of each expert in a step, of all devices together.
        expert_bytes: what moves with an expert from one device to another.
        speeds: of the devices, in any unit; None: equal.
        value_bytes: of an expert's values, which a copy is sent in each step, and whose gradients it sends back.
    """

    loads: tuple[float, ...]
    placement: Placement
    expert_bytes: float
    speeds: tuple[float, ...] | None = None
    value_bytes: float = 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of computing and of moving experts.

    Args:
        row_s: of one more token on the device with the most, in one layer and step: computing and travelling, forward
            and backward; where devices differ, on one of mean speed.
        bytes_per_s: at which a device sends or receives experts.
        fixed_s: of moving any expert at all.
        expert_s: of each expert that changes its owner, beside sending it.
        nodes: groups of neighbouring devices, of equal size.
        inside_bytes_per_s: as ``bytes_per_s``, between devices of a node.
        states_come_beside: training waits for values only; all else comes beside the next step, or lasts longer.
    """

    row_s: float
    bytes_per_s: float
    fixed_s: float
    expert_s: float
    nodes: int = 1
    inside_bytes_per_s: float = inf
    states_come_beside: bool = False

    def sending_s(self, sent: Iterable[tuple[int, int]], num_bytes: float, num_devices: int) -> float:
        """Seconds of the device that is busy the longest with what it sends or receives.

        Args:
            sent: from which device to which, once for each time that ``num_bytes`` are.
        """
        per_node = num_devices // self.nodes
        busy: dict[tuple[int, bool], float] = defaultdict(float)
        for source, target in sent:
            is_inside = self.nodes > 1 and source // per_node == target // per_node
            seconds = num_bytes / (self.inside_bytes_per_s if is_inside else self.bytes_per_s)
            busy[source, False] += seconds
            busy[target, True] += seconds
        return max(busy.values(), default=0.0)


@dataclass(frozen=True)
class Proposal:
    """Other placements for some layers.

    Args:
        placements: by position of the layer; empty: none is better.
        now_s: of the experts in a step as they lie, over all layers.
        best_s: of the experts in a step as proposed.
        switch_s: of moving them.
    """

    placements: dict[int, Placement]
    now_s: float
    best_s: float
    switch_s: float


def propose(
    layers: Sequence[LayerLoad],
    times: Times,
    *,
    num_replicas: int = 0,
    evens_out: bool = False,
    horizon_steps: int = 1,
    found: Sequence[Sequence[Placement]] | None = None,
) -> Proposal:
    """The placements that take the least, by the loads as they were.

    A layer takes part if what it gains over the horizon exceeds what it adds to the move; if none does, all that gain
    do: what they would have saved may add up (:class:`~paceline.planning.switching.SwitchRule`).

    Args:
        num_replicas: further slots of a device, for copies.
        evens_out: tokens are shared between copies so as to even out the devices, not equally.
        found: the :func:`candidates` of each layer, if they were looked for elsewhere.
    """
    now = [_layer_s(layer, layer.placement, times, evens_out) for layer in layers]
    now_s = sum(now)  # a step takes longer
    paying: dict[int, tuple[Placement, float]] = {}
    gaining: dict[int, tuple[Placement, float]] = {}
    for number, layer in enumerate(layers):
        best: tuple[float, float, Placement] | None = None
        options = (
            candidates(layer, num_replicas=num_replicas, evens_out=evens_out, nodes=times.nodes)
            if found is None
            else found[number]
        )
        for placement in options:
            seconds = _layer_s(layer, placement, times, evens_out)
            if seconds > now[number] * (1 - LEAST_GAIN):
                continue
            net = (now[number] - seconds) * horizon_steps - _move_s([(layer, placement)], times, now_s)
            if best is None or net > best[0]:
                best = (net, seconds, placement)
        if best is None:
            continue
        gaining[number] = (best[2], best[1])
        if best[0] > 0:
            paying[number] = gaining[number]
    chosen = paying or gaining
    best_s = now_s - sum(now[number] - seconds for number, (_, seconds) in chosen.items())
    placements = {number: placement for number, (placement, _) in chosen.items()}
    move_s = _move_s([(layers[number], placement) for number, placement in placements.items()], times, now_s)
    return Proposal(placements, now_s, best_s, move_s + (times.fixed_s if move_s else 0.0))


def _layer_s(layer: LayerLoad, placement: Placement, times: Times, evens_out: bool) -> float:
    """Seconds of the experts in a step, and of bringing values to copies and their gradients back."""
    copies = ((holders[0], other) for holders in placement.copies for other in holders[1:])
    copying_s = 2 * times.sending_s(copies, layer.value_bytes, placement.num_devices)
    return _most(layer, placement, evens_out) * times.row_s + copying_s


def _move_s(changes: Sequence[tuple[LayerLoad, Placement]], times: Times, step_s: float) -> float:
    """The layers move one after another, each as long as its busiest device; new copies cost nothing beside.

    Args:
        step_s: beside which states come for free.
    """
    paused_s = beside_s = 0.0
    for layer, placement in changes:
        moved = [pair for pair in zip(layer.placement.owners, placement.owners, strict=True) if pair[0] != pair[1]]
        sending_s = times.sending_s(moved, layer.expert_bytes, placement.num_devices)
        if times.states_come_beside and layer.expert_bytes:
            values_s = sending_s * layer.value_bytes / layer.expert_bytes
            beside_s += sending_s - values_s
            sending_s = values_s
        paused_s += len(moved) * times.expert_s + sending_s
    return paused_s + max(0.0, beside_s - step_s)


def _least(layer: LayerLoad, num_replicas: int) -> float:
    """No placement gives the most loaded device less."""
    num_devices = layer.placement.num_devices
    if num_replicas:
        return sum(layer.loads) / num_devices
    return lower_bound(layer.loads, num_devices, speeds=layer.speeds)


def overheads(moves: Sequence[tuple[int, float]], guess: tuple[float, float]) -> tuple[float, float]:
    """Fixed seconds of a move and those of each expert, by least squares over some moves.

    Where they do not tell the two apart, ``guess`` scaled to them.

    Args:
        moves: how many experts changed their owner, and the seconds beside sending them; at least one.
    """
    mean_number = sum(number for number, _ in moves) / len(moves)
    mean_s = sum(seconds for _, seconds in moves) / len(moves)
    spread = sum((number - mean_number) ** 2 for number, _ in moves)
    if spread:
        expert_s = sum((number - mean_number) * (seconds - mean_s) for number, seconds in moves) / spread
        fixed_s = mean_s - expert_s * mean_number
        if expert_s >= 0 and fixed_s >= 0:
            return fixed_s, expert_s
    factor = mean_s / (guess[0] + guess[1] * mean_number)
    return guess[0] * factor, guess[1] * factor


def step_saved_s(busy_s: Sequence[float], saved_s: Sequence[float], stage: int, num_micro_batches: int) -> float:
    """Seconds that a pipeline's step becomes shorter if a stage saves what it can, and all others do likewise.

    The slowest stage sets the pace; the others are waited for once, when the pipeline fills and drains. With M
    micro-batches a step takes ``(M - 1) / M · max b + 1 / M · Σ b``: 1F1B's, with links that take no time.

    Args:
        busy_s: b, seconds that each stage computes in a step.
        saved_s: of them, what each stage would save by moving its experts; 0 if it will not move any.
        stage: the one that is asked about.
    """

    def step_s(saved_s: Sequence[float]) -> float:
        left = [max(busy - saved, 0.0) for busy, saved in zip(busy_s, saved_s, strict=True)]
        return ((num_micro_batches - 1) * max(left) + sum(left)) / num_micro_batches

    without = [0.0 if number == stage else saved for number, saved in enumerate(saved_s)]
    return step_s(without) - step_s(saved_s)


def num_copies(placement: Placement) -> int:
    """Copies of experts, their owners not counted."""
    return sum(map(len, placement.devices)) - placement.num_experts


def _most(layer: LayerLoad, placement: Placement, evens_out: bool) -> float:
    """Load of the most loaded device, in tokens on a device of mean speed."""
    loads, speeds = layer.loads, layer.speeds
    shares = split(placement, loads, speeds=speeds) if evens_out and num_copies(placement) else None
    return max(device_loads(placement, loads, shares, speeds))


class Uneven(NamedTuple):
    """Seconds that something takes longer because experts are not evenly busy.

    Args:
        measured: in the last step.
        expected: from now on; another number where experts have just been placed anew.
    """

    measured: float
    expected: float

    def times(self, factor: float) -> Uneven:
        return Uneven(self.measured * factor, self.expected * factor)


NOT_UNEVEN = Uneven(0.0, 0.0)


def uneven_load(layer: LayerLoad, *, evens_out: bool = False) -> float:
    """Tokens that the most loaded device has above what each would have if all had the same, as it lies."""
    return _most(layer, layer.placement, evens_out) - sum(layer.loads) / layer.placement.num_devices


def candidates(layer: LayerLoad, *, num_replicas: int = 0, evens_out: bool = False, nodes: int = 1) -> list[Placement]:
    """Candidate placements; none if the layer has next to nothing to gain. The slow part of a proposal.

    Args:
        nodes: groups of neighbouring devices, of equal size: there are also candidates in which experts, or copies,
            stay in theirs.
    """
    if _least(layer, num_replicas) > _most(layer, layer.placement, evens_out) * (1 - LEAST_GAIN):
        return []
    current, num_devices, speeds = layer.placement, layer.placement.num_devices, layer.speeds
    num_slots = max(current.owned)
    found: list[Placement] = []
    for among in sorted({1, nodes}):
        if num_replicas:
            shape = (layer.loads, num_devices, num_slots, num_replicas, current)
            found += [replicated(*shape, keep_owners=keep, nodes=among, speeds=speeds) for keep in (True, False)]
        # A few exchanges mostly do as well as a placement from nothing; where they do not, the gain decides.
        found.append(swapped(layer.loads, current, num_slots, nodes=among, speeds=speeds))
        if not num_replicas:
            found.append(greedy(layer.loads, num_devices, num_slots, current, nodes=among, speeds=speeds))
    return found
