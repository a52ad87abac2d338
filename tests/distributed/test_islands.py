"""Rounds between islands, each a process of its own, with a lighthouse and real sockets; and what they survive."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from multiprocessing import connection
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.averaging import rounds, weighted_sums
from paceline.averaging.rounds import Islands, Left, Outcome
from paceline.averaging.rules import Report, island_weights
from support import ranks as runner

DIGEST = 2**64 - 1
SMALL_CHUNK = 4096
COUNTING = Report(0, DIGEST, 0.0, 1.0, 100, counts=True, round=3, trained=100)
NEW = replace(COUNTING, counts=False, round=0, trained=0)


def tensors_of(island: int) -> list[Tensor]:
    """Whole numbers, whose mean over three islands is exact; several dtypes, sizes and strides."""
    generator = torch.Generator().manual_seed(island)

    def numbers(*shape: int) -> Tensor:
        return 3.0 * torch.randint(-20, 20, shape, generator=generator)

    return [
        numbers(7, 11),
        numbers(3 * SMALL_CHUNK),
        numbers(40).bfloat16(),
        numbers(5, 6).double(),
        numbers(4, 9).t(),
        numbers(0),
        numbers(1).squeeze(),
    ]


def mean_of(*islands: int) -> list[Tensor]:
    return [
        (sum(x.double() for x in same) / len(islands)).to(same[0].dtype)
        for same in zip(*map(tensors_of, islands), strict=True)
    ]


def serve_lighthouse(port: int, *more: str) -> None:
    from paceline.launch.cli import main

    os._exit(main(["lighthouse", "--host", "127.0.0.1", "--port", str(port), *more]))


def serve_island(
    pipe: Any, lighthouse: str, island: int, min_islands: int, timeout_s: float, stall_s: float, grace_s: float
) -> None:
    """Does what it is told, and tells what came of it."""
    weighted_sums.CHUNK_BYTES, rounds._STALL_S = SMALL_CHUNK, stall_s
    rounds.CONNECT_S = weighted_sums.CONNECT_S = runner.PATIENCE_S  # however late another one is
    islands: Islands | None = None
    while True:
        try:
            what, *args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            if what == "join":
                islands = Islands(
                    lighthouse,
                    island,
                    min_islands=min_islands,
                    timeout_s=timeout_s,
                    grace_s=grace_s,
                    weigh=partial(island_weights, first_round="best", difference_threshold=1.0),
                )
                result: Any = None
            elif what == "is called":
                assert islands is not None
                result = islands.is_called(*args)
            elif what == "may leave":
                assert islands is not None
                (islands._stays.release if args[0] else islands._stays.acquire)()
                result = None
            else:
                assert islands is not None
                result = take_part(islands, *args)
        except Exception as error:
            result = error
        pipe.send_bytes(pickle.dumps(result))


def take_part(islands: Islands, report: Report, tensors: list[Tensor], die: str | None) -> Outcome:
    before = [tensor.clone() for tensor in tensors]
    if die == "met":
        islands.round(report, lambda reports: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type,return-value]
    if die in ("sending", "stopped"):
        number = signal.SIGKILL if die == "sending" else signal.SIGSTOP
        chunks = weighted_sums._chunks

        def some(tensors: Any) -> Iterator[Any]:
            for count, chunk in enumerate(chunks(tensors)):
                if count == 2 * weighted_sums.IN_FLIGHT:
                    weighted_sums._chunks = chunks
                    os.kill(os.getpid(), number)
                yield chunk

        weighted_sums._chunks = some

    def sent(reports: Sequence[Report]) -> list[Tensor]:
        rounds._STALL_S = runner.PATIENCE_S  # of the attempts after this one: nobody stands still in them
        return tensors

    outcome = islands.round(report, tensors if rounds._STALL_S == runner.PATIENCE_S else sent)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors, strict=True)), "the inputs have changed"
    return outcome


class Silent(Exception):
    """An island that is alive was left out of a round: this machine had no time for its heartbeats."""


TRIES = 5


def again_if_silent(scenario: Callable[..., None]) -> Callable[..., None]:
    """A test in which an island counts as dead when it is silent for seconds. It begins anew if a living one is."""

    @wraps(scenario)
    def test(sea: Sea, **options: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return scenario(sea, **options)
            except Silent:
                sea.begin_anew()
        return scenario(sea, **options)

    return test


def wait_for(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + runner.PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


class Sea:
    """A lighthouse and islands."""

    def __init__(self) -> None:
        runner._warm_up()
        self.context: Any = multiprocessing.get_context("forkserver")
        self.port = runner.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes: list[Any] = []
        self.light: Any = None

    def start(self, target: Callable[..., None], *args: Any) -> Any:
        with runner._server_environment():
            process = self.context.Process(target=target, args=args, daemon=True)
            process.start()
        self.processes.append(process)
        return process

    def lighthouse(self, *, notices_deaths: bool = False) -> None:
        """One that answers. Islands are alive for it, however late their heartbeats are, unless it notices deaths."""
        more = () if notices_deaths else ("--heartbeat-timeout-s", str(runner.PATIENCE_S))
        self.light = self.start(serve_lighthouse, self.port, *more)
        wait_for(lambda: self.status() is not None, "the lighthouse does not answer")

    def status(self) -> str | None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.address}/status") as page:
            return str(page.read().decode())
        return None

    def island(
        self,
        number: int,
        *,
        min_islands: int = 1,
        timeout_s: float = runner.PATIENCE_S,
        stall_s: float = runner.PATIENCE_S,
        grace_s: float = math.inf,
    ) -> Island:
        ours, theirs = self.context.Pipe()
        process = self.start(serve_island, theirs, self.address, number, min_islands, timeout_s, stall_s, grace_s)
        theirs.close()
        return Island(number, process, ours)

    def newcomer(self, number: int, **options: Any) -> Island:
        island = self.island(number, **options)
        island.tell("join")
        return island.joined()

    def islands(self, count: int, **options: Any) -> list[Island]:
        """Islands that have joined, and so wait for each other."""
        return self.joined([self.island(number, **options) for number in range(count)])

    def joined(self, islands: list[Island]) -> list[Island]:
        for island in islands:
            island.tell("join")
        for island in islands:
            island.joined()
        return islands

    def wait_for_questions(self, *islands: Island) -> None:
        """Until these wait for a quorum: a newcomer is in the others' next round only if it asked before them."""

        def have_asked() -> bool:
            if any(island.pipe.poll() for island in islands):
                raise Silent("the others are missing")
            return f"/{len(islands)} participants healthy" in (self.status() or "")

        wait_for(have_asked, f"{len(islands)} have not asked")

    def answers(self, islands: Sequence[Island]) -> Iterator[tuple[Island, Any]]:
        """As they come: one that was left out of a round may wait for ever."""
        waiting = {island.pipe: island for island in islands}
        while waiting:
            answered = connection.wait(list(waiting), runner.PATIENCE_S)
            assert answered, f"islands {[island.number for island in waiting.values()]} hang"
            for pipe in answered:
                island = waiting.pop(pipe)
                yield island, island.answer()

    def outcomes(self, islands: Sequence[Island], least_attempts: int = 1) -> list[Outcome]:
        """The outcomes of these islands, in their order.

        Raises:
            Silent: a round was without one of them, or, as it took fewer attempts, without one that makes it fail.
        """
        found: dict[Island, Outcome] = {}
        for island, answer in self.answers(islands):
            found[island] = outcome = outcome_of(answer)
            together = [report.island for report in outcome.reports]
            if together != [each.number for each in islands] or outcome.attempts < least_attempts:
                raise Silent(f"a round of islands {together} in {outcome.attempts} attempts")
        return [found[island] for island in islands]

    def begin_anew(self) -> None:
        self.end()
        self.port = runner.free_port()
        self.address = f"127.0.0.1:{self.port}"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.processes.clear()


