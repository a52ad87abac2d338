"""Families of schedules whose backwards are split, each a function of its shape.

Those with two stages a rank are in V: along the ranks and back, so that the first rank has the first and the last stage
(:data:`~paceline.schedules.families.DUALPIPEV` has the same). Where they are made up by simulation, forwards and both
halves of backwards take one unit each; for stages that are not so, :mod:`.generator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from .costs import Costs
from .families import DUALPIPEV, VHALF, VMIN, ZBV, dualpipev, v_route
from .filling import composed, filled
from .schedule import Action, Schedule, backward, backward_input, backward_weight, check_size, forward

ZBH1, ZBH2 = "zbh1", "zbh2"
DUALPIPEV_SPLIT = f"{DUALPIPEV}_split"


def zbh1(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241): 1F1B, stage s leaving the weights' backwards of s micro-batches for later.

    What is live and what is deferred are together at most S micro-batches on every stage: as many as 1F1B keeps on its
    first.
    """
    return _handcrafted(num_stages, num_micro_batches, 1, ZBH1)


def zbh2(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H2 (arXiv 2401.10241): twice the warm-up of 1F1B, and twice as much left for later as ZB-H1.

    That fills the time in which a backward of inputs that takes longer than one of weights travels back. At most
    2·S − 1 micro-batches are live or deferred on a stage.
    """
    return _handcrafted(num_stages, num_micro_batches, 2, ZBH2)


def _handcrafted(num_stages: int, num_micro_batches: int, times: int, name: str) -> Schedule:
    _check(num_stages, num_micro_batches)

    def order(stage: int) -> tuple[Action, ...]:
        ahead, behind = times * (num_stages - 1 - stage), times * stage
        actions: list[Action] = [forward(m) for m in range(min(ahead, num_micro_batches))]
        for m in range(num_micro_batches):
            if m + ahead < num_micro_batches:
                actions.append(forward(m + ahead))
            actions.append(backward_input(m))
            if m >= behind:
                actions.append(backward_weight(m - behind))
        first_left = max(0, num_micro_batches - behind)
        return (*actions, *(backward_weight(m) for m in range(first_left, num_micro_batches)))

    return Schedule(tuple(map(order, range(num_stages))), num_micro_batches, name=name)


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-V (arXiv 2405.15362): in V, as busy as ZB-H2 in the memory of 1F1B's first rank.

    Every rank runs what it can, within the memory of S whole stages, live and deferred ones together. Backwards of
    inputs are taken to last a trifle longer than forwards: the order then suffers less where they really do.
    """
    _check(num_ranks, num_micro_batches, 2)
    schedule = composed(v_route(num_ranks), num_micro_batches, _unit(num_ranks, _TRIFLE), (2 * num_ranks,) * num_ranks)
    assert schedule is not None, "there is room for one micro-batch at a time"
    return replace(schedule, name=ZBV)


def vhalf(num_ranks: int, num_micro_batches: int) -> Schedule:
    """V-half (arXiv 2405.15362): in V, with little more than half of 1F1B's live activations."""
    return _repeated(num_ranks, num_micro_batches, _VHALF_STEPS, VHALF)


def vmin(num_ranks: int, num_micro_batches: int) -> Schedule:
    """V-min (arXiv 2405.15362): in V, with little more than a third of 1F1B's live activations, and its bubble."""
    return _repeated(num_ranks, num_micro_batches, _VMIN_STEPS, VMIN)


def dualpipev_split(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The order of :func:`~paceline.schedules.families.dualpipev`, with backwards of weights where a rank would wait.

    At most 2·S + 1 half stages are live or deferred, as many as are live there.

    Raises:
        ValueError: there are fewer micro-batches than stages, with which the order does not begin.
    """
    whole = dualpipev(num_ranks, num_micro_batches)
    room_bytes = (2 * num_ranks + 1,) * num_ranks
    return replace(filled(whole, _unit(num_ranks), room_bytes), name=DUALPIPEV_SPLIT)


# Units from one rank to the next; see `_ways`.
_VHALF_STEPS, _VMIN_STEPS = (1, 2, 1, 2), (1, 1, 1, 1)
_PERIOD = 6  # two stages' forwards and both halves of their backwards
_MOST_PAUSE = 4
_TRIFLE = 0.003


class _Way(NamedTuple):
    """When a micro-batch's actions on a rank begin: forwards through its two chunks and backwards of their inputs, in
    the order in which they come.
    """

    forward_0: int
    forward_1: int
    input_1: int
    input_0: int

    def ends(self) -> tuple[int, int] | None:
        """When backwards of weights have ended, of chunk 0 and 1, at the first times at which no other micro-batch's
        action runs. None: there are none.
        """
        free = sorted(set(range(_PERIOD)) - {begin % _PERIOD for begin in self})
        if len(free) > 2:
            return None
        ways = [
            (_next(self.input_0 + 1, places[0]) + 1, _next(self.input_1 + 1, places[1]) + 1)
            for places in (free, free[::-1])
        ]
        return min(ways, key=sum)


def _repeated(num_ranks: int, num_micro_batches: int, steps: Sequence[int], name: str) -> Schedule:
    """One micro-batch's way through the ranks, begun anew every period, and its gaps closed.

    On no rank two of its actions begin a multiple of the period apart, so that micro-batches pass without waiting for
    each other, and how long each is on its way tells how many there are at a time.
    """
    _check(num_ranks, num_micro_batches, 2)
    pauses = product(range(1, _MOST_PAUSE + 1), repeat=3)
    ways, most_held = min(
        ((ways, held) for ways in (_ways(num_ranks, steps, each) for each in pauses) if (held := _most_held(ways))),
        key=lambda found: (found[1], found[0][0].input_0),
    )

    def order(way: _Way) -> tuple[Action, ...]:
        actions = zip(way, (forward, forward, backward, backward), (0, 1, 1, 0), strict=True)
        timed = ((begin + _PERIOD * m, make(m, c)) for begin, make, c in actions for m in range(num_micro_batches))
        return tuple(action for _, action in sorted(timed))

    whole = Schedule(tuple(map(order, ways)), num_micro_batches, 2, routes=(v_route(num_ranks),))
    return replace(filled(whole, _unit(num_ranks), (most_held,) * num_ranks), name=name)


def _ways(num_ranks: int, steps: Sequence[int], pauses: Sequence[int]) -> list[_Way]:
    """By rank.

    Args:
        steps: from one rank to the next: of forwards along the ranks and back, of backwards along them and back.
        pauses: between the three turns.
    """
    begins: list[list[int]] = []
    now = 0
    for step, pause in zip(steps, (*pauses, 0), strict=True):
        begins.append([now + step * rank for rank in range(num_ranks)])
        now = begins[-1][-1] + pause
    down, up, back_down, back_up = begins
    pairs = zip(down, reversed(up), back_down, reversed(back_up), strict=True)
    return [_Way(*each) for each in pairs]


def _next(earliest: int, place: int) -> int:
    """The first time from ``earliest`` on that is ``place`` in its period."""
    return earliest + (place - earliest) % _PERIOD


def _most_held(ways: Sequence[_Way]) -> int:
    """Half stages that are live or deferred on a rank, at most; 0: two micro-batches meet."""
    most = 0
    for way in ways:
        ends = way.ends()
        if ends is None:
            return 0
        for place in range(_PERIOD):
            begun = zip((way.forward_0, way.forward_1), ends, strict=True)
            most = max(most, sum(len(range(_next(begin, place), end, _PERIOD)) for begin, end in begun))
    return most


def _unit(num_ranks: int, longer: float = 0.0) -> Costs:
    halves = 2 * num_ranks
    ones = (1.0,) * halves
    return Costs(ones, (2.0,) * halves, weight_s=(1.0 - longer,) * halves, activation_bytes=ones)


def _check(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    for name, count in (("num_ranks", num_ranks), ("num_micro_batches", num_micro_batches)):
        if count < 1:
            raise ValueError(f"{name}={count} must be 1 or more.")
    check_size(num_ranks * num_chunks, num_micro_batches)


SPLIT_FAMILIES: Mapping[str, Callable[[int, int], Schedule]] = {
    ZBH1: zbh1,
    ZBH2: zbh2,
    ZBV: zbv,
    VHALF: vhalf,
    VMIN: vmin,
    DUALPIPEV_SPLIT: dualpipev_split,
}
"""By name: functions of the number of ranks and of micro-batches."""

SPLIT = (ZBH1, ZBH2, ZBV, VHALF, VMIN)
"""Types of these that a configuration may name."""
