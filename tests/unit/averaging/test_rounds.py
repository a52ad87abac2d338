"""Rounds whose lighthouse answers what the tests say: who may take part, and what becomes of attempts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.averaging import presence, rounds, weighted_sums
from paceline.averaging.presence import Closed
from paceline.averaging.rounds import Islands, Left
from paceline.averaging.rules import Report


def report(island: int, **told: Any) -> Report:
    return Report(**{**vars(Report(island, 7, 0.5, 2.0, 100, True, 1, 100)), **told})


class Lighthouse:
    """A presence that is answered at once: each answer is the islands of a quorum, or an error."""

    address, id = "127.0.0.1", "island0:own"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.is_closed = False
        self.asked: list[dict[str, Any]] = []

    def quorum(self, own: Report, failures: int, timeout_s: float, **options: Any) -> Any:
        if self.is_closed:
            raise Closed("closed")
        self.asked.append({"failures": failures, "timeout_s": timeout_s, **options})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        members = [member(own, self.id), *answer]
        return SimpleNamespace(participants=members, quorum_id=1, created=SimpleNamespace(seconds=0, nanos=0))

    def find_again(self, deadline: float) -> None:
        self.asked.append({"finds again": True})

    def is_called(self, finished: int) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


def member(told: Report, name: str = "", host: str = "127.0.0.1") -> Any:
    data = presence._data_of(told, 0)
    return SimpleNamespace(replica_id=name or f"island{told.island}:x", store_address=f"{host}:1", data=data)


def islands(lighthouse: Lighthouse, **options: Any) -> Islands:
    given = {"min_islands": 1, "timeout_s": 600.0, **options}
    return Islands("a:1", 0, join=lambda *args: lighthouse, **given)  # type: ignore[arg-type,return-value]


@pytest.fixture(autouse=True)
def _does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_PAUSE_S", 0.01)
    monkeypatch.setattr(weighted_sums, "CONNECT_S", 0.2)


def test_reports_arrive_as_they_were_sent() -> None:
    for told in (report(3, loss=math.nan, checksum=math.inf, digest=2**63 + 1), report(1, counts=False)):
        assert repr(presence.report_of(member(told))) == repr(told)
    with pytest.raises(ValueError, match="no island of this version of paceline"):
        presence.report_of(SimpleNamespace(replica_id="x", data={"report": {"island": 1}}))


def test_an_island_alone_keeps_what_it_has() -> None:
    found = islands(Lighthouse([])).round(report(0), [torch.ones(2)])
    assert (found.tensors, found.round, found.weights, found.attempts) == (None, 2, [1.0], 1)


def test_a_round_waits_for_enough_islands() -> None:
    lighthouse = Lighthouse([], [], [member(report(1, trained=0))])
    each = islands(lighthouse, min_islands=2)
    found = each.round(report(0, trained=0), [torch.ones(2)])
    assert found.attempts == 3
    assert found.tensors is None, "nobody has trained"
    assert [asked["timeout_s"] for asked in lighthouse.asked] == sorted(
        (asked["timeout_s"] for asked in lighthouse.asked), reverse=True
    )


def test_a_lighthouse_that_fails_is_asked_again_until_the_time_is_over() -> None:
    lighthouse = Lighthouse(RuntimeError("gone"), [])
    assert islands(lighthouse).round(report(0), []).attempts == 2
    assert {"finds again": True} in lighthouse.asked
    lighthouse = Lighthouse(TimeoutError())
    each = islands(lighthouse)
    with pytest.raises(
        TimeoutError, match=r"round 2 .* after 600 s .*fewer than min_islands .*smaller.* raise averaging\.timeout_s"
    ):
        each.round(report(0), [])
    assert lighthouse.is_closed
    with pytest.raises(Closed, match="has left"):
        each.round(report(0), [])


@pytest.mark.parametrize("own", [{"counts": False}, {"ends": True}, {}], ids=["begins", "begins at its end", "counts"])
def test_a_lighthouse_that_fails_takes_no_time_from_who_waits_without_limit(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    class Fails(Lighthouse):
        def quorum(self, *asked: Any, **options: Any) -> Any:
            nonlocal now_s
            now_s += 1000.0
            return super().quorum(*asked, **options)

        def find_again(self, deadline: float) -> None:
            assert deadline > now_s or not own, "time to find it"

    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=lambda seconds: None))
    each = islands(Fails(RuntimeError("gone"), []), timeout_s=600.0)
    if own:
        assert each.round(report(0, **own), []).attempts == 2
    else:
        with pytest.raises(TimeoutError, match="lighthouse: gone"):
            each.round(report(0), [])


def test_an_island_with_a_number_that_is_taken_is_refused_the_second_time() -> None:
    """The first time it may be one that was killed, and still counts as alive."""
    twin = member(report(0, round=5), "island0:other")
    lighthouse = Lighthouse([twin], [twin])
    with pytest.raises(ValueError, match="island 0 is refused: 2 islands have the number 0"):
        islands(lighthouse).round(report(0), [])
    assert len(lighthouse.asked) == 2


def test_loopback_addresses_do_not_mix_with_others() -> None:
    with pytest.raises(ValueError, match=r"island 0 .*loopback.*give all islands the lighthouse's IP"):
        islands(Lighthouse([member(report(1), host="10.0.0.2")])).round(report(0), [])


@pytest.mark.parametrize(
    ("finished", "checksum", "trained", "source"),
    [(0, 0.5, 0, None), (0, 0.25, 0, 0), (2, 0.25, 0, 1), (0, 0.25, 100, None)],
)
def test_islands_that_start_take_the_first_ones_values_where_they_differ(
    finished: int, checksum: float, trained: int, source: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Or those of one that is further, from its checkpoint; of before the first round each keeps its own.

    Where there is nothing to send no group is made.
    """
    other = member(report(1, counts=False, round=finished, checksum=checksum, trained=trained))
    lighthouse = Lighthouse([other], TimeoutError())
    each = islands(lighthouse)
    own = report(0, counts=False, round=0, trained=100)
    if source is not None:
        with pytest.raises(TimeoutError):  # the other one's store is not there, nor is it the second time
            each.round(own, [torch.ones(1)])
        assert f"all take those of island {source}" in caplog.text
        assert lighthouse.asked[1]["failures"] == 1
    else:
        assert each.round(own, [torch.ones(1)]).tensors is None


