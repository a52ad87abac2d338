"""Reading steps: which ranks read, what they hand out by number, and programs for ranks with several stages."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import ScheduleChoice
from paceline.runtime.causal_lm_steps import Readers
from paceline.runtime.model_support import PlainSteps
from paceline.runtime.programs import Programs
from paceline.runtime.steps_ahead import ByNumber
from paceline.schedules import families
from paceline.schedules.directions import routes
from paceline.schedules.lower import FREE, LOAD, RUN_BACKWARD, RUN_FORWARD, SEND_ACTIVATION, UPDATE


@pytest.mark.parametrize(
    ("ways", "reads", "speaks"),
    [
        (((0, 1, 2),), {0: 0, 2: 1}, 2),
        (((0,),), {0: 0}, 0),
        (((0, 1, 0, 1),), {0: 0, 1: 1}, 1),
        (((0, 1, 1, 0),), {0: 0}, 0),
        (routes(4, 2), {0: 0, 3: 1}, 3),
    ],
)
def test_the_ranks_with_an_end_of_a_direction_read_and_one_counts(
    ways: tuple[tuple[int, ...], ...], reads: dict[int, int], speaks: int
) -> None:
    found = {device: Readers.of(ways, device) for device in range(max(ways[0]) + 1)}
    assert {device: reader.number for device, reader in found.items() if reader.reads} == reads
    assert {reader.size for reader in found.values()} == {len(reads)}
    assert [device for device, reader in found.items() if reader.speaks] == [speaks]


class Reader:
    """An engine whose data is a list."""

    global_steps = 3

    def __init__(self, data: Any) -> None:
        self.data_iterator = iter(data)

    def _next_batch(self) -> Any:
        return next(self.data_iterator)

    def checkpoint_error(self) -> None:
        return None


def steps_of(reader: Reader, told: list[Any], reads: bool = True) -> PlainSteps:
    def settle(error: BaseException | None, doing: str, *, notices: bool) -> bool:
        told.append((type(error), doing))
        if error is not None:
            raise error
        return notices

    control: Any = SimpleNamespace(settle=settle)
    return PlainSteps(reader, control, nullcontext, reads=reads)


def test_a_micro_batch_is_handed_out_as_often_as_a_rank_needs_it() -> None:
    told: list[Any] = []
    steps = steps_of(Reader("abcd"), told)
    assert steps.open(2) == 2
    assert [steps.batch(number) for number in (0, 1, 0, 1)] == ["a", "b", "a", "b"]
    steps.open(2)
    assert steps.batch(0) == "c"
    assert told == [(type(None), "beginning step 3")] * 2


def test_a_change_that_a_rank_has_noticed_is_told_when_a_step_begins() -> None:
    steps = steps_of(Reader("abcd"), [])
    steps.notices_change = True
    steps.open(2)
    assert steps.change_is_noticed
    steps.notices_change = False
    steps.open(2)
    assert not steps.change_is_noticed


def test_data_that_ends_stops_all_before_anything_runs() -> None:
    told: list[Any] = []
    with pytest.raises(StopIteration):
        steps_of(Reader("a"), told).open(2)
    assert told == [(StopIteration, "beginning step 3")]
    told.clear()
    steps_of(Reader(""), told, reads=False).open(2)
    assert told == [(type(None), "beginning step 3")]


def test_the_last_steps_are_kept_by_the_numbers_of_their_micro_batches() -> None:
    kept = ByNumber(2, 2)
    for step, values in enumerate(("ab", "cd", "ef")):
        kept.add(step, values)
    assert [kept[number] for number in (2, 3, 4, 5)] == ["c", "d", "e", "f"]
    assert list(kept) == ["e", "f"]
    with pytest.raises(KeyError):
        kept[1]


def test_a_program_is_of_the_stages_that_the_rank_holds() -> None:
    choice = ScheduleChoice("dualpipev", chunks=2)
    programs = [Programs(choice, choice.routes(2), device, FREE) for device in range(2)]
    first, second = (program.training(4) for program in programs)
    assert first[-1].kind == UPDATE
    for ops in (first, second):
        for kind in (RUN_FORWARD, RUN_BACKWARD):
            assert sorted((op.micro_batch, op.chunk) for op in ops if op.kind == kind) == [
                (m, c) for m in range(4) for c in range(2)
            ]
    assert {op.chunk for op in first if op.kind == LOAD} == {0, 1}, "both ends of the model are here"
    assert not any(op.kind == LOAD for op in second)
    assert [op.chunk for op in second if op.kind == SEND_ACTIVATION] == [1] * 4, "its first stage's go to its second"
    assert [op.micro_batch for op in programs[0].forwards(3) if op.kind == RUN_FORWARD] == [0, 1, 0, 1, 2, 2]


def test_schedules_for_other_stages_are_refused() -> None:
    choice = ScheduleChoice("interleaved", chunks=2)
    programs = Programs(choice, choice.routes(2), 0, FREE)
    programs.set(families.interleaved(2, 4, 2), 4)
    for schedule in (families.one_f_one_b(2, 4), families.dualpipev(2, 4), families.interleaved(2, 4, 3)):
        with pytest.raises(ValueError, match=r"this pipeline has 2 ranks with the stages \[\[0, 2\], \[1, 3\]\]"):
            programs.set(schedule, 4)
    with pytest.raises(ValueError, match="has 8 micro-batches and a step 4"):
        programs.set(families.interleaved(2, 8, 2), 4)
