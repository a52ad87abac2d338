"""How a report looks."""

from __future__ import annotations

import pytest

from paceline.doctor.finding import NOTE, OK, PROBLEM, Finding, as_dict, as_text, exit_status, show_ranks

FINDINGS = [
    Finding(OK, "torch", "2.13"),
    Finding(NOTE, "speed", "unequal", "see why", (1,)),
    Finding(PROBLEM, "disk", "full", "free some", (0, 1, 3)),
    Finding(PROBLEM, "tmp", "full", "free some"),
    Finding(PROBLEM, "name", "unknown", "write it down"),
]


def test_text() -> None:
    assert as_text(FINDINGS) == (
        "ok       torch  2.13\n"
        "note     speed  unequal; see why [rank 1]\n"
        "problem  disk   full [ranks 0-1, 3]\n"
        "problem  tmp    full\n"
        "problem  name   unknown\n"
        "\n"
        "What to fix\n"
        "1. free some\n"
        "2. write it down"
    )
    assert as_text(FINDINGS[:1]) == "ok       torch  2.13\n\nNo problem was found."


def test_json_and_status() -> None:
    shown = as_dict(FINDINGS)
    assert (shown["problems"], shown["notes"], shown["to_fix"]) == (3, 1, ["free some", "write it down"])
    assert shown["findings"][1] == {
        "level": "note",
        "check": "speed",
        "text": "unequal",
        "remedy": "see why",
        "ranks": (1,),
    }
    assert [exit_status(FINDINGS), exit_status(FINDINGS[:2]), exit_status([])] == [1, 0, 0]


def test_a_problem_without_a_remedy_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        Finding(PROBLEM, "disk", "full")


def test_ranks() -> None:
    assert [show_ranks(ranks) for ranks in ((3,), (0, 1, 2), (7, 1, 2, 9))] == [
        "rank 3",
        "ranks 0-2",
        "ranks 1-2, 7, 9",
    ]
