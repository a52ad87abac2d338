"""The proof that a schedule is complete and runs to its end, whether its messages are asynchronous or block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .dependencies import check_actions, unit_starts
from .lower import POST_ACTIVATION, POST_GRADIENT, SEND_ACTIVATION, SEND_GRADIENT, Op, lower_paired
from .schedule import FORWARD, Schedule


@dataclass(frozen=True)
class Proof:
    """What holds for a schedule that :func:`verify` accepts.

    Args:
        peak_activations: of each rank: the most pairs of chunk and micro-batch whose forward runs or has run, and whose
            backward has not ended. 0 without backwards: nothing stays.
        backward_in_order: in every chunk the backwards run in micro-batch order, so that gradients are summed in the
            same order by every such schedule.
    """

    peak_activations: tuple[int, ...]
    backward_in_order: bool


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
    backward_in_order = True
    peaks = []
    for order in schedule.orders:
        live = peak = 0
        latest = [-1] * schedule.num_chunks
        for kind, micro_batch, chunk in order:
            if kind == FORWARD:
                live += 1
                if live > peak:
                    peak = live
            else:
                live -= 1
                backward_in_order = backward_in_order and micro_batch > latest[chunk]
                latest[chunk] = micro_batch
        peaks.append(0 if forward_only else peak)
    return Proof(tuple(peaks), backward_in_order)


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