def test_an_island_waits_without_limit_until_it_counts_and_calls_nobody() -> None:
    lighthouse = Lighthouse([])
    each = islands(lighthouse, grace_s=1000.0)
    each.round(report(0, counts=False), [])
    [asked] = lighthouse.asked
    assert asked["grace_s"] == math.inf
    assert asked["timeout_s"] > 86400
    lighthouse.answers.append([])
    each.round(report(0), [])
    assert lighthouse.asked[-1]["grace_s"] == 1000.0
    each.close()


def test_an_island_that_did_not_come_was_left() -> None:
    lighthouse = Lighthouse()
    each = islands(lighthouse)
    each._has_left = lighthouse.is_closed = True
    with pytest.raises(Left):
        each.round(report(0), [])


def test_an_island_that_begins_at_its_end_waits_for_those_that_are_alive() -> None:
    """It knows nobody whom it could call, before the first that it meets; it gives up where nobody is there."""
    lighthouse = Lighthouse([], [member(report(1))], Closed("closed"))
    each = islands(lighthouse, min_islands=2, grace_s=1000.0)
    with pytest.raises(Closed):  # the other one's store is not there
        each.round(report(0, ends=True), [torch.ones(1)])
    assert [asked["grace_s"] for asked in lighthouse.asked] == [math.inf, math.inf, 1000.0]
    assert [asked["timeout_s"] > 86400 for asked in lighthouse.asked] == [True, True, False]
    for counts in (True, False):
        with pytest.raises(TimeoutError, match="1 of at least 2 islands are there"):
            islands(Lighthouse(*[[]] * 9), min_islands=2, timeout_s=0.05).round(report(0, ends=True, counts=counts), [])
