"""Costs of schedules whose stages keep as many activations as have room, and compute the others again.

A rank decides that before a step (:mod:`paceline.schedules.keeping`). Here the same is done for any order; of one with
many actions it is counted: of the micro-batches that may be alive at a time, so large a share has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from ..schedules.costs import Costs
from ..schedules.keeping import Layers, keeping, kept_shares
from ..schedules.schedule import Action, Schedule
from ..schedules.simulate import peak_bytes
from ..schedules.stream import Stream

EXACT_UP_TO = 512
"""Forwards and backwards of an order whose micro-batches are looked at one by one."""


class Kept(NamedTuple):
    """Activations of a stage on one rank.

    Args:
        share: of them that is kept.
        is_early: the others are computed again before their gradient is there.
    """

    share: float
    is_early: bool


def as_kept(costs: Costs, order: Schedule | Stream) -> Costs:
    """Costs of an order's steps, with what its ranks have room to keep. Without a flush nothing is."""
    if costs.again is None:
        return costs
    stages = len(costs.forward_s)
    if isinstance(order, Stream):
        return _costs(costs, [[Kept(0.0, False)]] * stages, [False] * stages)
    found: list[list[Kept]] = [[] for _ in range(stages)]
    waits = [False] * stages
    peaks = peak_bytes(order, replace(costs, fixed_bytes=()))
    for rank, (cells, own) in enumerate(zip(order.cells, order.stages, strict=True)):
        elsewhere = [stage < stages - 1 and cell + 1 not in cells for cell, stage in zip(cells, own, strict=True)]
        for stage, kept, is_elsewhere in zip(
            own, _of_rank(costs, order, rank, peaks[rank], elsewhere), elsewhere, strict=True
        ):
            found[stage].append(kept)
            waits[stage] |= is_elsewhere
    return _costs(costs, found, waits)


def _of_rank(costs: Costs, order: Schedule, rank: int, peak: float, waits: Sequence[bool]) -> list[Kept]:
    """Activations that a rank keeps, of each of its chunks."""
    again, stages, alive = costs.again, order.stages[rank], order.most_alive[rank]
    assert again is not None
    kept = _counted(costs, stages, alive, peak, again.room_bytes[rank], waits=any(waits))
    if kept.share == 1 or again.is_collective or len(order.orders) * len(order.orders[rank]) > EXACT_UP_TO:
        return [kept] * len(stages)
    layers = tuple(
        Layers(again.num_bytes[stage], max(1, round(again.num_bytes[stage] / again.layer_bytes[stage])))
        if again.num_bytes[stage]
        else None
        for stage in stages
    )
    saved, deferred = (
        tuple(of_stages[stage] for stage in stages) if of_stages else ()
        for of_stages in (costs.activation_bytes, costs.deferred_bytes)
    )
    waiting = tuple(chunk for chunk, is_elsewhere in enumerate(waits) if is_elsewhere)
    return _looked_at(order.orders[rank], waiting, saved, deferred, layers, again.room_bytes[rank])


@lru_cache(maxsize=1024)
def _looked_at(
    actions: tuple[Action, ...],
    waits: tuple[int, ...],
    saved: tuple[float, ...],
    deferred: tuple[float, ...],
    layers: tuple[Layers | None, ...],
    room_bytes: float,
) -> list[Kept]:
    """The same of each micro-batch; arguments by chunk. A planning asks for an order more than once."""
    again = {chunk: own for chunk, own in enumerate(layers) if own is not None}
    found = keeping(actions, waits, dict(enumerate(saved)), dict(enumerate(deferred)), again, room_bytes)
    shares = kept_shares(found, actions, again)
    return [Kept(shares.get(chunk, 0.0), found.is_early) for chunk in range(len(layers))]


def of_one_stage_a_rank(costs: Costs, alive: Sequence[int]) -> Costs:
    """The same of a pipeline with one stage a rank, of which so many micro-batches are alive at once."""
    if costs.again is None:
        return costs
    last = len(alive) - 1
    found = []
    for stage, (count, room) in enumerate(zip(alive, costs.again.room_bytes, strict=True)):
        peak = count * costs.activation_bytes[stage]
        found.append([_counted(costs, [stage], [count], peak, room, waits=stage < last)])
    return _costs(costs, found, [stage < last for stage in range(last + 1)])


def _counted(
    costs: Costs, stages: Sequence[int], alive: Sequence[int], peak: float, room_bytes: float, *, waits: bool
) -> Kept:
    """Activations that a rank keeps at the moment at which most is alive.

    Args:
        stages: that it holds.
        alive: micro-batches at a time, by stage.
        peak: bytes of all that is alive, if nothing is kept.
        waits: for gradients of other ranks.
    """
    again = costs.again
    assert again is not None
    whole = sum(count * again.num_bytes[stage] for stage, count in zip(stages, alive, strict=True))
    saved = max((costs.activation_bytes[stage] for stage in stages), default=0.0) if costs.activation_bytes else 0.0
    left = room_bytes - peak
    if whole + saved <= left or again.is_collective:
        return Kept(float(whole + saved <= left), is_early=False)
    one = max(again.num_bytes[stage] for stage in stages)
    is_early = waits and one <= left
    reserve = one if is_early else max(again.layer_bytes[stage] for stage in stages)
    share = (left - saved - reserve) / whole if whole else 0.0
    return Kept(min(max(share, 0.0), 1.0), is_early)


def _costs(costs: Costs, found: Sequence[Sequence[Kept]], waits: Sequence[bool]) -> Costs:
    """Costs with what is kept of each stage, on each of the ranks that hold it."""
    again = costs.again
    assert again is not None
    backward_s, ahead_s, shares = [], [], []
    for stage, kept in enumerate(found):
        seconds, share = again.seconds[stage], fmean(each.share for each in kept)
        least = costs.weight_s[stage] if costs.weight_s else 0.0
        backward_s.append(max(costs.backward_s[stage] + (again.kept[stage] - share) * seconds, least))
        early = fmean(each.is_early for each in kept) * waits[stage]
        ahead_s.append(min((1 - share) * seconds * early, backward_s[-1]))
        shares.append(share)
    return replace(
        costs,
        backward_s=tuple(backward_s),
        ahead_s=tuple(ahead_s) if any(ahead_s) else (),
        again=replace(again, kept=tuple(shares)),
    )
