"""What is made of decisions: what ran, what was measured after them, and what may be said of saved time."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from paceline.report.page_figures import account, decision_row
from paceline.report.running import Running, StepLog
from paceline.report.switches import Configuration, configurations, decisions, saved

RUNS = Path(__file__).parent / "runs"


def recorded(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines with a loss, and decisions, of a real run."""
    lines = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line["decision"] for line in lines if "decision" in line]


def test_how_a_step_runs_in_few_characters() -> None:
    assert str(Running("1f1b", 2, (0, 5, 9, 14), 2)) == "1f1b · 5|4|5 · 2 moves"
    assert str(Running("kfkb k=2, micro-batch 4", 4, (0, 10), 1)) == "kfkb k=2 · 1 move"
    assert str(Running("1f1b", 2, (0, 10))) == "1f1b"


def test_steps_that_ran_alike_are_one_row() -> None:
    log = StepLog()
    one, other = Running("1f1b", 2, (0, 2, 4)), Running("1f1b", 2, (0, 1, 4), 1)
    for step, running in enumerate((one, one, other, other), 1):
        log.add(step, running, step / 10)
    rows = log.take()
    assert [(row["step"], row["partition"], row["seconds"]) for row in rows] == [
        (1, [0, 2, 4], [0.1, 0.2]),
        (3, [0, 1, 4], [0.3, 0.4]),
    ]
    log.add(5, other, 0.5)
    again = log.take()
    assert log.take() == []
    found = configurations([{"ran": rows}, {"ran": again}, {}])
    assert [(c.first_step, c.last_step, c.seconds) for c in found] == [(1, 2, (0.1, 0.2)), (3, 5, (0.3, 0.4, 0.5))]
    resumed = configurations([{"ran": rows}, {"ran": again}], resumed_after=[4])
    assert [(c.first_step, c.last_step) for c in resumed] == [(1, 2), (3, 4), (5, 5)]


def test_every_step_of_a_run_is_in_one_configuration() -> None:
    lines, told = recorded("tuned")
    ran = configurations(lines)
    assert [step for one in ran for step in range(one.first_step, one.last_step + 1)] == list(range(1, 61))
    for before, after in pairwise(ran):
        assert (before.schedule, before.micro_batch_size, before.partition) != (
            *(after.schedule, after.micro_batch_size, after.partition),
        )
    for decision in told:
        if decision["what"] == "partition" and decision["switched"]:
            one = next(c for c in ran if c.first_step == decision["step"] + 1)
            assert list(one.partition) == decision["to"]
            assert one.candidate == decision["schedule"]


def test_the_next_look_tells_what_became_of_a_prediction() -> None:
    lines, told = recorded("tuned")
    found = decisions(told, configurations(lines))
    assert [(d["step"], d["kind"]) for d in found] == [(d["step"], d["what"]) for d in told]
    by_step = {d["step"]: d["measured_s"] for d in told}
    for decision, raw in zip(found, told, strict=True):
        predicted_s = raw["predicted_best_s"] if raw["switched"] else raw["predicted_now_s"]
        if decision["overruled_by_partition"] or decision["step"] == 56:
            continue
        after = decision["after"]
        assert (after["first_step"], after["last_step"]) == (decision["step"] + 1, decision["step"] + 8)
        assert after["measured_s"] == by_step[decision["step"] + 8]
        assert after["predicted_s"] == predicted_s
        assert after["error"] == pytest.approx(after["measured_s"] / predicted_s - 1)
    overruled = [d["step"] for d in found if d["overruled_by_partition"]]
    assert overruled == [d["step"] for d in told if d["what"] == "partition" and d["switched"]]
    last = found[-1]["after"]  # no look follows: nothing but the host's clock
    assert (last["first_step"], last["last_step"], last["measured_s"], last["error"]) == (57, 60, None, None)
    assert last["step_s"] == median(configurations(lines)[-1].seconds[-4:])


def test_candidates_come_with_what_was_measured_when_they_ran() -> None:
    lines, told = recorded("tuned")
    found = next(d for d in decisions(told, configurations(lines)) if d["candidates"])
    raw = next(d for d in told if d["what"] == "schedule")
    assert {c["schedule"]: c["predicted_s"] for c in found["candidates"]} == raw["predicted_s"]
    predicted = [c["predicted_s"] for c in found["candidates"]]
    assert predicted == sorted(predicted)
    ran = {c["schedule"] for c in found["candidates"] if c["step_s"] is not None}
    assert ran == {"1f1b, micro-batch 1", "1f1b, micro-batch 2", "1f1b, micro-batch 4"}


def test_experts_that_moved() -> None:
    lines, told = recorded("experts")
    ran = configurations(lines)
    found = [d for d in decisions(told, ran) if d["switched"]]
    assert found
    for decision in found:
        raw = next(d for d in told if d["step"] == decision["step"])
        assert decision["predicts"] == "experts"
        assert decision["switch"]["experts"] == raw["moved"] > 0
        assert decision["switch"]["measured_s"] == raw["seconds"]
        assert decision["to"]["imbalance"] == raw["imbalance_after"]
        # Experts move at the end of a step, which is the first of the next row.
        assert decision["step"] in [one.first_step for one in ran]


