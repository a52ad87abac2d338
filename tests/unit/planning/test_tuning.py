"""Values of the tuning loop: intervals, records in a form for JSON, the log that is taken out."""

from __future__ import annotations

from paceline.planning.switching import Decision
from paceline.planning.tuning import EXPERTS, KEPT, SCHEDULE, DecisionLog, DecisionRecord, TuningInterval


def record(what: str = EXPERTS, switched: bool = True) -> DecisionRecord:
    decision = Decision(switched, "saves 1 s", 3.0, 2.5, 0.25, 0.5, 0.0)
    return DecisionRecord(what, 12, switched, decision, 2.0, {"moved": 4})


def test_intervals_come_soon_at_first_and_after_a_pause() -> None:
    interval = TuningInterval(50, first=10)
    found = {done: steps for done in range(1, 121) if (steps := interval.steps_if_due(done)) is not None}
    assert found == {10: 10, 60: 50, 110: 50}
    interval.go_on(200)
    assert [done for done in range(201, 261) if interval.steps_if_due(done) is not None] == [210, 260]
    never = TuningInterval(0)
    assert all(never.steps_if_due(done) is None for done in range(100))


def test_an_interval_that_begins_late_counts_all_steps() -> None:
    interval = TuningInterval(3)
    assert [interval.steps_if_due(done) for done in (4, 5, 6, 7, 9, 10)] == [4, None, None, 3, None, 3]


def test_a_record_in_a_form_for_json() -> None:
    assert record().to_json() == {
        "what": "experts",
        "step": 12,
        "switched": True,
        "why": "saves 1 s",
        "predicted_now_s": 3.0,
        "predicted_best_s": 2.0,
        "switch_s": 0.25,
        "moved": 4,
    }
    assert record().of_stage(1).to_json() == {**record().to_json(), "stage": 1}


def test_the_log_counts_moves_and_gives_each_decision_once() -> None:
    log = DecisionLog()
    log.add([record(), record(SCHEDULE), record(switched=False)])
    assert (len(log.take_decisions()), log.take_decisions(), log.num_moves) == (3, [], 1)
    log.add_measurement({"step": 1})
    assert (log.take_measurements(), log.take_measurements()) == ([{"step": 1}], [])
    for _ in range(KEPT + 1):
        log.add([record()])
    assert (len(log.decisions), log.num_moves) == (KEPT, KEPT + 2)
