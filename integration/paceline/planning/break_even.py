"""Break-even points of a pipeline without a flush: over more micro-batches, over slower links.

A flush costs the same however many micro-batches a step has, and what the asynchronous order loses instead, it loses
once a round: so there is a number of micro-batches up to which it takes less time. And since few of a direction are
under way, it hides less of the time that messages take than groups of micro-batches do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

from ..schedules import directions, families
from ..schedules.asynchronous import MULTIDIRECTION, ONE_DIRECTION, multidirection, one_direction
from ..schedules.costs import Costs, Link
from ..schedules.simulate import simulate
from ..schedules.steady import period
from .choose import TIE

FLUSHED = f"{MULTIDIRECTION} staleness=0"
MOST_MICRO_BATCHES = 256
"""No break-even point is looked for beyond."""
MOST_TRANSFER = 2.0
"""The same for transfers, in times of the longest forward and backward of a stage."""
_PARTS, _PRECISION = 16, 1e-3  # of that: in how many parts it is searched, and how far


class BreakEven(NamedTuple):
    """The range in which ``"multidirection"`` takes less time than a schedule with a flush.

    Args:
        micro_batches: the most of a step, a multiple of the devices, with which it wins or is the only one. 0: with no
            number; None: with all that were tried.
        transfer_s: with the number of micro-batches that was asked for, it wins while messages take less than this over
            the slowest boundary (with slower links it may win again). 0: it does not even where they take no time;
            None: it wins at all that were tried, or there is no such order of the other one.
    """

    micro_batches: int | None
    transfer_s: float | None


def group_sizes(num_micro_batches: int) -> tuple[int, ...]:
    """The k of ``"kfkb"`` to compare: powers of two below the number of micro-batches."""
    return tuple(2**power for power in range(1, num_micro_batches.bit_length()) if 2**power < num_micro_batches)


def _one_f_one_b(costs: Costs, num_micro_batches: int) -> float | None:
    return simulate(families.one_f_one_b(len(costs.forward_s), num_micro_batches), costs).makespan_s


def _kfkb(costs: Costs, num_micro_batches: int) -> float | None:
    schedules = (families.kfkb(len(costs.forward_s), num_micro_batches, k) for k in group_sizes(num_micro_batches))
    return min((simulate(schedule, costs).makespan_s for schedule in schedules), default=None)


def _dualpipev(costs: Costs, num_micro_batches: int) -> float | None:
    num_ranks = len(costs.forward_s)
    if num_micro_batches < 2 * num_ranks:
        return None
    schedule = families.dualpipev(num_ranks, num_micro_batches)
    return simulate(schedule, costs.of_chunks(schedule.routes[0])).makespan_s


_StepTime: TypeAlias = Callable[[Costs, int], float | None]

FLUSHING: Mapping[str, _StepTime] = {
    "1f1b": _one_f_one_b,
    "kfkb": _kfkb,
    "dualpipev": _dualpipev,
}
"""Schedules with a flush: seconds of a step, of the fastest ``k`` for ``"kfkb"``; None where there is no such order."""


def compare(costs: Costs, num_micro_batches: int) -> dict[str, float]:
    """Seconds of a step by schedule: those with a flush, and, in the steady state, those without.

    What does not exist with so many stages or micro-batches is left out.

    Args:
        costs: one value a stage, on devices that are alike.
        num_micro_batches: M of a step.
    """
    num_stages = len(costs.forward_s)
    found = {name: step_s(costs, num_micro_batches) for name, step_s in FLUSHING.items()}
    if exists(num_stages, num_micro_batches):
        found[MULTIDIRECTION] = _steady_s(costs, num_micro_batches)
        flushed = multidirection(num_stages, num_micro_batches).unrolled(1)
        found[FLUSHED] = simulate(flushed, costs).makespan_s
    found[ONE_DIRECTION] = period(one_direction(num_stages, num_micro_batches), costs)
    return {name: step_s for name, step_s in found.items() if step_s is not None}


def exists(num_stages: int, num_micro_batches: int) -> bool:
    """Whether there is a ``"multidirection"`` order of this shape."""
    return bool(directions.allowed(num_stages)) and num_micro_batches > 0 and num_micro_batches % num_stages == 0


def break_even(
    costs: Costs,
    num_micro_batches: int,
    against: str = "1f1b",
    most_micro_batches: int = MOST_MICRO_BATCHES,
    num_directions: int | None = None,
) -> BreakEven:
    """The most micro-batches and the longest transfers with which ``"multidirection"`` is the faster one.

    The transfer times of all boundaries grow together, in the ratios that the costs have; all alike where the costs
    have none. Between two transfer times that are tried it is taken to win, or not, at the same ones.

    Args:
        costs: one value a stage, on devices that are alike.
        num_micro_batches: M at which transfer times are tried.
        against: a key of :data:`FLUSHING`.
        most_micro_batches: no larger number is tried.
        num_directions: of ``"multidirection"``; None: as many as it has by default.

    Raises:
        ValueError: there is no such schedule, or no ``"multidirection"`` of this shape.
    """
    if against not in FLUSHING:
        raise ValueError(f"against={against!r} is no schedule with a flush: choose one of {', '.join(FLUSHING)}.")
    multidirection(len(costs.forward_s), num_micro_batches, num_directions)  # says what is wrong
    own_s = partial(_steady_s, num_directions=num_directions)
    return BreakEven(
        _most_micro_batches(costs, FLUSHING[against], own_s, most_micro_batches),
        _longest_transfer(costs, FLUSHING[against], own_s, num_micro_batches),
    )


def _steady_s(costs: Costs, num_micro_batches: int, num_directions: int | None = None) -> float:
    """The period of ``"multidirection"``: the order of a run does not depend on how many rounds make a step."""
    num_stages = len(costs.forward_s)
    return num_micro_batches // num_stages * _round_s(replace(costs, step_s=0.0), num_directions) + costs.step_s


@lru_cache(maxsize=2 * _PARTS)
def _round_s(costs: Costs, num_directions: int | None) -> float:
    num_stages = len(costs.forward_s)
    return period(multidirection(num_stages, num_stages, num_directions), costs)


def _most_micro_batches(costs: Costs, flushed_s: _StepTime, own_s: _StepTime, most: int) -> int | None:
    num_stages = len(costs.forward_s)

    def wins(rounds: int) -> bool:
        other_s, ours_s = (step_s(costs, rounds * num_stages) for step_s in (flushed_s, own_s))
        return other_s is None or ours_s is None or ours_s < other_s * (1 - TIE)

    low, high = 0, most // num_stages
    if wins(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low * num_stages


def _longest_transfer(costs: Costs, flushed_s: _StepTime, own_s: _StepTime, num_micro_batches: int) -> float | None:
    longest_s = MOST_TRANSFER * max(map(sum, zip(costs.forward_s, costs.backward_s, strict=True)))

    def wins(part: float) -> bool:
        tried = _with_transfer(costs, part * longest_s)
        other_s, ours_s = (step_s(tried, num_micro_batches) for step_s in (flushed_s, own_s))
        return other_s is None or ours_s is None or ours_s < other_s * (1 - TIE)

    high = next((part / _PARTS for part in range(_PARTS + 1) if not wins(part / _PARTS)), None)
    if high is None:
        return None
    low = max(high - 1 / _PARTS, 0.0)
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low * longest_s


def _with_transfer(costs: Costs, transfer_s: float) -> Costs:
    """All transfers times one factor, with which a message takes ``transfer_s`` over the slowest boundary."""
    if not transfer_s:
        return replace(costs, message_bytes=(), down=(), up=(), egress_bytes_per_s=())
    slowest_s = max((_transfer_s(costs, boundary) for boundary in range(len(costs.forward_s) - 1)), default=0.0)
    if not slowest_s:
        alike = Costs.uniform(len(costs.forward_s), 0.0, 0.0, transfer_s)
        costs = replace(costs, egress_bytes_per_s=())
        return replace(costs, message_bytes=alike.message_bytes, down=alike.down, up=alike.up)
    factor = transfer_s / slowest_s
    return replace(
        costs,
        down=tuple(Link(link.bytes_per_s / factor, link.latency_s * factor) for link in costs.down),
        up=tuple(Link(link.bytes_per_s / factor, link.latency_s * factor) for link in costs.up),
        egress_bytes_per_s=tuple(rate / factor for rate in costs.egress_bytes_per_s),
    )


def _transfer_s(costs: Costs, boundary: int) -> float:
    """Seconds of a message over a boundary, the slower way, if nothing else is sent."""
    size = costs.message_bytes[boundary] if costs.message_bytes else 0.0
    found = 0.0
    for links, sender, receiver in ((costs.down, boundary, boundary + 1), (costs.up, boundary + 1, boundary)):
        link = links[boundary] if links else Link()
        rate = link.bytes_per_s
        if costs.hosts and costs.egress_bytes_per_s and costs.hosts[sender] != costs.hosts[receiver]:
            rate = min(rate, costs.egress_bytes_per_s[costs.hosts[sender]])
        found = max(found, size / rate + link.latency_s)
    return found
