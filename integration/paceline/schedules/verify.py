"""The proof that a schedule is complete and runs to its end, whether its messages are asynchronous or block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .dependencies import check_actions, unit_starts
from .lower import POST_ACTIVATION, POST_GRADIENT, SEND_ACTIVATION, SEND_GRADIENT, Op, lower_paired
from .schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule


@dataclass(frozen=True)
class Proof:
    """What holds for a schedule that :func:`verify` accepts.

    Args:
        peak_activations: of each rank: the most pairs of chunk and micro-batch whose forward runs or has run, and whose
            backward (where it is split: that of the inputs) has not ended. 0 without backwards: nothing stays.
        backward_in_order: in every chunk the backwards run in micro-batch order, so that gradients are summed in the
            same order by every such schedule. Those of the inputs too: there are parameters that do not wait.
        peak_deferred: of each rank: the most pairs whose backward of the inputs has ended, and that of the weights has
            not: their inputs and output gradients stay.
        peak_held: of each rank: the most pairs that are either at a time, live or deferred.
    """

    peak_activations: tuple[int, ...]
    backward_in_order: bool
    peak_deferred: tuple[int, ...]
    peak_held: tuple[int, ...]


def verify(schedule: Schedule, *, forward_only: bool = False, paired: bool = True) -> Proof:
    """Proves that a schedule computes every micro-batch once, and that it cannot hang.

    The replay of its dependencies proves it for asynchronous messages, the replay of its ``"paired"`` programs with
    sends and receives that block proves it for those. Cost is linear in the actions.

    Args:
        schedule: any.
        forward_only: it is for evaluation, without backwards.
        paired: also prove the ``"paired"`` programs, which takes most of the time and the memory.

    Raises:
        ValueError: with the rank, the position, the rule that is broken and the remedy.
    """
    check_actions(schedule, forward_only=forward_only)
    starts = unit_starts(schedule)
    if paired:
        replay_blocking(schedule, lower_paired(schedule, starts))
    found = [peaks(order) for order in schedule.orders]
    return Proof(
        tuple(peak.live for peak in found),
        all(map(_is_in_order, schedule.orders)),
        tuple(peak.deferred for peak in found),
        tuple(peak.held for peak in found),
    )


class Peaks(NamedTuple):
    """Of one rank: see :class:`Proof`."""

    live: int
    deferred: int
    held: int


def peaks(order: Sequence[Action]) -> Peaks:
    """The most pairs of chunk and micro-batch that an order keeps."""
    live = deferred = most_live = most_deferred = most_held = 0
    for kind, _, _ in order:
        if kind == FORWARD:
            live += 1
            if live > most_live:
                most_live = live
            if live + deferred > most_held:
                most_held = live + deferred
        elif kind == BACKWARD_WEIGHT:
            deferred -= 1
        else:
            live -= 1
            if kind == BACKWARD_INPUT:
                deferred += 1
                if deferred > most_deferred:
                    most_deferred = deferred
    if live:  # without backwards
        return Peaks(0, 0, 0)
    return Peaks(most_live, most_deferred, most_held)


def _is_in_order(order: Sequence[Action]) -> bool:
    """Whether gradients of every parameter are added in micro-batch order."""
    # By chunk: the latest micro-batch that added to what waits for the weights' backward, and to what does not.
    latest_weight: dict[int, int] = {}
    latest_other: dict[int, int] = {}
    for kind, micro_batch, chunk in order:
        if kind != FORWARD:
            for latest, adds in ((latest_weight, kind != BACKWARD_INPUT), (latest_other, kind != BACKWARD_WEIGHT)):
                if adds:
                    if micro_batch < latest.get(chunk, -1):
                        return False
                    latest[chunk] = micro_batch
    return True


def replay_blocking(schedule: Schedule, programs: Sequence[Sequence[Op]]) -> None:
    """Runs programs in which every send and every post blocks until the other end has come to the same message.

    Args:
        schedule: that the programs run; it tells which stage a chunk is.
        programs: one a rank, as :func:`~paceline.schedules.lower.lower` makes them.

    Raises:
        ValueError: they do not come to an end.
    """
    num_ranks = len(programs)
    positions = [0] * num_ranks
    # Who stands at a message: (activation or gradient, the sending cell, micro-batch) -> rank.
    standing: dict[tuple[bool, int, int], int] = {}
    runnable = list(range(num_ranks))
    while runnable:
        rank = runnable.pop()
        program, cells = programs[rank], schedule.cells[rank]
        for position in range(positions[rank], len(program)):
            kind, micro_batch, chunk, _ = program[position]
            if kind in (SEND_ACTIVATION, POST_ACTIVATION):
                message = (True, cells[chunk] if kind == SEND_ACTIVATION else cells[chunk] - 1, micro_batch)
            elif kind in (SEND_GRADIENT, POST_GRADIENT):
                message = (False, cells[chunk] if kind == SEND_GRADIENT else cells[chunk] + 1, micro_batch)
            else:
                continue
            other = standing.pop(message, None)
            if other is None:
                standing[message] = rank
                positions[rank] = position
                break
            positions[other] += 1
            runnable.append(other)
        else:
            positions[rank] = len(program)
    if standing:
        lines = []
        for rank in sorted(standing.values())[:8]:
            op = programs[rank][positions[rank]]
            lines.append(f"rank {rank}, op {positions[rank]}: {op.kind} of micro-batch {op.micro_batch}.{op.chunk}")
        raise ValueError(
            "programs whose sends and receives block do not come to an end; bring their messages into one sequence."
            " They stop at:\n" + "\n".join(lines)
        )