def steps(first_step: int, seconds: list[float], moves: int = 0) -> Configuration:
    return Configuration(first_step, "1f1b", 2, (0, 2, 4), moves, tuple(seconds))


def test_saved_time_is_the_difference_to_the_first_pace() -> None:
    ran = [steps(1, [9.0, 1.0, 1.1, 0.9]), steps(5, [0.8, 0.5, 0.5, 0.5, 0.5], 1)]
    found = saved(ran, [4])
    assert found is not None
    assert (found["before"]["steps"], found["before"]["median_s"]) == (3, 1.0)
    assert (found["after"]["steps"], found["after"]["median_s"]) == (5, 0.5)
    assert found["saved_s"] == pytest.approx(5 * 1.0 - 2.8)  # the step that switched counts
    assert found["share"] == pytest.approx(2.2 / 5)


def test_steps_that_became_slower_are_told_too() -> None:
    found = saved([steps(1, [0.5] * 5), steps(6, [1.0] * 5, 1)], [5])
    assert found is not None
    assert found["saved_s"] == pytest.approx(-2.5)


@pytest.mark.parametrize(
    ("ran", "switched_at"),
    [
        ([], []),
        ([steps(1, [1.0] * 9)], []),
        ([steps(1, [1.0] * 3), steps(4, [0.5] * 9, 1)], [3]),  # two steps before, without the very first
        ([steps(1, [1.0] * 9), steps(10, [0.5] * 2, 1)], [9]),
        ([steps(1, [1.0] * 9, 1), steps(10, [0.5] * 30, 2)], [0, 9]),  # experts moved at the very first step
        ([steps(1, [1.0, 0.7, 1.0, 1.3, 0.8, 1.2]), steps(7, [0.9, 1.1, 0.7, 1.0, 0.8], 1)], [6]),  # as noisy as that
    ],
)
def test_nothing_is_claimed_of_too_little(ran: list[Configuration], switched_at: list[int]) -> None:
    assert saved(ran, switched_at) is None


@pytest.mark.parametrize("switched", [True, False])
def test_shares_of_replicas(switched: bool) -> None:
    told = {"what": "shares", "step": 4, "switched": switched, "why": "it pays", "switch_s": 0.01}
    told |= {"predicted_now_s": 2.0, "predicted_best_s": 1.4, "from": [4, 4], "to": [6, 2] if switched else [4, 4]}
    (found,) = decisions([told], [])
    assert (found["from"], found["to"]) == ({"shares": told["from"]}, {"shares": told["to"]})
    row = decision_row(found)
    assert row["what"] == ("4|4 → 6|2" if switched else "4|4 stays")
    assert "micro-batches of each replica" in row["note"]
    assert ("the shares once" in account([found])) == switched


def test_a_prediction_is_compared_at_the_next_look_of_its_own_kind() -> None:
    told = {"switched": False, "why": "", "switch_s": 0.0, "predicted_now_s": 2.0, "predicted_best_s": 2.0}
    logged = [
        told | {"what": kind, "step": step, "from": [], "to": [], "measured_s": measured_s}
        for step, kind, measured_s in ((4, "schedule", 1.9), (4, "shares", None), (8, "shares", None))
    ]
    logged.append(told | {"what": "schedule", "step": 8, "from": "", "to": "", "measured_s": 2.5})
    first, *_ = decisions(logged, [steps(1, [2.0] * 12)])
    assert first["after"]["measured_s"] == 2.5
    assert first["after"]["error"] == pytest.approx(0.25)


def test_what_runs_after_a_resumption_is_no_effect_of_earlier_decisions() -> None:
    told = {"what": "schedule", "switched": False, "why": "", "switch_s": 0.0, "from": "", "to": ""}
    told |= {"predicted_now_s": 2.0, "predicted_best_s": 2.0, "predicted_s": {"1f1b, micro-batch 2": 2.0}}
    logged = [told | {"step": step, "measured_s": measured_s} for step, measured_s in ((4, 2.1), (10, 1.1))]
    early, late = decisions(logged, [steps(1, [2.0] * 6), steps(7, [1.0] * 6)], resumed_after=[6])
    after = early["after"]
    assert (after["last_step"], after["step_s"], after["measured_s"], after["error"]) == (6, 2.0, None, None)
    assert [decision["candidates"][0]["step_s"] for decision in (early, late)] == [2.0, 1.0]
    assert late["after"]["step_s"] == 1.0
    ran = [steps(1, [4.0] * 2), steps(3, [2.0] * 4), steps(7, [1.0] * 6)]
    first, second, third = decisions([{**told, "step": step} for step in (1, 4, 10)], ran, resumed_after=[2, 6])
    assert [one["after"]["last_step"] for one in (first, second, third)] == [2, 6, 12]
    assert [one["candidates"][0]["step_s"] for one in (first, second, third)] == [4.0, 2.0, 1.0]
