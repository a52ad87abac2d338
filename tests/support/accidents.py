"""Jobs whose ranks have accidents: begun without waiting for them, and what they left when they have ended."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ranks as runner


@dataclass
class Ended:
    codes: list[int]
    outputs: list[str]
    left: list[int]
    """Process groups that still have a process long after their rank has ended."""

    @property
    def causes(self) -> list[str]:
        return [line for text in self.outputs for line in text.splitlines() if line.startswith("paceline: ")]


class Running:
    """As ``run_ranks``, but it does not wait, and ranks that fail are not helped to end."""

    def __init__(self, function: Any, world_size: int, *args: Any) -> None:
        runner._warm_up()
        self.world_size = world_size
        file = sys.modules[function.__module__].__file__
        call, call_args = pickle.dumps((function.__module__, file, function.__qualname__)), pickle.dumps((args, {}))
        environment = runner._environment(None) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runner.free_port())}
        environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks = runner._Ranks(Path(self.directory.name), True)
        for rank in range(world_size):
            self.ranks.start(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, call, call_args)

    def end(self, stopped: int | None = None, timeout: float = runner.PATIENCE_S) -> Ended:
        """Args: ``stopped`` stops itself; it is killed when it is the only one left, as a launcher would do."""
        ranks = self.ranks
        pids = [process.pid for process in ranks.processes]
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(ranks.processes):
            if rank != stopped:
                process.join(max(0.0, deadline - time.monotonic()))
        late = [r for r, process in enumerate(ranks.processes) if r != stopped and process.exitcode is None]
        assert not late, f"ranks {late} still run after {timeout:g} s:\n" + "\n".join(map(ranks.output, late))
        if stopped is not None:
            ranks.processes[stopped].kill()
            ranks.processes[stopped].join()
        codes = [process.exitcode for process in ranks.processes]
        outputs = [ranks.output(rank) for rank in range(self.world_size)]
        return Ended(codes, outputs, still_running(pids))

    def kill(self) -> None:
        self.ranks.kill()
        self.directory.cleanup()


def still_running(groups: list[int], patience_s: float = 120.0) -> list[int]:
    """Those of ``groups`` that keep a process. Whatever a rank has started ends shortly after it, not with it."""
    deadline = time.monotonic() + patience_s
    while (left := [group for group in groups if has_processes(group)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def accident(what: str) -> None:
    if what == "raises":
        raise MemoryError("no more of it")
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "spins":
        while True:
            pass
    if what == "hangs":
        time.sleep(10_000)
    if what == "exits":
        sys.exit(0)


def limit_from_here_on(limit_s: float) -> None:
    """On every rank: who makes no progress for so long from now on, hangs. What came before had as long as it took."""
    from paceline.supervise.first_cause import Limits
    from paceline.supervise.watch import WATCH

    WATCH._limits = Limits.of(limit_s)
    if WATCH._hub is not None:
        WATCH._hub._limits = WATCH._limits
