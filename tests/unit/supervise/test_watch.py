"""What is told as the first cause, from what rank 0 has heard; and what an update of the watch costs."""

from __future__ import annotations

import socket
import sys
import threading

import pytest
import torch.distributed as dist

from paceline.supervise import watch as watch_module
from paceline.supervise.first_cause import DEVICE, EVERYONE, Doing, Limits, Member, is_paused, judge, may_follow
from paceline.supervise.watch import Watch
from paceline.supervise.watch_hub import Hub, Lines
from support.ranks import PATIENCE_S

LIMITS = Limits(progress_s=60.0, lost_s=3.0, silent_s=30.0, explain_s=1.5)
NOW_S = 1000.0


def rank(
    operation: str = "", peer: int | None = None, age_s: float = 0.0, silent_s: float = 0.0, **more: object
) -> Member:
    doing = Doing(
        17,
        operation,
        peer,
        age_s,
        paused=str(more.pop("paused", "")),
        where=str(more.pop("where", "")),
        may_wait=bool(more.pop("may_wait", False)),
    )
    return Member(NOW_S - silent_s, doing, **more)  # type: ignore[arg-type]


CASES: dict[str, tuple[list[Member], str | None]] = {
    "all is well": ([rank("computing", age_s=59), rank("receiving from stage 0", 0, 59)], None),
    "between steps there is no limit": ([rank(age_s=1e4), rank(age_s=1e4)], None),
    "a rank that raised is asked about by nobody else": (
        [rank("summing", EVERYONE), rank("computing", failed_at_s=NOW_S - 1, error="RuntimeError: reset by peer")],
        None,
    ),
    "a lost connection that nothing explains": (
        [rank("computing"), rank("summing", EVERYONE, failed_at_s=NOW_S - 2, error="RuntimeError: reset by peer")],
        "rank 1 failed at step 17, summing: RuntimeError: reset by peer",
    ),
    "a lost connection to a rank that ended": (
        [rank("computing", lost_at_s=NOW_S), rank("summing", EVERYONE, failed_at_s=NOW_S, error="reset by peer")],
        "rank 0 is gone (its process ended without a word); last heard at step 17, computing; "
        "rank 1 was at step 17, summing",
    ),
    "of two that ended, the first": (
        [
            rank("computing", lost_at_s=NOW_S),
            rank("computing", lost_at_s=NOW_S - 1),
            rank("x", 1, 5, failed_at_s=NOW_S),
        ],
        "rank 1 is gone",
    ),
    "a rank that ended is not missed yet": ([rank("computing", age_s=9), rank("summing", lost_at_s=NOW_S - 9)], None),
    "a rank that waits for one that ended": (
        [rank("receiving from stage 1", 1, 9), rank("computing", lost_at_s=NOW_S - 3)],
        "rank 1 is gone (its process ended without a word); last heard at step 17, computing; "
        "rank 0 was at step 17, receiving from stage 1 (rank 1)",
    ),
    "a rank that may wait behind the kernels of one that ended": (
        [rank("computing", age_s=3, may_wait=True), rank("computing", lost_at_s=NOW_S - 3)],
        "rank 1 is gone (its process ended without a word); last heard at step 17, computing; "
        "rank 0 was at step 17, computing",
    ),
    "a rank that may wait, and has begun a moment ago": (
        [rank("computing", age_s=2.9, may_wait=True), rank("computing", lost_at_s=NOW_S - 3)],
        None,
    ),
    "a rank that saves cannot wait behind kernels": (
        [rank("computing", age_s=9, may_wait=True, paused="saving"), rank("computing", lost_at_s=NOW_S - 9)],
        None,
    ),
    "who cannot wait hangs before those who may": (
        [rank("computing", age_s=62, may_wait=True), rank("loading data", age_s=61), rank("x", 1, 60)],
        "rank 1 hangs at step 17, loading data: 61 s; the limit is 60 s",
    ),
    "of those who may wait, the first to stop": (
        [rank("computing", age_s=61, may_wait=True), rank("computing", age_s=62, may_wait=True)],
        "rank 1 hangs at step 17, computing: 62 s; the limit is 60 s",
    ),
    "a connection lost to a rank that left": (
        [rank("x", 1, failed_at_s=NOW_S - 2, error="RuntimeError: reset by peer"), rank(has_left=True)],
        "rank 1 has ended at step 17, outside of the engine, and other ranks wait for it",
    ),
    "a hang in the data": (
        [rank("receiving from stage 1", 1, 60), rank("loading data", None, 61, where="read (data.py:3)")],
        "rank 1 hangs at step 17, loading data: 61 s in read (data.py:3); the limit is 60 s",
    ),
    "a rank that does not come back to the engine": (
        [rank("summing", EVERYONE, 60), rank(age_s=61)],
        "rank 1 hangs at step 17, outside of the engine: 61 s; the limit is 60 s",
    ),
    "a rank that is not heard of": (
        [rank("summing", EVERYONE, 60), rank("computing", age_s=30, silent_s=31)],
        "rank 1 is gone (nothing heard for 31 s: stopped, or its machine or network down); last heard at step 17, "
        "computing; rank 0 was at step 17, summing",
    ),
    "a rank that is not heard of, and that nobody waits for long": ([rank("x", 1, 59), rank("y", silent_s=45)], None),
    "a rank that ended, and is missed for the limit": (
        [rank("receiving from stage 1", 1, 60), rank("computing", lost_at_s=NOW_S - 1)],
        "rank 1 is gone (its process ended without a word); last heard at step 17, computing",
    ),
    "a circle": (
        [rank("receiving from stage 1", 1, 60), rank("sending to stage 0", 0, 60)],
        "all ranks wait for each other, the limit is 60 s: rank 0 at step 17, receiving from stage 1 (rank 1); "
        "rank 1 at step 17, sending to stage 0 (rank 0)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_cause(case: str) -> None:
    members, told = CASES[case]
    cause = judge(dict(enumerate(members)), NOW_S, LIMITS)
    if told is None:
        assert cause is None
    else:
        assert cause is not None
        assert cause.text.startswith(told)
        assert cause.code == 1


def test_while_a_rank_is_in_a_long_phase_nobody_is_late() -> None:
    waiting, long = rank("summing", EVERYONE, 600), rank("loading data", None, 600, paused="saving")
    assert is_paused(long, NOW_S, LIMITS)
    assert not is_paused(rank("loading data", silent_s=31, paused="saving"), NOW_S, LIMITS)
    assert judge({0: waiting, 1: long}, NOW_S, LIMITS, paused_at_s=NOW_S) is None
    assert judge({0: waiting, 1: long}, NOW_S, LIMITS, paused_at_s=NOW_S - 59) is None
    cause = judge({0: waiting, 1: long}, NOW_S, LIMITS, paused_at_s=NOW_S - 60)
    assert cause is not None
    assert cause.text == "rank 1 hangs at step 17, saving: 600 s; the limit is 60 s"


def test_a_long_phase_excuses_nobody_who_is_not_heard_of() -> None:
    """All evaluate, and one was stopped, or its machine is down."""
    waiting = rank("receiving from stage 0", 1, 61, paused="evaluating")
    assert judge({0: waiting, 1: rank("x", silent_s=59, paused="evaluating")}, NOW_S, LIMITS, paused_at_s=NOW_S) is None
    cause = judge({0: waiting, 1: rank("x", silent_s=60, paused="evaluating")}, NOW_S, LIMITS, paused_at_s=NOW_S)
    assert cause is not None
    assert cause.text.startswith("rank 1 is gone (nothing heard for 60 s: stopped, or its machine or network down)")


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[../gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("a file called timeout.txt"), False),
        (MemoryError(), False),
    ],
)
def test_an_error_that_another_ranks_end_may_bring_about(error: Exception, follows: bool) -> None:
    assert may_follow(error) is follows


