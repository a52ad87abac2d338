"""Calls of the paired order, replayed as NCCL carries them out: every schedule comes to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pytest

from paceline.comm.transport import MOST_AT_A_TIME, calls_of
from paceline.schedules import families
from paceline.schedules.lower import lower
from paceline.schedules.schedule import Schedule
from paceline.schedules.split_families import SPLIT_FAMILIES

COMPUTE = ("forward", "backward", "backward_input", "backward_weight")
Message = tuple[str, int, int, int]
"""Activation or gradient, the stage that it comes from, its micro-batch, number of the tensor."""
Operation = tuple[Message, int, bool]
"""Message, peer, whether it is sent."""
Cut = Callable[[Sequence[tuple[int, bool]]], list[range]]


@dataclass
class Rank:
    """A rank: the computations and calls that it has issued, in order, and how far it has come."""

    calls: list[list[set[Operation]]] = field(default_factory=list)
    """Each with its passes."""
    needs: list[set[Message]] = field(default_factory=list)
    """Messages that each computation waits for."""
    computed_before: list[int] = field(default_factory=list)
    """Number of computations that each call waits for."""
    computed: int = 0
    done: set[Message] = field(default_factory=set)

    @property
    def under_way(self) -> set[Operation]:
        """The pass that runs now."""
        for call, before in zip(self.calls, self.computed_before, strict=True):
            for operations in call:
                if left := {one for one in operations if one[0] not in self.done}:
                    return left if before <= self.computed else set()
        return set()


def ranks_of(schedule: Schedule, num_tensors: int, cut: Cut) -> list[Rank]:
    programs, holder = lower(schedule, order="paired"), {}
    for rank, cells in enumerate(schedule.cells):
        holder.update(dict.fromkeys(cells, rank))
    found = []
    for rank, program in enumerate(programs):
        one, waiting, needs = Rank(), list[Operation](), set[Message]()
        for kind, micro_batch, chunk, _ in program:
            verb, _, what = kind.partition("_")
            if kind in COMPUTE or verb == "wait":
                _flush(one, waiting, cut)
            if kind in COMPUTE:
                one.needs.append(needs)
                needs = set()
            elif verb in ("post", "send", "wait"):
                stage = schedule.cells[rank][chunk]
                step = (1 if what == "activation" else -1) * (1 if verb == "send" else -1)
                source = stage if verb == "send" else stage + step
                messages = [(what, source, micro_batch, number) for number in range(num_tensors)]
                if verb == "wait":
                    needs.update(messages)
                else:
                    waiting += [(message, holder[stage + step], verb == "send") for message in messages]
        _flush(one, waiting, cut)
        found.append(one)
    return found


def _flush(rank: Rank, waiting: list[Operation], cut: Cut) -> None:
    for numbers in cut([(peer, sends) for _, peer, sends in waiting]):
        rank.calls.append([set(operations) for operations in passes([waiting[number] for number in numbers])])
        rank.computed_before.append(len(rank.needs))
    waiting.clear()


def passes(call: Sequence[Operation]) -> Iterator[list[Operation]]:
    """The first operation each way with each peer, then the second ones, and so on."""
    seen: dict[tuple[int, bool], int] = {}
    numbered = []
    for operation in call:
        way = operation[1:]
        seen[way] = number = seen.get(way, -1) + 1
        numbered.append((number, operation))
    for _, group in groupby(sorted(numbered, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        yield [operation for _, operation in group]


def comes_to_its_end(ranks: Sequence[Rank]) -> bool:
    while True:
        is_moving = False
        offered = [rank.under_way for rank in ranks]
        for number, rank in enumerate(ranks):
            for message, peer, sends in offered[number]:
                if (message, number, not sends) in offered[peer]:
                    rank.done.add(message)
                    is_moving = True
            while rank.computed < len(rank.needs) and rank.needs[rank.computed] <= rank.done:
                rank.computed += 1
                is_moving = True
        if not is_moving:
            return all(not rank.under_way and rank.computed == len(rank.needs) for rank in ranks)


def together(operations: Sequence[tuple[int, bool]]) -> list[range]:
    return [range(len(operations))] if operations else []


def apart(operations: Sequence[tuple[int, bool]]) -> list[range]:
    return calls_of(operations, 2)


def one_by_one(operations: Sequence[tuple[int, bool]]) -> list[range]:
    return calls_of(operations, MOST_AT_A_TIME + 1)


SCHEDULES: dict[str, Schedule] = {
    **{f"1f1b {stages}": families.one_f_one_b(stages, 8) for stages in (2, 4, 9)},
    "forwards": families.forward_only(4, 8),
    "kfkb": families.kfkb(4, 8, 2),
    "eager": families.eager(4, 8, 1.0),
    "gpipe": families.gpipe(4, 8),
    "interleaved": families.interleaved(4, 8, 2),
    "dualpipev": families.dualpipev(4, 8),
    **{name: make(4, 8) for name, make in SPLIT_FAMILIES.items()},
}


@pytest.mark.parametrize("cut", [apart, one_by_one])
@pytest.mark.parametrize("num_tensors", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_comes_to_its_end(name: str, num_tensors: int, cut: Cut) -> None:
    assert comes_to_its_end(ranks_of(SCHEDULES[name], num_tensors, cut))


@pytest.mark.parametrize("stages", [2, 4])
def test_it_would_not_with_all_in_one_call(stages: int) -> None:
    """Hidden states and a mask: two tensors go, and a gradient is to come."""
    assert comes_to_its_end(ranks_of(SCHEDULES[f"1f1b {stages}"], 1, together))
    assert not comes_to_its_end(ranks_of(SCHEDULES[f"1f1b {stages}"], 2, together))


def test_calls() -> None:
    operations = [(1, True), (1, True), (1, False), (0, True), (1, False)]
    assert calls_of(operations, 4) == [range(1), range(1, 4), range(4, 5)]
    assert calls_of(operations, MOST_AT_A_TIME + 1) == [range(n, n + 1) for n in range(5)]
    assert calls_of([], 2) == []
