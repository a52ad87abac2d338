"""Whether a schedule can be executed at all: its actions are complete, and a replay of their dependencies ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from .text import marked

# Of a replay that asks in which order things happen, not how long they take: a backward is two forwards' work, and so
# are its parts together.
UNITS: Mapping[str, int] = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}

# How far a micro-batch has come in a chunk, and by kind of action: where it must be, and where it is afterwards.
_UNSEEN, _FORWARDED, _SPLIT, _DONE = range(4)
_PROGRESS: Mapping[str, tuple[int, int]] = {
    FORWARD: (_UNSEEN, _FORWARDED),
    BACKWARD: (_FORWARDED, _DONE),
    BACKWARD_INPUT: (_FORWARDED, _SPLIT),
    BACKWARD_WEIGHT: (_SPLIT, _DONE),
}
_PROGRESS_FORWARD_ONLY: Mapping[str, tuple[int, int]] = {FORWARD: (_UNSEEN, _DONE)}
_NEVER = (-1, -1)
_NEXT = {_UNSEEN: FORWARD, _FORWARDED: BACKWARD, _SPLIT: BACKWARD_WEIGHT}


def check_actions(schedule: Schedule, *, forward_only: bool = False) -> None:
    """Every rank runs the forward, and after it the backward, of each micro-batch through each of its chunks once:
    of each that takes the chunk's direction, where there are several. The backward is whole, or first that of the
    inputs and then that of the weights.

    Args:
        schedule: any.
        forward_only: there are no backwards.

    Raises:
        ValueError: with the rank, the position and the rule that is broken; or the routes are none.
    """
    num_micro_batches, num_chunks = schedule.num_micro_batches, schedule.num_chunks
    for name, count in (("ranks", schedule.num_ranks), ("micro-batches", num_micro_batches), ("chunks", num_chunks)):
        if count < 1:
            raise ValueError(f"a schedule of {count} {name} computes nothing: give it 1 or more.")
    _check_routes(schedule)
    progress = _PROGRESS_FORWARD_ONLY if forward_only else _PROGRESS
    for rank, order in enumerate(schedule.orders):
        seen = _start(schedule, rank)
        for position, (kind, micro_batch, chunk) in enumerate(order):
            if 0 <= micro_batch < num_micro_batches and 0 <= chunk < num_chunks:
                which = chunk * num_micro_batches + micro_batch
                needed, then = progress.get(kind, _NEVER)
                if seen[which] == needed:
                    seen[which] = then
                    continue
            raise ValueError(f"{_fault(schedule, rank, position, forward_only)}.\n{marked(schedule, rank, position)}")
        for state in (_UNSEEN, _FORWARDED, _SPLIT):
            if state in seen:
                chunk, micro_batch = divmod(seen.index(state), num_micro_batches)
                missing = Action(_NEXT[state], micro_batch, chunk)
                raise ValueError(f"rank {rank} never runs {missing}; add it.\n{marked(schedule, rank, len(order))}")


def _check_routes(schedule: Schedule) -> None:
    routes, num_ranks, num_chunks = schedule.routes, schedule.num_ranks, schedule.num_chunks
    if not routes:
        return
    if not routes[0]:
        raise ValueError("routes[0] is empty: name the rank of each stage.")
    for direction, route in enumerate(routes):
        if len(route) != len(routes[0]):
            raise ValueError(
                f"routes[{direction}] has {len(route)} stages and routes[0] has {len(routes[0])}: every direction goes"
                " through all stages; give routes of one length."
            )
        for stage, rank in enumerate(route):
            if not 0 <= rank < num_ranks:
                raise ValueError(
                    f"routes[{direction}][{stage}]={rank} is no rank of 0…{num_ranks - 1}: name the rank of each stage."
                )
    held = Counter(chain.from_iterable(routes))
    counts = [held[rank] for rank in range(num_ranks)]
    most = max(counts)
    if most != min(counts):
        raise ValueError(
            f"the routes give rank {counts.index(most)} {most} stages and rank {counts.index(min(counts))}"
            f" {min(counts)}: name every rank equally often."
        )
    if most != num_chunks:
        raise ValueError(f"the routes give each rank {most} stages and num_chunks={num_chunks}: set it to {most}.")


def _start(schedule: Schedule, rank: int) -> bytearray:
    """By chunk · M + micro-batch: done where the micro-batch does not take the chunk's direction, else unseen."""
    num_micro_batches, num_directions = schedule.num_micro_batches, schedule.num_directions
    found = bytearray([_DONE]) * (num_micro_batches * schedule.num_chunks)
    for chunk in range(schedule.num_chunks):
        first, end = chunk * num_micro_batches + schedule.direction(rank, chunk), (chunk + 1) * num_micro_batches
        found[first:end:num_directions] = bytes([_UNSEEN]) * len(range(first, end, num_directions))
    return found


