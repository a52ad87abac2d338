"""Changes of steps are noticed by one rank, and all of them plan soon."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from paceline.runtime.step_changes import MEASURED, StepChanges


class Rank:
    def __init__(self, *, decides: bool) -> None:
        self.notice = SimpleNamespace(notices_change=False, change_is_noticed=False)
        self.forgot = 0
        self.changes = StepChanges(self.notice, self.forget, decides=decides)

    def forget(self) -> None:
        self.forgot += 1


def run(
    seconds: list[float], planned_at: Sequence[int] = (), next_planning: int = 1000
) -> list[tuple[list[int | None], list[int]]]:
    """By steps done, when each of two ranks was to plan, and how often it had forgotten by then.

    Args:
        planned_at: steps after which a planning came by itself, beside the one after the first.
    """
    ranks = [Rank(decides=True), Rank(decides=False)]
    told: list[tuple[list[int | None], list[int]]] = []
    for done, each in enumerate(seconds):
        plannings = [rank.changes.planning_by(done, next_planning) for rank in ranks]
        told.append((plannings, [rank.forgot for rank in ranks]))
        noticed = any(rank.notice.notices_change for rank in ranks)  # as they tell each other when a step begins
        for rank in ranks:
            rank.notice.change_is_noticed = noticed
            rank.changes.step_took(each)
        if done + 1 in (1, *planned_at):
            for rank in ranks:
                rank.changes.planned(switched=False)
    return told


def test_all_ranks_plan_after_two_steps_that_are_measured_anew() -> None:
    told = run([1.0] * 8 + [2.0] * 6)
    assert all(plannings == [None, None] for plannings, _ in told[:11] + told[12:])
    assert told[11] == ([11 + MEASURED] * 2, [1, 1]), "after two longer steps, and one that began with the notice"


def test_a_planning_just_after_a_change_is_not_the_one_that_it_calls_for() -> None:
    """Nearly all that it was made of is of the steps before."""
    for at in ({"planned_at": [10]}, {"next_planning": 11}, {"next_planning": 12}):
        told = run([1.0] * 8 + [2.0] * 4, **at)
        assert told[11] == ([11 + MEASURED] * 2, [1, 1]), at


def test_a_planning_that_is_near_counts_for_all_where_plannings_are_frequent() -> None:
    """Nothing is forgotten, and nothing planned besides."""
    told = run([1.0] * 8 + [2.0] * 4, planned_at=[5], next_planning=12)
    assert told[11] == ([12, 12], [0, 0])
    assert all(plannings == [None, None] for plannings, _ in run([1.0] * 8 + [2.0] * 4, planned_at=[5, 10]))


def test_before_the_first_planning_nothing_is_usual() -> None:
    rank = Rank(decides=True)
    for each in [1.0] * 6 + [2.0] * 6:
        rank.changes.step_took(each)
    assert not rank.notice.notices_change


def test_what_steps_take_after_a_planning_is_usual() -> None:
    rank = Rank(decides=True)
    noticed = []
    for seconds, count in ((1.0, 8), (2.0, 4), (2.0, 8)):
        rank.changes.planned(switched=False)
        for _ in range(count):
            rank.changes.step_took(seconds)
        noticed.append(rank.notice.notices_change)
        rank.notice.change_is_noticed = noticed[-1]
        rank.changes.planning_by(0, 1000)
    assert noticed == [False, True, False]