class Island:
    def __init__(self, number: int, process: Any, pipe: Any) -> None:
        self.number, self.process, self.pipe = number, process, pipe

    def tell(self, *what: Any) -> None:
        self.pipe.send_bytes(pickle.dumps(what))

    def joined(self) -> Island:
        assert self.answer() is None
        return self

    def begin(self, report: Report = COUNTING, die: str | None = None, **changes: Any) -> None:
        report = replace(report, island=self.number, **changes)
        self.tell("round", report, tensors_of(self.number), die)

    def answer(self) -> Any:
        assert self.pipe.poll(runner.PATIENCE_S), f"island {self.number} hangs"
        return pickle.loads(self.pipe.recv_bytes())

    def finish(self) -> Outcome:
        return outcome_of(self.answer())

    def is_called(self, finished: int) -> bool:
        self.tell("is called", finished)
        return bool(self.answer())

    def may_leave(self, may: bool) -> None:
        """Tell it if it leaves when it has been called and does not come."""
        self.tell("may leave", may)
        assert self.answer() is None


def outcome_of(answer: Any) -> Outcome:
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Outcome)
    return answer


@pytest.fixture
def sea() -> Iterator[Sea]:
    sea = Sea()
    yield sea
    sea.end()


def assert_same(tensors: list[Tensor] | None, expected: list[Tensor]) -> None:
    assert tensors is not None
    for tensor, right in zip(tensors, expected, strict=True):
        assert tensor.dtype == right.dtype
        assert tensor.shape == right.shape
        assert torch.equal(tensor, right)


