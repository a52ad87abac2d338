"""What a run may choose at its start: the number of stages, and in how many chunks a rank holds each."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import PacelineConfig
from paceline.config.schedules import resolve_schedule
from paceline.config.stage_counts import is_planned, may_be_planned, may_have_chunks, stages_a_rank

PLANNED_CHUNKS = {"type": "adaptive", "chunks": "plan"}


def section(**pipeline: Any) -> PacelineConfig:
    return PacelineConfig.of({"paceline": {"pipeline": pipeline}})


@pytest.mark.parametrize(
    ("pipeline", "planned", "unasked", "chunks"),
    [
        ({}, False, True, True),
        ({"stages": 2}, False, False, True),
        ({"stages": "plan"}, True, True, True),
        ({"stages": "plan", "schedule": "adaptive"}, True, True, False),
        ({"stages": "plan", "schedule": "1f1b"}, True, True, False),
        ({"stages": "plan", "schedule": {"chunks": 2}}, False, False, False),
        ({"stages": "plan", "schedule": "zbv"}, False, False, False),
        ({"stages": 2, "schedule": PLANNED_CHUNKS}, True, True, True),
        ({"stages": 2, "schedule": {"chunks": "plan"}}, True, True, True),
        ({"schedule": PLANNED_CHUNKS, "partition": [0, 3, 6]}, False, False, True),
        ({"stages": "plan", "partition": [0, 3, 6]}, False, False, True),
        ({"stages": "plan", "schedule": {"late_gradients": True}}, False, False, False),
        ({"stages": "plan", "recompute": "fit"}, True, True, True),
        ({"stages": "plan", "recompute": 1}, False, False, False),
    ],
)
def test_what_is_planned(pipeline: dict[str, Any], planned: bool, unasked: bool, chunks: bool) -> None:
    read = section(**pipeline)
    assert is_planned(read, {}) == planned
    assert is_planned(read, {}, unasked=True) == unasked
    assert may_have_chunks(read) == chunks


def test_deepspeeds_stages_count_too() -> None:
    theirs = {"pipeline": {"stages": 2}}
    assert not is_planned(section(), theirs, unasked=True)
    assert is_planned(section(schedule=PLANNED_CHUNKS), theirs)


def test_until_chunks_are_planned_there_is_one() -> None:
    read = section(stages=2, schedule=PLANNED_CHUNKS)
    assert stages_a_rank(read) == 1
    choice, chosen = resolve_schedule(read, 2, 8, micro_batch_size=1)
    assert (choice.type, choice.chunks) == ("adaptive", None)
    assert not any(path.endswith("chunks") for path in chosen)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"type": "interleaved", "chunks": "plan"}, 'planned for the type "adaptive" and the type is "interleaved"'),
        ({"type": "generated", "chunks": "plan"}, 'planned for the type "adaptive" and the type is "generated"'),
        ({"type": "adaptive", "chunks": "auto"}, "chunks"),
        ({"type": "adaptive", "chunks": 0}, "chunks"),
    ],
)
def test_chunks_that_cannot_be_written(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(schedule=schedule)


def test_late_gradients_have_one_stage_a_rank() -> None:
    read = section(schedule={"chunks": "plan", "late_gradients": True})
    with pytest.raises(ValueError, match='chunks is "plan" and late_gradients true'):
        resolve_schedule(read, 2, 8, micro_batch_size=1)


@pytest.mark.parametrize(
    ("pipeline", "counted", "line"),
    [
        ({}, False, "the job paceline.launch.finetune measures its cluster, and may take another number"),
        ({"stages": "plan"}, False, "a run measures its cluster, and may take another number"),
        ({}, True, ""),
        ({"stages": 2}, False, ""),
        ({"stages": "plan"}, True, "may hold each in two chunks"),
        ({"stages": "plan", "schedule": "adaptive"}, True, ""),
        ({"stages": 2, "schedule": PLANNED_CHUNKS}, False, "may hold each in two chunks"),
    ],
)
def test_commands_say_what_a_run_may_choose(pipeline: dict[str, Any], counted: bool, line: str) -> None:
    said = may_be_planned(section(**pipeline), {"gradient_accumulation_steps": 8} if counted else {}, 4)
    assert line in said
    assert bool(said) == bool(line)
    assert may_be_planned(section(**pipeline), {}, 1) == ""
