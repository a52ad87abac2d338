"""Local search with the simulator, from the split with the smallest bottleneck to one with a shorter step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import fsum, inf

from ..schedules.costs import Costs, Link
from .blocks import Block, Device, check, check_boundaries

# A step must be shorter by more than this (relatively) to count as shorter: sums differ by rounding.
SHORTER = 1e-9


def refine(
    boundaries: Sequence[int],
    step_s: Callable[[tuple[int, ...]], float],
    *,
    fits: Callable[[tuple[int, ...]], bool] | None = None,
    budget: int = 500,
) -> tuple[tuple[int, ...], float]:
    """Move cuts as long as that makes the step shorter; the same input gives the same answer.

    Tried are, in this order: each cut by one block; two neighbouring cuts, three, and so on, all to the same side (a
    block leaves one stage, another one comes out some stages on) or the outer two in opposite directions (the stages
    between give or get one on both sides); each cut by two or three blocks; two neighbouring cuts by up to two. A move
    that helped is tried again at once. The result is never worse than the start, and no such move makes it better
    unless the budget ended first; it need not be the best of all.

    Args:
        boundaries: of the start, 0, ..., number of blocks; that it fits is not asked.
        step_s: seconds of a step with given boundaries, say of a simulation.
        fits: whether boundaries are possible at all, say in memory; None: all are.
        budget: how often ``step_s`` may be called, from 1 upwards.

    Returns:
        Boundaries and the seconds of their step.

    Raises:
        ValueError: the boundaries are none, or there is no budget.
    """
    best = tuple(boundaries)
    check_boundaries(best, best[-1] if best else 0, max(1, len(best) - 1))
    if budget < 1:
        raise ValueError(f"budget={budget} is no number of evaluations: give 1 or more.")
    times = {best: step_s(best)}

    def helps(move: dict[int, int]) -> bool:
        moved = _moved(best, move)
        if moved not in times:
            rising = all(first < end for first, end in pairwise(moved))
            if len(times) >= budget or not rising or (fits is not None and not fits(moved)):
                return False
            times[moved] = step_s(moved)
        return times[moved] < times[best] * (1 - SHORTER)

    while move := next((move for move in _moves(len(best)) if helps(move)), None):
        while helps(move):
            best = _moved(best, move)
    return best, times[best]


def stage_costs(
    boundaries: Sequence[int],
    blocks: Sequence[Block],
    devices: Sequence[Device],
    links: Sequence[float] = (),
    *,
    forward: Sequence[float] | None = None,
) -> Costs:
    """Costs of a step of a partition, for the simulator.

    Args:
        boundaries: 0, ..., number of blocks.
        blocks, devices, links: as of :func:`~paceline.planning.partition`; each direction of a link has its rate.
        forward: the part of each block's work that is its forward; None: a third.

    Raises:
        ValueError: as of :func:`~paceline.planning.bottleneck`, or a forward is not between 0 and the work.
    """
    check(blocks, devices, links, None)
    check_boundaries(boundaries, len(blocks), len(devices))
    if forward is None:
        forward = [block.work / 3 for block in blocks]
    if len(forward) != len(blocks):
        raise ValueError(f"forward has {len(forward)} values for {len(blocks)} blocks: give one a block.")
    for index, (part, block) in enumerate(zip(forward, blocks, strict=True)):
        if not 0 <= part <= block.work:
            raise ValueError(f"forward[{index}] is {part} of a work of {block.work}: give a number from 0 to that.")
    stages = [slice(first, end) for first, end in pairwise(boundaries)]
    speeds = [device.speed for device in devices]
    rates = links or (inf,) * (len(devices) - 1)
    both_ways = tuple(Link(rate) for rate in rates)
    return Costs(
        forward_s=tuple(fsum(forward[stage]) / speed for stage, speed in zip(stages, speeds, strict=True)),
        backward_s=tuple(
            fsum(block.work - part for block, part in zip(blocks[stage], forward[stage], strict=True)) / speed
            for stage, speed in zip(stages, speeds, strict=True)
        ),
        message_bytes=tuple(blocks[end - 1].activation_bytes for end in boundaries[1:-1]),
        down=both_ways,
        up=both_ways,
        activation_bytes=tuple(fsum(block.live_bytes for block in blocks[stage]) for stage in stages),
        fixed_bytes=tuple(fsum(block.memory_bytes for block in blocks[stage]) for stage in stages),
    )


def _moves(num_boundaries: int) -> Iterator[dict[int, int]]:
    """Moves of the search: by boundary, how far it moves; the outer two stay."""
    cuts = range(1, num_boundaries - 1)
    for width in range(len(cuts)):
        runs = [range(first, first + width + 1) for first in cuts[: len(cuts) - width]]
        for run in runs:
            yield dict.fromkeys(run, -1)
            yield dict.fromkeys(run, 1)
        for run in runs if width else ():
            yield {run[0]: -1, run[-1]: 1}
            yield {run[0]: 1, run[-1]: -1}
    for cut, by in product(cuts, (-2, 2, -3, 3)):
        yield {cut: by}
    for left, right in pairwise(cuts):
        for one, other in product((-2, -1, 1, 2), repeat=2):
            if 2 in (abs(one), abs(other)):
                yield {left: one, right: other}


def _moved(boundaries: tuple[int, ...], move: dict[int, int]) -> tuple[int, ...]:
    return tuple(boundary + move.get(index, 0) for index, boundary in enumerate(boundaries))
