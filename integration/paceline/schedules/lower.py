"""From a schedule to what each rank does: its compute actions with all communication derived, in one of two orders.

A *lane* is one way of the edge between two neighbouring cells (stages of one direction of the schedule). Two cells on
one rank have no lane.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .dependencies import UNITS, check_actions, unit_starts
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule

LOAD = "load"
POST_ACTIVATION, WAIT_ACTIVATION, SEND_ACTIVATION = "post_activation", "wait_activation", "send_activation"
POST_GRADIENT, WAIT_GRADIENT, SEND_GRADIENT = "post_gradient", "wait_gradient", "send_gradient"
RUN_FORWARD, RUN_BACKWARD = "forward", "backward"
RUN_BACKWARD_INPUT, RUN_BACKWARD_WEIGHT = "backward_input", "backward_weight"
COMPLETE, APPLY = "backward_complete", "apply"
REDUCE_TIED, REDUCE, UPDATE = "reduce_tied", "reduce", "update"
FREE, PAIRED = "free", "paired"

# Without backwards nothing stays alive, so the default is one message that is used and one that arrives meanwhile.
_FORWARD_ONLY_RECEIVES_AHEAD = 2


_RUN = {BACKWARD: RUN_BACKWARD, BACKWARD_INPUT: RUN_BACKWARD_INPUT}


class Op(NamedTuple):
    """One thing a rank does: ``post_…`` starts a receive, ``wait_…`` needs what it brings, ``send_…`` starts a send.

    A backward that is split has two: ``"backward_input"``, after which its gradient is sent, and ``"backward_weight"``,
    which needs nothing but what the first has left on this rank.

    Where steps run into each other it is for a micro-batch of the step ``lag`` steps ago, and there are two more kinds.
    ``"backward_complete"``: the last backward of that step through ``chunk`` has run. ``"apply"``: the update that was
    made of that step is put into the model. A step with a flush ends with :data:`FLUSHED_UPDATE`.
    """

    kind: str
    micro_batch: int = -1
    chunk: int = -1
    lag: int = 0


FLUSHED_UPDATE = (Op(REDUCE_TIED), Op(REDUCE), Op(UPDATE))
"""What ends a training step that has a flush."""


def lower(schedule: Schedule, *, order: str = FREE, receives_ahead: int | None = None) -> tuple[tuple[Op, ...], ...]:
    """One program a rank that runs its compute actions in order.

    ``"free"`` is for transports with a queue for each lane, whose sends do not block: a send follows the compute that
    makes it; receives are posted ahead of use, in the order in which the other end of the lane sends. Activations are
    posted up to ``receives_ahead`` on a lane, anew after each forward, behind what it sends (in an evaluation before
    each forward); a gradient once its micro-batch's activation is sent. A wait then ends as soon as the other end has
    computed, since everything before it in the lane has been posted: no window, however small, can stop a schedule
    whose dependencies allow it to run.

    ``"paired"`` is for transports with one queue for everything between two ranks: all messages of all ranks are
    brought into one sequence, by when they are made in a replay, and every rank sends and posts in that sequence. The
    earliest message that is not yet delivered is then always the next one of both its ends, so that even sends and
    receives that block get through.

    Args:
        schedule: a complete one that can be executed.
        order: ``"free"`` or ``"paired"``.
        receives_ahead: for ``"free"``: activations posted and not yet waited for, on each lane. By default as many as
            the sending stage ever keeps alive.

    Returns:
        one program a rank. The first stage loads inputs and the last one labels. Local edges have no communication.

    Raises:
        ValueError: the schedule cannot be executed, or an option is unknown or out of range.
    """
    if order not in (FREE, PAIRED):
        raise ValueError(f"order={order!r} is unknown: choose {FREE!r} or {PAIRED!r}.")
    if receives_ahead is not None and (order == PAIRED or receives_ahead < 1):
        raise ValueError(f"receives_ahead={receives_ahead} must be 1 or more, and belongs to order={FREE!r}.")
    check_actions(schedule, forward_only=is_forward_only(schedule))
    starts = unit_starts(schedule)
    if order == PAIRED:
        return lower_paired(schedule, starts)
    lanes = _Lanes(schedule, receives_ahead)
    return tuple(_free(schedule, rank, lanes) for rank in range(schedule.num_ranks))


def is_forward_only(schedule: Schedule) -> bool:
    """No rank has a backward."""
    return not any(action.kind != FORWARD for order in schedule.orders for action in order)


class _Program:
    """The ops of one rank under construction.

    By chunk: ``receives``: activations come from, and gradients go to, another rank; ``sends``: the other way round;
    ``loads``: inputs or labels are loaded.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.ops: list[Op] = []
        last_stage, stages, cells = schedule.num_stages - 1, schedule.stages[rank], schedule.cells[rank]
        self.receives = [stage > 0 and cell - 1 not in cells for stage, cell in zip(stages, cells, strict=True)]
        self.sends = [stage < last_stage and cell + 1 not in cells for stage, cell in zip(stages, cells, strict=True)]
        self.loads = [stage in (0, last_stage) for stage in stages]

    def add(self, kind: str, micro_batch: int, chunk: int) -> None:
        self.ops.append(Op(kind, micro_batch, chunk))


