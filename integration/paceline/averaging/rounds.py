"""Rounds between islands over real networks: who is there, what each reports, the weighted sum of their tensors.

Who is there is torchft's: each island sends heartbeats to the lighthouse (``paceline lighthouse``) and asks it for a
quorum, which comes when all that are alive have asked; the reports travel with the question. Tensors go over a gloo
group of the quorum's islands. An island that dies takes its part of the round with it: the others do it again.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .rules import Report, is_no_round, island_weights, refusals

logger = logging.getLogger("paceline")

CHUNK_BYTES = 8 << 20
IN_FLIGHT = 4
"""Chunks that are under way at once, so that long distances cost bandwidth rather than latency."""

Tensors = Sequence[Tensor] | Callable[[Sequence[Report]], Sequence[Tensor]]

_CONNECT_S = 20.0
_STALL_S = 120.0
_HEARTBEAT_S = 0.5
_SETTLE_S = 4 * _HEARTBEAT_S
_PAUSE_S = 1.0
_SAY_EVERY_S = 60.0
_LONG_S = 30 * 86400.0
_CALLED = "paceline/called/{}"
"""Key in the store of an island that is waited for, by the rounds that are finished."""


@dataclass(frozen=True)
class Outcome:
    """What a round has brought, the same on all islands that were in it except for the times."""

    tensors: list[Tensor] | None
    """New ones, the weighted average; None where there is nothing to change: go on with what you have."""
    reports: list[Report]
    """Of all islands in it, in the order of ``weights``."""
    weights: list[float]
    round: int
    """Rounds finished with this one: the next report's ``round``, of an island that has just come too. One in which
    nobody had anything new (:func:`~paceline.averaging.rules.is_no_round`) is none."""
    waited_s: float
    """Until all islands were there, failed attempts included."""
    transfer_s: float
    """Of the attempt that succeeded."""
    bytes_sent: int
    """By this island in it, as a ring all-reduce sends them."""
    attempts: int
    """From asking who is there; the last one succeeded."""

    @property
    def num_islands(self) -> int:
        """That the average is of."""
        return sum(weight > 0 for weight in self.weights)


class _Closed(RuntimeError):
    """:meth:`Islands.close` was called."""


class Left(_Closed):
    """This island did not come when it was called, and the others count it as dead: let another object join them."""


class _Again(Exception):
    """An attempt at a round that came to nothing. ``spent_s`` of it count towards the time limit."""

    def __init__(self, why: str, spent_s: float) -> None:
        super().__init__(why)
        self.spent_s = spent_s


class Islands:
    """This island among the others. On one rank of the island only; the others have no part in it.

    It is alive to the others from here to :meth:`close`, whatever the Python threads do in the meantime.

    Args:
        lighthouse: host:port. The address of this host on the way there is where the others find this island, so it
            must not be a loopback address for some islands and another one for others.
        island: this one's number, from 0; no two islands have the same.
        min_islands: a round waits for so many, itself included.
        timeout_s: how long a round may wait for others that are alive, or fail for whatever reason, before it raises;
            sending tensors does not count. An island whose report says that it does not count waits for the others'
            next round however long it takes.
        grace_s: how long an island that has come to a round waits before it calls those of the last round that have
            not (:meth:`is_called`). One that has been called and does not come in as long again is dead to the others
            from then on, until it comes.
        weigh: the weights of the reports. It must be the same on all islands, so what it depends upon belongs into
            :attr:`Report.digest`.

    Raises:
        ValueError: ``lighthouse`` is no address.
        ConnectionError: nothing answers there within 30 s, or ``timeout_s`` if that is less.

    Example::

        islands = Islands("node1:29510", 0, min_islands=2, timeout_s=600.0)
        outcome = islands.round(report, masters)
        if outcome.tensors is not None:
            ...  # take them
    """

    def __init__(
        self,
        lighthouse: str,
        island: int,
        *,
        min_islands: int,
        timeout_s: float,
        grace_s: float = math.inf,
        weigh: Callable[[Sequence[Report]], Sequence[float]] = island_weights,
    ) -> None:
        self.island, self.min_islands, self.timeout_s, self.weigh = island, min_islands, timeout_s, weigh
        self.lighthouse, self.grace_s = lighthouse, grace_s
        host, port = _split(lighthouse)
        connect_s = min(30.0, timeout_s)
        self.address = _own_address(lighthouse, host, port, connect_s)
        self._replica_id = f"island{island}:{uuid.uuid4()}"
        self._store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
        torchft = coordination()
        url = f"http://{_bracketed(host)}:{port}"
        try:
            # Its RPCs, one of which ends this process, are for nobody else: it listens to this host alone.
            self._heart = torchft.ManagerServer(
                replica_id=self._replica_id,
                lighthouse_addr=url,
                hostname="127.0.0.1",
                bind="127.0.0.1:0",
                store_addr=self._store_address,
                world_size=1,
                heartbeat_interval=timedelta(seconds=_HEARTBEAT_S),
                connect_timeout=timedelta(seconds=connect_s),
                quorum_retries=0,
            )
            self._client = torchft.LighthouseClient(url, connect_timeout=timedelta(seconds=connect_s))
            self._client.heartbeat(self._replica_id, timeout=timedelta(seconds=connect_s))
        except (RuntimeError, TimeoutError) as error:
            raise _unreachable(lighthouse, error) from None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._twins: set[str] = set()
        self._failures = 0
        self._group: _Group | None = None
        self._closed = self._has_left = False
        self._others: list[str] = []
        """Stores of the other islands of the last round."""
        self._next = 0
        """Rounds finished, that of the start not counted: of :attr:`Report.round` when it comes again."""
        self._stays = threading.Lock()
        """Held as long as a round is under way, and while this island leaves because it is too late for one."""
        if math.isfinite(grace_s):
            threading.Thread(target=self._watch, name="paceline-grace", daemon=True).start()

    def is_called(self, finished: int) -> bool:
        """Whether others wait for this island, which has finished so many rounds, longer than the grace time."""
        return not self._closed and self._store.check([_CALLED.format(finished)])

    def _call(self, finished: int) -> None:
        """Say to those of the last round that others wait for them. Those that are gone do not answer."""
        for address in self._others:
            try:
                host, port = _split(address)
                limit = timedelta(seconds=min(_CONNECT_S, self.grace_s + 1))
                store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
                store.set(_CALLED.format(finished), "")
            except RuntimeError as error:
                logger.info("island %d: %s does not hear that it is waited for (%s)", self.island, address, error)

    def _watch(self) -> None:
        """Leave when this island has been called and does not come: the others then need not wait for it."""
        called_at = None
        while not self._closed:
            time.sleep(min(_PAUSE_S, self.grace_s / 4))
            if not self._stays.acquire(blocking=False):
                called_at = None
                continue
            try:
                if not self.is_called(self._next):
                    called_at = None
                elif called_at is None:
                    called_at = time.monotonic()
                elif time.monotonic() - called_at > self.grace_s:
                    logger.warning(
                        "island %d does not come to round %d, though the others have waited for it for twice "
                        "averaging.grace_s (%g s): they go on without it, and it takes part in the next one.",
                        self.island,
                        self._next + 1,
                        self.grace_s,
                    )
                    self._has_left = True
                    self.close()
            finally:
                self._stays.release()

    @property
    def _store_address(self) -> str:
        return f"{_bracketed(self.address)}:{self._store.port}"

    def close(self) -> None:
        """Leave: the others wait no longer than for a dead one. A round under way on another thread raises."""
        self._closed = True
        self._group = None
        self._heart.shutdown()
        self._answers.put(_Closed(f"island {self.island} has left the other islands"))

    def round(self, report: Report, tensors: Tensors) -> Outcome:
        """Average with all islands that are there. It blocks; on one thread at a time, which may be any.

        Args:
            report: this island's. All islands call this with reports of the same digest.
            tensors: floating-point, on the CPU, of the same shapes and dtypes in the same order on all islands. They
                are only read. A function of the reports is called once it is known who is there, where what is sent
                depends on that: on all islands it must choose alike. Dtypes of less than 32 bits are summed in
                float32.

        Raises:
            ValueError: this island cannot take part as it is: another has its number, or another model or settings.
            Left: it has been left out of a round, as it came too late.
            TimeoutError: no round in ``timeout_s``.
            RuntimeError: :meth:`close` was called meanwhile.

        After any error this object is closed, so that the others need not wait for it. Another one may take its place.
        """
        assert report.island == self.island, report
        with self._stays:
            if self._closed:
                kind = Left if self._has_left else _Closed
                raise kind(f"island {self.island} has left the other islands")
            try:
                outcome = self._round(report, tensors)
            except BaseException:
                self.close()
                raise
            self._next = outcome.round - (not any(each.counts for each in outcome.reports))
            return outcome

    def _round(self, report: Report, tensors: Tensors) -> Outcome:
        begun, spent_s, attempts = time.monotonic(), 0.0, 0
        while True:
            attempts += 1
            try:
                outcome = self._attempt(report, tensors, self.timeout_s - spent_s)
            except _Again as again:
                why = str(again)
                spent_s += again.spent_s
            else:
                waited_s = time.monotonic() - begun - outcome.transfer_s
                return replace(outcome, waited_s=waited_s, attempts=attempts)
            if spent_s >= self.timeout_s:
                raise TimeoutError(
                    f"island {self.island}: round {report.round + 1} is not done after {self.timeout_s:g} s of waiting "
                    f"({why}); see whether the other islands and `paceline lighthouse` at {self.lighthouse} run, or "
                    "raise averaging.timeout_s."
                )
            time.sleep(_PAUSE_S)

    def _attempt(self, report: Report, tensors: Tensors, limit_s: float) -> Outcome:
        asked = time.monotonic()
        try:
            quorum = self._quorum(report, limit_s if report.counts else _LONG_S)
        except TimeoutError:
            raise _Again("others are alive and have not come, or the lighthouse is gone", limit_s) from None
        except _Closed:
            raise
        except RuntimeError as error:
            self._find_again(asked + limit_s)
            raise _Again(f"lighthouse: {error}", time.monotonic() - asked + _PAUSE_S) from None
        spent_s = time.monotonic() - asked + _PAUSE_S if report.counts else 0.0
        reports = [_report_of(member) for member in quorum.participants]
        mine = [member.replica_id for member in quorum.participants].index(self._replica_id)
        if lacking := self._lacking(quorum.participants, reports, mine):
            raise _Again(lacking, spent_s)
        weights = [float(weight) for weight in self.weigh(reports)]
        self._others = [m.store_address for n, m in enumerate(quorum.participants) if n != mine]
        finished = max(each.round for each in reports) + (not is_no_round(reports))
        outcome = Outcome(None, reports, weights, finished, 0.0, 0.0, 0, 0)
        if not self._changes(reports):
            return outcome
        stall_s = min(_STALL_S, self.timeout_s)
        with self._connected(outcome, spent_s):
            group = self._meet(quorum, mine)
        begun = time.monotonic()
        inputs = tensors(reports) if callable(tensors) else tensors
        with self._connected(outcome, spent_s):
            results, num_bytes = weighted_mean(group, inputs, weights, mine, stall_s)
            # Once all have everything, nobody has to do it again: without this one might, when others had gone on.
            group.meet(stall_s)
        num_bytes = 2 * num_bytes * (len(reports) - 1) // len(reports)
        return replace(outcome, tensors=results, transfer_s=time.monotonic() - begun, bytes_sent=num_bytes)

    @contextmanager
    def _connected(self, outcome: Outcome, spent_s: float) -> Iterator[None]:
        """A part of an attempt that comes to nothing if any connection is lost."""
        try:
            yield
        except RuntimeError as error:
            if self._closed:
                raise
            # Less where in gloo's source it was, and its guesses.
            said = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).partition(". This is")[0]
        else:
            return
        self._failures += 1
        self._group = None  # closes its connections, so that the others' attempts end too
        why = f"with {len(outcome.reports)} islands: {said}"
        logger.warning("island %d: round %d is done again, it failed %s", self.island, outcome.round, why)
        raise _Again(why, max(spent_s, _PAUSE_S))

    def _quorum(self, report: Report, timeout_s: float) -> Any:
        """The islands that are there now, each with its report. All of them get the same answer."""
        answers = self._answers = queue.SimpleQueue()
        if self._closed:  # before the answers were replaced
            raise _Closed(f"island {self.island} has left the other islands")

        def ask() -> None:
            try:
                answers.put(
                    self._client.quorum(
                        replica_id=self._replica_id,
                        timeout=timedelta(seconds=timeout_s),
                        address=self._heart.address(),
                        store_address=self._store_address,
                        step=report.round,
                        world_size=1,
                        data=_data_of(report, self._failures),
                    )
                )
            except Exception as error:
                answers.put(error)

        # The call cannot be interrupted, and may take hours: an island that has just come waits for a whole round.
        threading.Thread(target=ask, name="paceline-quorum", daemon=True).start()
        waited_s, calls = 0.0, report.counts and math.isfinite(self.grace_s)
        while True:
            patience_s = min(_SAY_EVERY_S, self.grace_s - waited_s) if calls else _SAY_EVERY_S
            try:
                answer = answers.get(timeout=patience_s)
                break
            except queue.Empty:
                waited_s += patience_s
                if calls and waited_s >= self.grace_s - 1e-6:
                    calls = False
                    threading.Thread(target=self._call, args=(report.round,), name="paceline-call", daemon=True).start()
                logger.info("island %d: waiting for other islands, %.0f s so far", self.island, waited_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _find_again(self, deadline: float) -> None:
        """Wait until the lighthouse answers, and then until it has heard of the others, should it have been started
        anew: it would take whoever asks first for the only one.
        """
        while time.monotonic() < deadline and not self._closed:
            try:
                self._client.heartbeat(self._replica_id, timeout=timedelta(seconds=_CONNECT_S))
            except (RuntimeError, TimeoutError):
                time.sleep(_PAUSE_S)
            else:
                time.sleep(_SETTLE_S)
                return

    def _lacking(self, members: Sequence[Any], reports: Sequence[Report], mine: int) -> str | None:
        """Why there cannot be a round of these islands now.

        Raises:
            ValueError: because of this one, which will not change.
        """
        refused = refusals(reports)
        if mine in refused:
            # One that was killed as it waited, and has been started anew, may still be asking when it does.
            twins = {m.replica_id for m, r in zip(members, reports, strict=True) if r.island == self.island}
            twins.remove(self._replica_id)
            if not twins or twins & self._twins:
                raise ValueError(f"island {self.island} is refused: {refused[mine]}")
            self._twins |= twins
        if refused:
            return "; ".join(f"island {reports[i].island} is refused: {why}" for i, why in refused.items())
        if len(reports) < self.min_islands:
            return f"{len(reports)} of at least {self.min_islands} islands are there"
        hosts = [_split(member.store_address)[0] for member in members]
        loopback = [_is_loopback(host) for host in hosts]
        if any(loopback) and not all(loopback):
            near, far = reports[loopback.index(True)].island, reports[loopback.index(False)].island
            raise ValueError(
                f"island {near} reaches the lighthouse by a loopback address ({hosts[loopback.index(True)]}), where "
                f"island {far} ({hosts[loopback.index(False)]}) cannot reach it; give all islands the lighthouse's IP "
                "address in averaging.lighthouse."
            )
        return None

    def _changes(self, reports: Sequence[Report]) -> bool:
        if len(reports) == 1 or is_no_round(reports):
            return False
        if any(report.counts for report in reports):
            return True
        rounds = {report.round for report in reports}
        if len(rounds) == 1 and rounds != {0}:
            return False  # all have come back from checkpoints of the same round, and go on as they were
        if len({report.checksum.hex() for report in reports}) == 1:
            return False
        logger.warning(
            "islands %s have just started and differ in their parameters: all take those of island %d",
            [report.island for report in reports],
            min(report.island for report in reports),
        )
        return True

    def _meet(self, quorum: Any, mine: int) -> _Group:
        """The group of a quorum's islands, all of whom have been heard of. RuntimeError if one is not to be reached."""
        members = [(member.replica_id, member.data["failures"]) for member in quorum.participants]
        key = (quorum.quorum_id, *members)
        if self._group is None or self._group.key != key:
            self._group = None
            created = f"{quorum.created.seconds}.{quorum.created.nanos}"
            prefix = f"{quorum.quorum_id}/{created}/{sum(failures for _, failures in members)}"
            store = quorum.participants[0].store_address
            self._group = _Group(key, store, prefix, mine, len(members), self.address)
        self._group.meet(min(_CONNECT_S, self.timeout_s))
        return self._group