def test_three_islands(sea: Sea) -> None:
    """From the start of all to the average of all; then one that is far off, and one that has failed."""
    sea.lighthouse()
    islands = sea.islands(3)
    for island in islands:
        island.begin(NEW, checksum=1.5)
    for outcome in [island.finish() for island in islands]:
        assert (outcome.tensors, outcome.weights, outcome.round) == (None, [1.0, 0.0, 0.0], 1)
        assert (outcome.transfer_s, outcome.bytes_sent) == (0.0, 0)

    for island in islands:
        island.begin()
    outcomes = [island.finish() for island in islands]
    for outcome in outcomes:
        assert_same(outcome.tensors, mean_of(0, 1, 2))
        assert [report.island for report in outcome.reports] == [0, 1, 2]
        assert outcome.reports[1] == replace(COUNTING, island=1)
        assert (outcome.weights, outcome.num_islands, outcome.round, outcome.attempts) == ([1 / 3] * 3, 3, 4, 1)
        assert outcome.waited_s > 0
        assert outcome.transfer_s > 0
    sizes = [4 if x.dtype == torch.bfloat16 else x.element_size() for x in tensors_of(0)]
    num_bytes = sum(x.numel() * size for x, size in zip(tensors_of(0), sizes, strict=True))
    assert outcomes[0].bytes_sent == 4 * num_bytes // 3

    for island, loss in zip(islands, (float("nan"), 1.0, 2.5), strict=True):
        island.begin(loss=loss)
    for outcome in [island.finish() for island in islands]:
        assert outcome.weights == [0.0, 1.0, 0.0]
        assert_same(outcome.tensors, tensors_of(1))


def test_all_have_just_started_and_differ(sea: Sea) -> None:
    sea.lighthouse()
    islands = sea.islands(2)
    for island in islands:
        island.begin(NEW, checksum=float(island.number))
    for outcome in [island.finish() for island in islands]:
        assert outcome.weights == [1.0, 0.0]
        assert_same(outcome.tensors, tensors_of(0))


@pytest.mark.parametrize(("die", "count"), [("met", 3), ("sending", 4)])
@again_if_silent
def test_one_is_killed_and_comes_back(sea: Sea, die: str, count: int) -> None:
    sea.lighthouse(notices_deaths=True)
    *others, last = sea.islands(count)
    for island in others:
        island.begin()
    last.begin(die=die)
    for outcome in sea.outcomes(others, least_attempts=2):
        assert outcome.weights == [1 / (count - 1)] * (count - 1)
        assert outcome.round == 4
        assert_same(outcome.tensors, mean_of(*range(count - 1)))
    last.process.join(runner.PATIENCE_S)
    assert last.process.exitcode == -signal.SIGKILL

    last = sea.newcomer(count - 1)
    last.begin(NEW, checksum=7.0, loss=0.0)
    sea.wait_for_questions(last)
    everyone = [*others, last]
    for island in others:
        island.begin(round=4)
    for outcome in sea.outcomes(everyone):
        assert outcome.weights == [1 / (count - 1)] * (count - 1) + [0.0]
        assert [report.counts for report in outcome.reports] == [True] * (count - 1) + [False]
        assert (outcome.round, outcome.attempts) == (5, 1)
        assert_same(outcome.tensors, mean_of(*range(count - 1)))

    for island in everyone:
        island.begin(round=5)
    for outcome in sea.outcomes(everyone):
        assert outcome.weights == [1 / count] * count
        assert outcome.round == 6