class _Lanes:
    """By cell: in which order it sends, and how many activations its receiver may have posted."""

    def __init__(self, schedule: Schedule, receives_ahead: int | None) -> None:
        num_cells = len(schedule.places)
        self.activations: list[list[int]] = [[] for _ in range(num_cells)]
        self.gradients: list[list[int]] = [[] for _ in range(num_cells)]
        live, self.receives_ahead = [0] * num_cells, [0] * num_cells
        for rank, order in enumerate(schedule.orders):
            for kind, micro_batch, chunk in order:
                cell = schedule.cells[rank][chunk]
                if kind == FORWARD:
                    self.activations[cell].append(micro_batch)
                    live[cell] += 1
                    self.receives_ahead[cell] = max(self.receives_ahead[cell], live[cell])
                elif kind != BACKWARD_WEIGHT:
                    self.gradients[cell].append(micro_batch)
                    live[cell] -= 1
        if receives_ahead is None and is_forward_only(schedule):
            receives_ahead = _FORWARD_ONLY_RECEIVES_AHEAD
        if receives_ahead is not None:
            self.receives_ahead = [receives_ahead] * num_cells


def _free(schedule: Schedule, rank: int, lanes: _Lanes) -> tuple[Op, ...]:
    program = _Program(schedule, rank)
    cells = schedule.cells[rank]
    # By chunk: what is still to be posted, in the order in which it will be sent.
    activations = [
        deque(lanes.activations[cell - 1] if receives else ())
        for cell, receives in zip(cells, program.receives, strict=True)
    ]
    gradients = [
        deque(lanes.gradients[cell + 1] if sends else ()) for cell, sends in zip(cells, program.sends, strict=True)
    ]
    outstanding: list[set[int]] = [set() for _ in cells]
    sent: list[set[int]] = [set() for _ in cells]

    def post_next(chunk: int) -> None:
        micro_batch = activations[chunk].popleft()
        outstanding[chunk].add(micro_batch)
        program.add(POST_ACTIVATION, micro_batch, chunk)

    def post_ahead(chunk: int) -> None:
        while activations[chunk] and len(outstanding[chunk]) < lanes.receives_ahead[cells[chunk] - 1]:
            post_next(chunk)

    for chunk in range(schedule.num_chunks):
        post_ahead(chunk)
    for kind, micro_batch, chunk in schedule.orders[rank]:
        if kind == FORWARD:
            if program.loads[chunk]:
                program.add(LOAD, micro_batch, chunk)
            if program.receives[chunk]:
                # Used in another order than sent: what the lane brings before it must be posted, window or not.
                while micro_batch not in outstanding[chunk]:
                    post_next(chunk)
                program.add(WAIT_ACTIVATION, micro_batch, chunk)
                outstanding[chunk].remove(micro_batch)
                if is_forward_only(schedule):
                    post_ahead(chunk)
            program.add(RUN_FORWARD, micro_batch, chunk)
            if program.sends[chunk]:
                program.add(SEND_ACTIVATION, micro_batch, chunk)
                sent[chunk].add(micro_batch)
                # A gradient that the lane brings later waits for those before it. All of them are posted by the time
                # it is needed: the other end has run their backwards before, so this one their forwards.
                while gradients[chunk] and gradients[chunk][0] in sent[chunk]:
                    program.add(POST_GRADIENT, gradients[chunk].popleft(), chunk)
            # Nobody waits for it: the other end has as many micro-batches alive as may be posted until one's backward.
            post_ahead(chunk)
        elif kind == BACKWARD_WEIGHT:
            program.add(RUN_BACKWARD_WEIGHT, micro_batch, chunk)
        else:
            if program.sends[chunk]:
                program.add(WAIT_GRADIENT, micro_batch, chunk)
            program.add(_RUN[kind], micro_batch, chunk)
            if program.receives[chunk]:
                program.add(SEND_GRADIENT, micro_batch, chunk)
    return tuple(program.ops)


