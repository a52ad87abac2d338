"""Rank 0's part of the watch: hear from all ranks, find the first cause, tell everyone.

Every rank keeps one connection to rank 0 beside the tensors' transport. The kernel closes it the moment a process ends,
however it ends, so that a killed rank is known at once on any backend. Messages are JSON, a line each.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

from .first_cause import Cause, Doing, Limits, Member, is_paused, judge, raised

PERIOD_S = 0.5


class Lines:
    """JSON messages over a connection. Writing is safe from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def write(self, message: dict[str, Any]) -> bool:
        """Whether it could be sent."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            return True
        return False

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the other side has closed. Call it when there is something.

        Raises:
            ValueError: what has arrived is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is an object")
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


class Hub:
    """Runs in a thread of rank 0."""

    def __init__(self, server: socket.socket, token: str, world_size: int, limits: Limits) -> None:
        self._server, self._token, self._world_size, self._limits = server, token, world_size, limits
        self.members: dict[int, Member] = {}
        self._lines: dict[int, Lines] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._over = False
        self._cause: Cause | None = None
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paceline-watch-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Rank 0 leaves in order; the others go on unwatched."""
        self._over = True
        self._thread.join(2.0)
        self._broadcast({"over": True})
        for lines in self._lines.values():
            lines.close()
        self._server.close()

    def forget(self) -> None:
        """Close this process's copies: it is a fork, and has no part in it."""
        for lines in self._lines.values():
            lines.close()
        self._server.close()

    def tell(self, cause: Cause) -> None:
        """Stop everybody for ``cause``, from any thread."""
        with self._telling:
            if self._cause is None:
                self._cause = cause
                self._broadcast({"cause": asdict(cause)})

    def _broadcast(self, message: dict[str, Any]) -> None:
        for rank in sorted(self._lines, reverse=True):  # rank 0, which may end this process when it hears, last
            if self.members[rank].lost_at_s is None:
                self._lines[rank].write(message)

    def _run(self) -> None:
        last_s = beat_s = paused_s = time.monotonic()
        while not self._over:
            events = self._selector.select(PERIOD_S / 2)
            now_s = time.monotonic()
            if now_s - last_s > 10 * PERIOD_S:  # this process was stopped: nobody could be heard
                for member in self.members.values():
                    member.heard_at_s += now_s - last_s
            last_s = now_s
            for key, _ in events:
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data, now_s)
            if now_s - beat_s >= PERIOD_S:
                beat_s = now_s
                self._broadcast({"gone": [r for r, m in self.members.items() if m.has_left or m.lost_at_s is not None]})
            if any(is_paused(member, now_s, self._limits) for member in self.members.values()):
                paused_s = now_s
            if self._cause is None and (cause := judge(self.members, now_s, self._limits, paused_s)):
                self.tell(cause)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            self._selector.register(connection, selectors.EVENT_READ, _Guest(Lines(connection)))

    def _hear(self, guest: _Guest, now_s: float) -> None:
        try:
            messages = guest.lines.read()
        except ValueError:
            messages = None
        if messages is None:
            self._selector.unregister(guest.lines.connection)
            if guest.rank is None:
                guest.lines.close()
            elif not self.members[guest.rank].has_left:
                self.members[guest.rank].lost_at_s = now_s
            return
        for message in messages:
            if guest.rank is not None:
                self._note(guest.rank, message, now_s)
            elif message.get("token") == self._token:
                guest.rank = rank = int(message["rank"])
                self.members[rank] = Member(now_s)
                self._lines[rank] = guest.lines
                if self._cause is not None:
                    guest.lines.write({"cause": asdict(self._cause)})

    def _note(self, rank: int, message: dict[str, Any], now_s: float) -> None:
        member = self.members[rank]
        member.heard_at_s = now_s
        if "doing" in message:
            member.doing = Doing(**message["doing"])
        if "left" in message:
            member.has_left = True
        if "cause" in message:
            self.tell(Cause(**message["cause"]))
        if "error" in message and member.failed_at_s is None:
            if message["may_follow"]:
                member.failed_at_s, member.error = now_s, message["error"]
            else:
                self.tell(raised(rank, member.doing, message["error"]))


class _Guest:
    """A connection, of a rank once it has said the token."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.rank: int | None = None