def test_one_alone(sea: Sea) -> None:
    sea.lighthouse()
    [island] = sea.islands(1)
    for report in (NEW, COUNTING, replace(COUNTING, loss=float("inf"))):
        island.begin(report)
        outcome = island.finish()
        assert (outcome.tensors, outcome.weights, outcome.bytes_sent) == (None, [1.0], 0)
        assert outcome.round == report.round + 1


def test_another_model_is_refused(sea: Sea) -> None:
    """Nobody is further than the other: both are."""
    sea.lighthouse()
    islands = sea.islands(2)
    for island in islands:
        island.begin(NEW, digest=island.number)
    for island in islands:
        with pytest.raises(ValueError, match=r"^island \d is refused: islands (0 and 1|1 and 0) differ in the model"):
            island.finish()


@again_if_silent
def test_who_comes_wrongly_is_refused_and_the_others_go_on(sea: Sea) -> None:
    sea.lighthouse(notices_deaths=True)
    islands = sea.islands(2)
    second, other = sea.newcomer(1), sea.newcomer(2)
    second.begin(NEW)
    other.begin(NEW, digest=5)
    sea.wait_for_questions(second, other)
    for island in islands:
        island.begin()
    refused = {
        second: "island 1 is refused: 2 islands have the number 1; give each its own",
        other: r"islands 2 and [01] differ in the model .* start all with the same model",
    }
    come = dict[Island, Outcome]()
    for island, answer in sea.answers([*islands, second, other]):
        if isinstance(answer, Outcome) and (island in (second, other) or refused):
            raise Silent("not all were there at once")
        if island in islands:
            come[island] = outcome_of(answer)
        else:
            with pytest.raises(ValueError, match=refused.pop(island)):
                raise answer
    for outcome in come.values():
        assert [report.island for report in outcome.reports] == [0, 1]
        assert_same(outcome.tensors, mean_of(0, 1))


@again_if_silent
def test_one_is_stopped_and_goes_on(sea: Sea) -> None:
    """The others did the round without it: it takes the next one's average, and does not count in it."""
    sea.lighthouse(notices_deaths=True)
    islands = sea.islands(3, stall_s=2.0)
    *others, last = islands
    for island in others:
        island.begin()
    last.begin(die="stopped")
    for outcome in sea.outcomes(others, least_attempts=2):
        assert outcome.weights == [0.5, 0.5]
        assert_same(outcome.tensors, mean_of(0, 1))
    os.kill(last.process.pid, signal.SIGCONT)
    sea.wait_for_questions(last)
    for island in others:
        island.begin(round=4)
    for outcome in sea.outcomes(islands):
        assert outcome.weights == [0.5, 0.5, 0.0]
        assert outcome.round == 5
        assert_same(outcome.tensors, mean_of(0, 1))


@again_if_silent
def test_one_that_does_not_come_is_called_and_then_left_out(sea: Sea) -> None:
    """Though it is alive; when it comes, it takes the next round's average, and counts from then on."""
    sea.lighthouse(notices_deaths=True)
    # The first one waits for ever: nobody calls the second one, should that be late.
    islands = sea.joined([sea.island(number, grace_s=grace_s) for number, grace_s in enumerate((math.inf, 0.5, 0.5))])
    for island in islands:
        island.begin(NEW)
    sea.outcomes(islands)
    *others, last = islands
    last.may_leave(False)
    for island in others:
        island.begin(round=0)

    def is_called() -> bool:
        if any(island.pipe.poll() for island in others):
            raise Silent("the others did not wait")
        return last.is_called(0)

    wait_for(is_called, "nobody calls")
    last.may_leave(True)
    wait_for(lambda: not last.is_called(0), "it does not leave")
    for outcome in sea.outcomes(others):
        assert (outcome.round, outcome.weights) == (1, [0.0, 1.0]) or outcome.weights == [1.0, 0.0]
    last.begin(round=0)
    with pytest.raises(Left, match="island 2 has left the other islands"):
        last.finish()
    last.tell("join")
    last.joined()
    last.begin(round=0)
    sea.wait_for_questions(last)
    for island in others:
        island.begin(round=1, trained=3)
    for outcome in sea.outcomes(islands):
        assert (outcome.weights, outcome.round) == ([0.5, 0.5, 0.0], 2)
        assert_same(outcome.tensors, mean_of(0, 1))