def lower_paired(schedule: Schedule, starts: tuple[list[int], ...]) -> tuple[tuple[Op, ...], ...]:
    """The ``"paired"`` programs of a schedule whose :func:`~paceline.schedules.dependencies.unit_starts` are known."""
    num_ranks, last_stage, num_cells = schedule.num_ranks, schedule.num_stages - 1, len(schedule.places)
    # Of each rank, what it sends and posts: (place in the sequence of all messages, kind, micro-batch, chunk).
    messages: list[list[tuple[int, str, int, int]]] = [[] for _ in range(num_ranks)]
    for rank, order in enumerate(schedule.orders):
        stages, cells = schedule.stages[rank], schedule.cells[rank]
        for (kind, micro_batch, chunk), start in zip(order, starts[rank], strict=True):
            stage, cell, end = stages[chunk], cells[chunk], start + UNITS[kind]
            if kind == FORWARD:
                if stage == last_stage:
                    continue
                step, edge, send, post = 1, stage, SEND_ACTIVATION, POST_ACTIVATION
            else:
                if stage == 0 or kind == BACKWARD_WEIGHT:
                    continue
                step, edge, send, post = -1, stage - 1, SEND_GRADIENT, POST_GRADIENT
            target, target_chunk = schedule.places[cell + step]
            if target != rank:
                # Of what is made at the same moment, every second edge goes first: in order along the pipeline each
                # would wait for the one before. A cell ends one action at a time, so no two places are equal.
                place = (2 * end + edge % 2) * num_cells + cell
                messages[rank].append((place, send, micro_batch, chunk))
                messages[target].append((place, post, micro_batch, target_chunk))
    return tuple(_paired(schedule, rank, starts[rank], sorted(messages[rank])) for rank in range(num_ranks))


def _paired(
    schedule: Schedule, rank: int, starts: list[int], messages: list[tuple[int, str, int, int]]
) -> tuple[Op, ...]:
    program, num_cells = _Program(schedule, rank), len(schedule.places)
    done = 0
    for (kind, micro_batch, chunk), start in zip(schedule.orders[rank], starts, strict=True):
        # What is made before this action starts comes first. Its inputs are among that, what it makes itself is not.
        while done < len(messages) and messages[done][0] < 2 * (start + 1) * num_cells:
            program.add(*messages[done][1:])
            done += 1
        if kind == FORWARD:
            if program.loads[chunk]:
                program.add(LOAD, micro_batch, chunk)
            if program.receives[chunk]:
                program.add(WAIT_ACTIVATION, micro_batch, chunk)
            program.add(RUN_FORWARD, micro_batch, chunk)
        elif kind == BACKWARD_WEIGHT:
            program.add(RUN_BACKWARD_WEIGHT, micro_batch, chunk)
        else:
            if program.sends[chunk]:
                program.add(WAIT_GRADIENT, micro_batch, chunk)
            program.add(_RUN[kind], micro_batch, chunk)
    for message in messages[done:]:
        program.add(*message[1:])
    return tuple(program.ops)