def _fault(schedule: Schedule, rank: int, position: int, forward_only: bool) -> str:
    """What is wrong with an action, and what to do."""
    order = schedule.orders[rank]
    action = order[position]
    kinds = _PROGRESS_FORWARD_ONLY if forward_only else _PROGRESS
    if action.kind not in kinds:
        return f"{action} is of kind {action.kind!r}, this schedule may hold {', '.join(kinds)}; take it out"
    if not 0 <= action.micro_batch < schedule.num_micro_batches:
        return f"{action} has no micro-batch of 0…{schedule.num_micro_batches - 1}; take it out"
    if not 0 <= action.chunk < schedule.num_chunks:
        return f"{action} has no chunk of 0…{schedule.num_chunks - 1}; take it out"
    num_directions, direction = schedule.num_directions, schedule.direction(rank, action.chunk)
    if action.micro_batch % num_directions != direction:
        return (
            f"{action} takes direction {action.micro_batch % num_directions} (micro-batch % {num_directions}), and"
            f" chunk {action.chunk} of rank {rank} is of direction {direction}; run it in a chunk of its own direction"
        )
    if action in order[:position]:
        return f"{action} runs a second time; take one of the two out"
    forward, whole, of_inputs = (action._replace(kind=kind) for kind in (FORWARD, BACKWARD, BACKWARD_INPUT))
    before = order[:position]
    if forward not in before:
        return f"{action} runs before its forward; put {forward} before it"
    if whole in before:
        return f"{action} is part of {whole}, which ran before it; take one of the two out"
    if of_inputs in before:
        return f"{action} repeats {of_inputs}, which ran before it; take one of the two out"
    return f"{action} runs before the backward of the inputs; put {of_inputs} before it"


def unit_starts(schedule: Schedule) -> tuple[list[int], ...]:
    """When each action starts if transfers take no time and nothing but its inputs keeps an action back.

    Each takes its :data:`UNITS`. Cost is linear in the actions.

    Args:
        schedule: one that :func:`check_actions` accepts.

    Returns:
        for each rank, one start for each of its actions.

    Raises:
        ValueError: the actions wait for each other in a circle, which is shown.
    """
    num_ranks, num_stages, num_micro_batches = schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches
    units_of = UNITS
    # Ends by stage · M + micro-batch (which tells the direction), forwards first; backwards lie num_stages rows further
    # down.
    ends = [-1] * (2 * num_stages * num_micro_batches)
    starts: tuple[list[int], ...] = tuple([] for _ in schedule.orders)
    clocks = [0] * num_ranks
    waiting: dict[int, int] = {}
    runnable = list(range(num_ranks))
    while runnable:
        rank = runnable.pop()
        order, stages, rank_starts, clock = schedule.orders[rank], schedule.stages[rank], starts[rank], clocks[rank]
        for position in range(len(rank_starts), len(order)):
            kind, micro_batch, chunk = order[position]
            stage = stages[chunk]
            if kind == FORWARD:
                this = stage * num_micro_batches + micro_batch
                needed = this - num_micro_batches if stage else -1
            elif kind == BACKWARD_WEIGHT:  # comes after that of the inputs on the rank, and nobody waits for it
                rank_starts.append(clock)
                clock += units_of[kind]
                continue
            else:
                this = (num_stages + stage) * num_micro_batches + micro_batch
                needed = this + num_micro_batches if stage < num_stages - 1 else -1
            if needed >= 0:
                arrival = ends[needed]
                if arrival < 0:
                    waiting[needed] = rank
                    break
                if arrival > clock:
                    clock = arrival
            rank_starts.append(clock)
            clock += units_of[kind]
            ends[this] = clock
            if this in waiting:
                runnable.append(waiting.pop(this))
        clocks[rank] = clock
    if waiting:
        raise ValueError(_circle(schedule, [len(done) for done in starts]))
    return starts


def _circle(schedule: Schedule, positions: list[int]) -> str:
    """Who waits for whom: every chain of waiting ranks ends in a circle."""
    rank = next(rank for rank, order in enumerate(schedule.orders) if positions[rank] < len(order))
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        rank = _awaited_rank(schedule, rank, positions[rank])
    circle = chain[chain.index(rank) :]
    lines = [
        f"rank {one} waits at {schedule.orders[one][positions[one]]} for rank "
        f"{_awaited_rank(schedule, one, positions[one])}:\n{marked(schedule, one, positions[one])}"
        for one in circle[:8]
    ]
    more = f"\n… and {len(circle) - 8} ranks more" if len(circle) > 8 else ""
    return (
        "the schedule cannot be executed, these ranks wait for each other; run one of the marked actions later.\n"
        + "\n".join(lines)
        + more
    )


def _awaited_rank(schedule: Schedule, rank: int, position: int) -> int:
    action = schedule.orders[rank][position]
    cell = schedule.cells[rank][action.chunk]
    return schedule.places[cell + (-1 if action.kind == FORWARD else 1)][0]