def test_nothing_new_is_no_round_and_no_traffic(sea: Sea) -> None:
    sea.lighthouse()
    islands = sea.islands(2)
    for island in islands:
        island.begin(trained=0)
    for outcome in [island.finish() for island in islands]:
        assert (outcome.tensors, outcome.round, outcome.bytes_sent) == (None, 3, 0)
    islands[0].begin(trained=30)
    islands[1].begin(trained=10)
    for outcome in [island.finish() for island in islands]:
        assert (outcome.weights, outcome.round) == ([0.75, 0.25], 4)
        assert outcome.tensors is not None
        for found, one, other in zip(outcome.tensors, tensors_of(0), tensors_of(1), strict=True):
            wanted = 0.75 * one.double() + 0.25 * other.double()
            torch.testing.assert_close(
                found.double(), wanted, rtol=1e-2 if found.dtype == torch.bfloat16 else 1e-6, atol=0
            )


def test_one_that_missed_a_round_weighs_nothing(sea: Sea) -> None:
    sea.lighthouse()
    islands = sea.islands(2)
    islands[0].begin(round=4)
    islands[1].begin(round=3)
    for outcome in [island.finish() for island in islands]:
        assert (outcome.weights, outcome.round) == ([1.0, 0.0], 5)
        assert_same(outcome.tensors, tensors_of(0))


def test_the_lighthouse_is_started_anew(sea: Sea) -> None:
    """As they wait there, too."""
    sea.lighthouse()
    islands = sea.islands(2, min_islands=2)
    for island in islands:
        island.begin()
    for island in islands:
        island.finish()
    islands[0].begin(round=4)
    sea.wait_for_questions(islands[0])
    sea.light.kill()
    sea.light.join()
    sea.lighthouse()
    islands[1].begin(round=4)
    for outcome in [island.finish() for island in islands]:
        assert_same(outcome.tensors, mean_of(0, 1))


def test_nobody_else_comes(sea: Sea) -> None:
    """The other is alive and does not come."""
    sea.lighthouse()
    waits, _ = sea.joined([sea.island(0, timeout_s=10.0), sea.island(1)])
    waits.begin()
    with pytest.raises(TimeoutError, match=r"^island 0: round 4 is not done after 10 s .*others are alive.*lighthouse"):
        waits.finish()


def test_too_few_are_there(sea: Sea) -> None:
    sea.lighthouse()
    lonely = sea.newcomer(0, min_islands=2, timeout_s=10.0)
    lonely.begin()
    with pytest.raises(TimeoutError, match=r"1 of at least 2 islands are there"):
        lonely.finish()


def test_no_lighthouse() -> None:
    address = f"127.0.0.1:{runner.free_port()}"
    with pytest.raises(ConnectionError, match=f"no lighthouse answers at {address} .* run `paceline lighthouse`"):
        Islands(address, 0, min_islands=1, timeout_s=0.1)
    with pytest.raises(ValueError, match="'nowhere' is no address"):
        Islands("nowhere", 0, min_islands=1, timeout_s=0.1)


def test_closed_while_it_waits(sea: Sea) -> None:
    sea.lighthouse()
    islands = Islands(sea.address, 0, min_islands=2, timeout_s=runner.PATIENCE_S)
    other = Islands(sea.address, 1, min_islands=1, timeout_s=runner.PATIENCE_S)
    threading.Timer(0.5, islands.close).start()
    with pytest.raises(RuntimeError, match="island 0 has left the other islands"):
        islands.round(replace(NEW, island=0), [])
    with pytest.raises(RuntimeError, match="island 0 has left"):
        islands.round(replace(NEW, island=0), [])
    other.close()
