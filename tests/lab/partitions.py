"""How long a step of an emulation takes with its layers cut in one way or another: 1F1B, simulated."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from lab.emulation import Emulation
from lab.transfer import PAYLOAD_SHARE
from paceline.schedules.costs import Costs
from paceline.schedules.families import kfkb
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate


def every_partition(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """The boundaries of every cut of layers into stages that all have one."""
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *cuts, num_layers)


def step_s(
    emulation: Emulation,
    boundaries: Sequence[int],
    speeds: Sequence[float] | None = None,
    mbit: float | None = None,
) -> float:
    """Seconds of a step.

    Args:
        speeds: of the ranks' devices. Default: those at the beginning.
        mbit: what every rank can send on the wire; None: without limit.
    """
    num_ranks = emulation.num_ranks
    forward_s, backward_s = emulation.stage_s(boundaries, speeds)
    costs = Costs(forward_s, backward_s)
    if mbit is not None:
        costs = Costs(
            forward_s,
            backward_s,
            message_bytes=(float(emulation.message_bytes),) * (num_ranks - 1),
            hosts=tuple(range(num_ranks)),
            egress_bytes_per_s=(mbit * 1e6 / 8 * PAYLOAD_SHARE,) * num_ranks,
        )
    return simulate(_schedule(num_ranks, emulation.num_micro_batches), costs).makespan_s


def best(
    emulation: Emulation, speeds: Sequence[float] | None = None, mbit: float | None = None, count: int = 1
) -> list[tuple[float, tuple[int, ...]]]:
    """The ``count`` partitions with the shortest steps of all that there are: seconds and boundaries."""
    return heapq.nsmallest(
        count,
        (
            (step_s(emulation, boundaries, speeds, mbit), boundaries)
            for boundaries in every_partition(emulation.num_layers, emulation.num_ranks)
        ),
    )


@cache
def _schedule(num_stages: int, num_micro_batches: int) -> Schedule:
    return kfkb(num_stages, num_micro_batches, 1)
