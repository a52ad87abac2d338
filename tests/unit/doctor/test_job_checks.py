"""What the facts and trials of several ranks mean together, by values."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from paceline.doctor.finding import NOTE, OK, PROBLEM, Finding
from paceline.doctor.job_checks import clock_offsets, judge, rows, table

LINK = {"latency_s": 1e-3, "bytes_per_s": 1e9, "back_bytes_per_s": 2e9, "right": True}


def facts_of(num_ranks: int, num_hosts: int = 1) -> dict[int, Any]:
    return {
        rank: {
            "identity": f"host{rank * num_hosts // num_ranks}",
            "host": "same-name",
            "versions": {"python": "3.11.7", "paceline": "0.1.0", "torch": "2.13", "peft": "1.0"},
            "environment": {"RANK": str(rank), "NCCL_DEBUG": "WARN"},
            "ahead_s": 1000.0,
            "findings": [],
        }
        for rank in range(num_ranks)
    }


def trials_of(num_ranks: int) -> dict[int, Any]:
    return {
        rank: {"clock_s": 0.0, "speed": 100.0, "link": dict(LINK) if rank < num_ranks - 1 else {}}
        for rank in range(num_ranks)
    }


def bad(facts: dict[int, Any], size: int, trials: dict[int, Any] | None = None) -> list[Finding]:
    return [one for one in judge(facts, size, trials) if one.level != OK]


def test_all_is_well() -> None:
    assert bad(facts_of(4, 2), 4, trials_of(4)) == []
    found = {one.check: one.text for one in judge(facts_of(4, 2), 4, trials_of(4))}
    assert found["ranks"] == "all 4 answer, on 2 hosts"
    assert found["clocks"] == "at most 0 s apart"
    texts = [one.text for one in judge(facts_of(4, 2), 4, trials_of(4)) if one.check == "links"]
    assert texts == [
        "2 links inside hosts: 1 ms, 1e+03 MB/s",
        "1 link between hosts: 1 ms, 1e+03 MB/s",
    ]


def test_missing_ranks_are_named() -> None:
    facts = {rank: known for rank, known in facts_of(8).items() if rank not in (2, 3, 6)}
    (missing,) = bad(facts, 8)
    assert (missing.level, missing.text) == (PROBLEM, "ranks 2-3, 6 of 8 do not answer")
    assert "ranks 2-3, 6" in missing.remedy


def test_versions_that_differ() -> None:
    facts = facts_of(4)
    facts[3]["versions"]["torch"] = "2.12"
    facts[2]["versions"]["peft"] = None
    facts[1]["versions"]["python"] = "3.11.9"
    found = {one.check: one for one in bad(facts, 4)}
    assert {name: one.level for name, one in found.items()} == {
        "torch differs": PROBLEM,
        "peft differs": NOTE,
        "python differs": NOTE,
    }
    assert found["torch differs"].text == "2.13 on ranks 0-2, 2.12 on rank 3"
    assert found["peft differs"].text == "1.0 on ranks 0-1, 3, not installed on rank 2"
    facts[1]["versions"]["python"] = "3.12.1"
    assert {one.check: one.level for one in bad(facts, 4)}["python differs"] == PROBLEM


def test_variables_that_differ() -> None:
    facts = facts_of(2)
    facts[1]["environment"] |= {
        "NCCL_IB_DISABLE": "1",
        "NCCL_IB_HCA": "mlx5_2",
        "HF_HUB_OFFLINE": "1",
        "NCCL_DEBUG": "INFO",
    }
    levels = {one.check: one.level for one in bad(facts, 2)}
    assert levels == {
        "NCCL_IB_DISABLE differs": PROBLEM,
        "NCCL_IB_HCA differs": NOTE,
        "HF_HUB_OFFLINE differs": NOTE,
        "NCCL_DEBUG differs": NOTE,
    }


def test_problems_of_a_host_are_told_once_and_with_its_ranks() -> None:
    facts = facts_of(4, 2)
    locks = [asdict(Finding(PROBLEM, "build lock", f"lock {rank}", "rm")) for rank in range(4)]
    for rank in (2, 3):
        facts[rank]["findings"] = [locks[rank]]
    (lock,) = bad(facts, 4)
    assert (lock.level, lock.check, lock.ranks) == (PROBLEM, "build lock", (2,))
    for rank in range(4):
        facts[rank]["findings"].append(asdict(Finding(PROBLEM, "disk", "full", "free")))
    told = {one.check: one.ranks for one in bad(facts, 4)}
    assert told == {"build lock": (2,), "disk": ()}


def test_clocks() -> None:
    """A monotonic clock that began at another time is no difference, a time of day is."""
    facts, trials = facts_of(3, 3), trials_of(3)
    trials[0]["clock_s"], trials[1]["clock_s"] = 500.0, -200.0
    facts[1]["ahead_s"] = 1000.0 - 500.0 + 0.001
    facts[2]["ahead_s"] = 1000.0 - 300.0 - 2.0
    offsets = clock_offsets(trials, facts)
    assert [round(offsets[rank], 6) for rank in range(3)] == [0.0, 0.001, -2.0]
    (clocks,) = bad(facts, 3, trials)
    assert (clocks.level, clocks.text) == (NOTE, "at most 2 s apart (against rank 0: rank 2 -2 s)")
    facts[2]["ahead_s"] -= 60
    (clocks,) = bad(facts, 3, trials)
    assert clocks.level == PROBLEM
    assert clock_offsets({2: trials[2]}, {2: facts[2]}) == {}, "rank 0 has not told its time"


def test_output_folder() -> None:
    trials = trials_of(3)
    for rank in range(3):
        trials[rank]["output"] = {"path": "/out", "error": "", "is_seen": rank < 2}
    (output,) = bad(facts_of(3), 3, trials)
    assert "rank 2 cannot see" in output.text
    for rank in range(3):
        trials[rank]["output"] = {"path": "/out", "error": "read-only", "is_seen": False}
    (output,) = bad(facts_of(3), 3, trials)
    assert output.text == "/out: rank 0 cannot write there: read-only"


def test_speeds() -> None:
    trials = trials_of(3)
    trials[1]["speed"] = 50.0
    (speed,) = bad(facts_of(3), 3, trials)
    assert (speed.level, speed.text) == (NOTE, "rank 0 computes 2.00 times as fast as rank 1")


def test_links() -> None:
    facts, trials = facts_of(5, 5), trials_of(5)
    trials[2]["link"]["back_bytes_per_s"] = 1e8
    (slow,) = bad(facts, 5, trials)
    assert slow.level == NOTE
    assert "rank 2 to 3 100 MB/s" in slow.text
    for rank in range(4):
        trials[rank]["link"] |= {"bytes_per_s": 2e7, "back_bytes_per_s": None}
    (slow,) = bad(facts, 5, trials)
    assert "adaptive" in slow.remedy
    trials[0]["link"]["right"] = False
    assert [one.level for one in bad(facts, 5, trials)] == [PROBLEM, NOTE]
    for rank in range(4):
        trials[rank]["link"] = {**LINK, "bytes_per_s": None, "back_bytes_per_s": None}
    assert bad(facts, 5, trials) == []


def test_the_table_has_a_row_for_each_rank_and_gaps_for_what_is_not_known() -> None:
    facts = copy.deepcopy(facts_of(3))
    del facts[2]
    shown = rows(facts, 3, {0: trials_of(3)[0]})
    assert [row["answers"] for row in shown] == [True, True, False]
    assert shown[0]["next_bytes_per_s"] == LINK["bytes_per_s"]
    heading, *lines = table(shown).splitlines()
    assert heading.split()[:2] == ["rank", "host"]
    assert lines[0].split()[-2:] == ["1", "1000"]
    assert lines[2].split() == ["2", *["-"] * 11]
    assert table(rows({}, 1)).splitlines()[1].split() == ["0", *["-"] * 11]
