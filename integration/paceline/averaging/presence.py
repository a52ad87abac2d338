"""An island's presence at the lighthouse, which tells the islands of each other.

The lighthouse is torchft's (``paceline lighthouse``): each island sends heartbeats to it and asks it for a quorum,
which comes when all that are alive have asked; the reports travel with the question.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .addresses import bracketed, own_address, split, unreachable
from .rules import Report

logger = logging.getLogger("paceline")

CONNECT_S = 20.0
_HEARTBEAT_S = 0.5
_SETTLE_S = 4 * _HEARTBEAT_S
_PAUSE_S = 1.0
_SAY_EVERY_S = 60.0
_CALLED = "paceline/called/{}"
"""Key in the store of an island that is waited for, by the rounds that are finished."""


class Closed(RuntimeError):
    """This island has left the others."""


class Presence:
    """Keeps this island alive to the others, from here to :meth:`close`, whatever the Python threads do meanwhile.

    Args:
        lighthouse: host:port.
        island: this one's number.
        timeout_s: how long to try to reach the lighthouse, 30 s at most.

    Raises:
        ValueError: ``lighthouse`` is no address.
        ConnectionError: nothing answers there.

    Attributes:
        address: of this host, on the way to the lighthouse.
        id: that the lighthouse knows this island by.
    """

    def __init__(self, lighthouse: str, island: int, timeout_s: float) -> None:
        self.island, self.lighthouse = island, lighthouse
        host, port = split(lighthouse)
        connect_s = min(30.0, timeout_s)
        self.address = own_address(lighthouse, host, port, connect_s)
        self.id = f"island{island}:{uuid.uuid4()}"
        self._store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
        self._store_address = f"{bracketed(self.address)}:{self._store.port}"
        torchft = coordination()
        url = f"http://{bracketed(host)}:{port}"
        try:
            # Its RPCs, one of which ends this process, are for nobody else: it listens to this host alone.
            self._heart = torchft.ManagerServer(
                replica_id=self.id,
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
            self._client.heartbeat(self.id, timeout=timedelta(seconds=connect_s))
        except (RuntimeError, TimeoutError) as error:
            raise unreachable(lighthouse, error) from None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_closed = False

    def close(self) -> None:
        """Be dead to the others. A :meth:`quorum` under way on another thread raises :class:`Closed`."""
        self.is_closed = True
        self._heart.shutdown()
        self._answers.put(Closed(f"island {self.island} has left the other islands"))

    def quorum(
        self, report: Report, failures: int, timeout_s: float, *, called: Sequence[str] = (), grace_s: float = math.inf
    ) -> Any:
        """The islands that are there now, each with its report. All of them get the same answer.

        Args:
            failures: attempts of this island at a round that failed.
            called: stores of islands that are told, once this one has waited for ``grace_s``, that it does.

        Raises:
            TimeoutError, RuntimeError: the lighthouse's.
            Closed: :meth:`close` was called meanwhile.
        """
        answers = self._answers = queue.SimpleQueue()
        if self.is_closed:  # before the answers were replaced
            raise Closed(f"island {self.island} has left the other islands")

        def ask() -> None:
            try:
                answers.put(
                    self._client.quorum(
                        replica_id=self.id,
                        timeout=timedelta(seconds=timeout_s),
                        address=self._heart.address(),
                        store_address=self._store_address,
                        step=report.round,
                        world_size=1,
                        data=_data_of(report, failures),
                    )
                )
            except Exception as error:
                answers.put(error)

        # The call cannot be interrupted, and may take hours: an island that has just come waits for a whole round.
        threading.Thread(target=ask, name="paceline-quorum", daemon=True).start()
        waited_s, calls = 0.0, math.isfinite(grace_s)
        while True:
            patience_s = min(_SAY_EVERY_S, grace_s - waited_s) if calls else _SAY_EVERY_S
            try:
                answer = answers.get(timeout=patience_s)
                break
            except queue.Empty:
                waited_s += patience_s
                if calls and waited_s >= grace_s - 1e-6:
                    calls = False
                    arguments = (called, report.round, min(CONNECT_S, grace_s + 1))
                    threading.Thread(target=self._call, args=arguments, name="paceline-call", daemon=True).start()
                logger.info("island %d: waiting for other islands, %.0f s so far", self.island, waited_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def find_again(self, deadline: float) -> None:
        """Wait until the lighthouse answers, and then until it has heard of the others, should it have been started
        anew: it would take whoever asks first for the only one.
        """
        is_told = False
        while time.monotonic() < deadline and not self.is_closed:
            try:
                self._client.heartbeat(self.id, timeout=timedelta(seconds=CONNECT_S))
            except (RuntimeError, TimeoutError):
                if not is_told:
                    logger.warning(
                        "island %d: the lighthouse at %s does not answer, and the round waits for it: if it has ended, "
                        "start `paceline lighthouse` there again.",
                        *(self.island, self.lighthouse),
                    )
                    is_told = True
                time.sleep(_PAUSE_S)
            else:
                time.sleep(_SETTLE_S)
                return

    def is_called(self, finished: int) -> bool:
        """Whether others wait for this island, which has finished so many rounds, longer than their grace time."""
        return not self.is_closed and self._store.check([_CALLED.format(finished)])

    def _call(self, addresses: Sequence[str], finished: int, limit_s: float) -> None:
        """Tell islands that this one waits for them. Those that are gone do not answer."""
        for address in addresses:
            try:
                host, port = split(address)
                # A store that does not connect writes pages of C++ frames to stderr.
                socket.create_connection((host, port), timeout=limit_s).close()
                limit = timedelta(seconds=limit_s)
                store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
                store.set(_CALLED.format(finished), "")
            except (RuntimeError, OSError) as error:
                logger.info("island %d: %s does not hear that it is waited for (%s)", self.island, address, error)


def _data_of(report: Report, failures: int) -> dict[str, Any]:
    """JSON has no infinities, and few of its readers all 64 bits."""
    exact = {"digest": str(report.digest), "checksum": report.checksum.hex(), "loss": report.loss.hex()}
    return {"report": asdict(report) | exact, "failures": failures}


def report_of(member: Any) -> Report:
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