class _Group:
    """A gloo group of the islands of one quorum. Its connections are closed when it is dropped.

    DeepSpeed's groups are not concerned. torchft's own wrapper would bind to what the host's name resolves to, which is
    the wrong address where hosts are network namespaces, or have several networks.
    """

    def __init__(self, key: tuple[Any, ...], store: str, prefix: str, rank: int, size: int, address: str) -> None:
        self.key, self.size = key, size
        host, port = _split(store)
        timeout = timedelta(seconds=_CONNECT_S)
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        gloo: Any = dist.ProcessGroupGloo  # whose stubs are not complete
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timeout
        options._threads = IN_FLIGHT
        self._backend = gloo(dist.PrefixStore(f"paceline/{prefix}", client), rank, size, options)

    def sum(self, values: Tensor, timeout_s: float) -> Any:
        """Begin to sum over the islands, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timedelta(seconds=timeout_s)
        return self._backend.allreduce([values], options)

    def meet(self, timeout_s: float) -> None:
        """Until all have come here."""
        self.sum(torch.zeros(1), timeout_s).wait()


def weighted_mean(
    group: Any, tensors: Sequence[Tensor], weights: Sequence[float], mine: int, timeout_s: float
) -> tuple[list[Tensor], int]:
    """The weighted sum over islands of each tensor, in new tensors, and the bytes that were summed.

    Islands without weight contribute zeros, whatever they hold. With equal weights it is the sum divided by the number
    of islands, rounded twice; all islands get the same bits.
    """
    if odd := {str(t.dtype) for t in tensors if not t.is_floating_point()}:
        raise ValueError(f"tensors of {', '.join(sorted(odd))} have no average: leave them out.")
    largest = max(weights)
    total = sum(weight / largest for weight in weights)
    results = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    sources, sinks = [t.detach().reshape(-1) for t in tensors], [t.view(-1) for t in results]
    num_bytes = 0
    under_way: deque[tuple[Any, Tensor, list[tuple[int, int, int]]]] = deque()

    def finish() -> None:
        work, chunk, pieces = under_way.popleft()
        work.wait()
        if total != 1:
            chunk /= total
        for (index, start, end), values in zip(pieces, chunk.split([e - s for _, s, e in pieces]), strict=True):
            sinks[index][start:end] = values

    for dtype, pieces in _chunks(tensors):
        chunk = torch.zeros(sum(end - start for _, start, end in pieces), dtype=dtype)
        if weights[mine] > 0:
            torch.cat([sources[index][start:end].to(dtype) for index, start, end in pieces], out=chunk)
            if weights[mine] != largest:
                chunk *= weights[mine] / largest
        num_bytes += chunk.nbytes
        under_way.append((group.sum(chunk, timeout_s), chunk, pieces))
        if len(under_way) == IN_FLIGHT:
            finish()
    while under_way:
        finish()
    return results, num_bytes


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, list[tuple[int, int, int]]]]:
    """What is summed together, in order: (index, start, end) of elements, in the dtype they are summed in."""
    dtype, pieces, room = torch.float32, list[tuple[int, int, int]](), 0
    for index, tensor in enumerate(tensors):
        wanted = torch.promote_types(tensor.dtype, torch.float32)
        start = 0
        while start < tensor.numel():
            if pieces and (room == 0 or dtype != wanted):
                yield dtype, pieces
                pieces = []
            if not pieces:
                dtype, room = wanted, max(1, CHUNK_BYTES // wanted.itemsize)
            end = min(tensor.numel(), start + room)
            pieces.append((index, start, end))
            room -= end - start
            start = end
    if pieces:
        yield dtype, pieces


def _data_of(report: Report, failures: int) -> dict[str, Any]:
    """JSON has no infinities, and few of its readers all 64 bits."""
    exact = {"digest": str(report.digest), "checksum": report.checksum.hex(), "loss": report.loss.hex()}
    return {"report": asdict(report) | exact, "failures": failures}


def _report_of(member: Any) -> Report:
    try:
        told = member.data["report"]
        exact = {"digest": int(told["digest"])} | {name: float.fromhex(told[name]) for name in ("checksum", "loss")}
        return Report(**(told | exact))
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{member.replica_id} at the lighthouse is no island of this version of paceline; have the same version "
            "everywhere, and a lighthouse for each job."
        ) from None


def coordination() -> Any:
    """torchft's module, which writes a line for every message of its own unless told otherwise before its import."""
    before = os.environ.get("RUST_LOG")
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import torchft.coordination
    except ImportError as error:
        raise ImportError(f"averaging between islands needs torchft ({error}): pip install 'torchft==0.2.*'") from error
    finally:
        if before is None:
            del os.environ["RUST_LOG"]
    return torchft.coordination


def _own_address(lighthouse: str, host: str, port: int, timeout_s: float) -> str:
    """The address of this host that packets to the lighthouse come from. Hosts may share their name."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=timeout_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise _unreachable(lighthouse, error) from None
        time.sleep(_PAUSE_S)


def _unreachable(lighthouse: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"no lighthouse answers at {lighthouse} ({error}); run `paceline lighthouse` on a host that all islands reach, "
        "and give its address in averaging.lighthouse."
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'{address!r} is no address: give host:port, such as "node1:29510".')
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