@pytest.mark.parametrize("said", [b"[1]\n", b"7\n", b"{\n", b"[" * 5000 + b"\n", b"\xff\n"])
def test_a_guest_that_is_no_rank_is_shown_out(said: bytes) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    hub = Hub(server, "token", 2, LIMITS)
    try:
        with socket.create_connection(server.getsockname(), timeout=PATIENCE_S) as guest:
            guest.sendall(said)
            assert guest.recv(1) == b""
        with socket.create_connection(server.getsockname()) as member:
            lines = Lines(member)
            member.settimeout(PATIENCE_S)
            lines.write({"token": "token", "rank": 1})
            while (heard := lines.read()) == []:
                pass
            assert heard is not None
            assert heard[0] == {"gone": []}  # it is said twice a second, so more may have come
    finally:
        hub.close()


def test_a_computation_may_wait_where_kernels_communicate() -> None:
    watch = Watch()
    watch.doing("computing", DEVICE)
    assert watch._doing(9.0) == Doing(-1, "computing", None, 9.0)
    watch.kernels_communicate = True
    assert watch._doing(9.0) == Doing(-1, "computing", None, 9.0, may_wait=True)
    watch.doing("loading data")
    assert not watch._doing(9.0).waits
    watch.doing("summing", EVERYONE)
    assert watch._doing(9.0) == Doing(-1, "summing", EVERYONE, 9.0)


