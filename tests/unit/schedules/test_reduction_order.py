"""Reductions that begin in a rank's last backward get through where a device runs one communication at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from paceline.schedules import Schedule, families, lower
from paceline.schedules.lower import PAIRED

Item = tuple[str, tuple[int, ...], tuple[object, ...]]
"""Kind, the devices that take part, and a name that is the same on all of them."""

BUCKETS = 3
SCHEDULES = [
    *(families.one_f_one_b(stages, 6) for stages in (2, 3, 5)),
    families.gpipe(3, 4),
    families.kfkb(4, 8, 2),
    families.eager(3, 6, 1.0),
    families.interleaved(2, 4, 2),
    families.dualpipev(2, 6),
]


def programs(
    schedule: Schedule, replicas: int, buckets: Sequence[Sequence[int]], at_once: Sequence[int]
) -> list[list[Item]]:
    """By device: communications, and waits for receives. Device ``replica * ranks + rank``.

    Args:
        buckets: by replica: the order in which it reduces them.
        at_once: by device: how many of them are complete in the last backward; the others follow the program.
    """
    ranks = schedule.num_ranks
    where = {cell: rank for rank, cells in enumerate(schedule.cells) for cell in cells}
    found = []
    for replica in range(replicas):
        for rank, ops in enumerate(lower(schedule, order=PAIRED)):
            here, program = replica * ranks + rank, []
            everyone = tuple(other * ranks + rank for other in range(replicas))
            reductions = [("reduce", everyone, (rank, bucket)) for bucket in buckets[replica]]
            early = at_once[here]
            backwards = sum(op.kind == "backward" for op in ops)
            for op in ops:
                verb, _, what = op.kind.partition("_")
                if verb == "backward":
                    backwards -= 1
                    if backwards == 0:
                        program += reductions[:early]
                if verb in ("post", "wait", "send"):
                    cell = schedule.cells[rank][op.chunk]
                    gives = cell if verb == "send" else cell - 1 if what == "activation" else cell + 1
                    takes = gives + (1 if what == "activation" else -1)
                    ends = (replica * ranks + where[gives], replica * ranks + where[takes])
                    program.append((verb, ends, (what, gives, op.micro_batch)))
            found.append(program + reductions[early:])
            assert all(here in ends for _, ends, _ in found[-1])
    return found


def gets_through(found: list[list[Item]]) -> bool:
    """Every device issues in order, and runs what it has issued in order: all parties have to be at it at once."""
    left = [deque(program) for program in found]
    queues: list[deque[tuple[tuple[int, ...], tuple[object, ...]]]] = [deque() for _ in found]
    done = set()
    moved = True
    while moved:
        moved = False
        for program, queue in zip(left, queues, strict=True):
            while program and (program[0][0] != "wait" or program[0][1:] in done):
                kind, ends, name = program.popleft()
                moved = True
                if kind != "wait":
                    queue.append((ends, name))
            while queue and all(queues[end] and queues[end][0] == queue[0] for end in queue[0][0]):
                first = queue[0]
                done.add(first)
                moved = True
                for end in first[0]:
                    queues[end].popleft()
    return not any(left) and not any(queues)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.num_ranks}")
def test_reductions_in_the_last_backward_block_nobody(schedule: Schedule) -> None:
    """However many buckets are complete in it, which need not be the same number on all replicas."""
    replicas, chance = 3, random.Random(0)
    order = [range(BUCKETS)] * replicas
    for _ in range(20):
        at_once = [chance.randint(0, BUCKETS) for _ in range(replicas * schedule.num_ranks)]
        assert gets_through(programs(schedule, replicas, order, at_once)), at_once


def test_a_replica_with_another_order_would_block_all() -> None:
    orders = [[0, 1, 2], [1, 0, 2]]
    schedule = families.one_f_one_b(2, 4)
    assert not gets_through(programs(schedule, 2, orders, [BUCKETS] * 4))
