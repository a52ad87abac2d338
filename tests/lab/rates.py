"""Rates of hosts that change while a job runs: a trace is a list of changes, kept in a file, played by a thread."""

from __future__ import annotations

import csv
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LEVELS: tuple[float | None, ...] = (100, 200, 400, 1000, None)
"""Mbit/s that a preemption trace moves among: what other tenants leave of a host's network; None: all of it."""

_COLUMNS = ["time_s", "host", "mbit"]


@dataclass(frozen=True)
class Change:
    """From ``time_s`` on, ``host`` sends at most ``mbit`` Mbit/s; None: as fast as it can."""

    time_s: float
    host: int
    mbit: float | None


class Limited(Protocol):
    """What rates are played to: :class:`lab.hosts.Hosts`."""

    def set_rate(self, host: int, mbit: float | None) -> None: ...


def read_trace(file: Path) -> list[Change]:
    """The changes of a CSV file with the columns time_s, host, mbit (a number or ``off``), in order of time.

    Raises:
        ValueError: a line that is no change, by number.
    """
    with file.open(newline="") as lines:
        rows = csv.reader(lines)
        if (header := next(rows, None)) != _COLUMNS:
            raise ValueError(f"{file} starts with {header}: its first line must be {','.join(_COLUMNS)}")
        changes = []
        for row in rows:
            try:
                time_s, host, mbit = row
                change = Change(float(time_s), int(host), None if mbit == "off" else float(mbit))
            except ValueError:
                raise ValueError(f'{file}, line {rows.line_num}: {row} is not "time_s,host,mbit or off"') from None
            if changes and change.time_s < changes[-1].time_s:
                raise ValueError(f"{file}, line {rows.line_num}: {change.time_s} s is before the line above it")
            changes.append(change)
    return changes


def write_trace(file: Path, changes: Iterable[Change]) -> None:
    """Write what :func:`read_trace` reads."""
    with file.open("w", newline="") as lines:
        rows = csv.writer(lines, lineterminator="\n")
        rows.writerow(_COLUMNS)
        rows.writerows([f"{c.time_s:g}", c.host, "off" if c.mbit is None else f"{c.mbit:g}"] for c in changes)


def preemption_trace(
    num_hosts: int,
    duration_s: float = 600.0,
    seed: int = 0,
    hold_s: tuple[float, float] = (4.0, 16.0),
    levels: Sequence[float | None] = LEVELS,
) -> list[Change]:
    """A network shared with others: each host stays at one of ``levels`` for a while, then moves to any other one.

    Args:
        duration_s: no change comes later.
        seed: the same one gives the same trace on every machine.
        hold_s: shortest and longest stay.
    """
    changes = []
    for host in range(num_hosts):
        chance = random.Random(f"{seed} {host}")
        at, mbit = 0.0, chance.choice(levels)
        while at < duration_s:
            changes.append(Change(round(at, 2), host, mbit))
            at += chance.uniform(*hold_s)
            mbit = chance.choice([level for level in levels if level != mbit])
    return sorted(changes, key=lambda change: (change.time_s, change.host))


class Player:
    """Plays changes to ``hosts`` in a thread, from the moment that ``begin`` says so until the end of the block.

    Args:
        begin: asked every few milliseconds until it is true: the job has started. By default it is, at once.

    Raises:
        Exception: at the end of the block, what ``set_rate`` raised.
    """

    def __init__(self, hosts: Limited, changes: Sequence[Change], begin: Callable[[], bool] = lambda: True) -> None:
        self.hosts = hosts
        self.changes = changes
        self.num_played = 0
        self._begin = begin
        self._over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._play, name="rates", daemon=True)

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def join(self, timeout: float) -> None:
        """Wait until all changes have been played, or one could not be, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _play(self) -> None:
        try:
            while not self._begin():
                if self._over.wait(0.02):
                    return
            started = time.monotonic()
            for change in self.changes:
                if self._over.wait(max(0.0, started + change.time_s - time.monotonic())):
                    return
                self.hosts.set_rate(change.host, change.mbit)
                self.num_played += 1
        except Exception as error:  # shown by the thread that waits for this one
            self._error = error