def test_an_error_keeps_the_phase_that_it_was_raised_in(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    with pytest.raises(KeyError) as caught, watch.pause("loading the model"), watch.pause("reading the weights"):
        raise KeyError("lost")
    watch.fail(caught.value)
    assert capsys.readouterr().err == "paceline: error: rank 0 failed reading the weights: KeyError: 'lost'\n"


def test_a_connection_that_is_lost_with_rank_0_is_no_failure_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this rank hears of it from its transport first, and can tell nobody any more."""
    for limit in ("_ANSWER_S", "_FAILING_GRACE_S"):  # after the second one the process would be ended
        monkeypatch.setattr(watch_module, limit, PATIENCE_S)
    watch = Watch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        server.accept()[0].close()
    with ours:
        ours.shutdown(socket.SHUT_WR)
        watch.rank, watch._world_size, watch._lines = 1, 3, Lines(ours)
        thread = threading.Timer(0.5, watch._run)
        thread.start()
        cause = watch.fail(RuntimeError("Connection closed by peer"))
        watch._closed = True
        thread.join()
    assert (cause.rank, cause.speaker) == (0, 1)
    assert cause.text.startswith("rank 0 is gone (its process ended without a word)")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_rank_of_this_machine_reaches_rank_0(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("MASTER_ADDR", host)
    ranks = [Watch(), Watch()]
    for number, watch in enumerate(ranks):
        watch.rank, watch._world_size = number, 2
    first, second = (watch._connect() for watch in ranks)
    assert ranks[0]._hub is not None
    try:
        assert first is not None
        assert second is not None
        for lines in (first, second):
            lines.connection.settimeout(PATIENCE_S)
            while (heard := lines.read()) == []:
                pass
            assert heard is not None
    finally:
        ranks[0]._hub.close()
        for lines in filter(None, (first, second)):
            lines.close()


def test_a_long_phase_does_not_excuse_a_silent_rank_0() -> None:
    watch = Watch()
    watch.rank, watch._world_size, watch._limits = 1, 2, Limits.of(60)
    with watch.pause("evaluating"):
        watch.doing("receiving from stage 0", 0)
        watch._look_at_rank_0("", silent_s=59, age_s=61)
        assert watch.cause is None
        watch._look_at_rank_0("it ended in order, and others wait for it", silent_s=61, age_s=61)
        assert watch.cause is None
        watch._look_at_rank_0("", silent_s=60, age_s=61)
    assert watch.cause is not None
    assert watch.cause.text.startswith("rank 0 is gone (nothing heard for 60 s")


def test_an_update_calls_nothing_and_takes_no_lock() -> None:
    """Updates are in the engine's hot path, a few for each message: one assignment, no clock, no lock."""
    watch, calls = Watch(), list[str]()
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    watch.doing("receiving from stage 1", 1)
    sys.setprofile(None)
    assert calls == ["call", "return", "c_call"], "one that sets the profile again"
