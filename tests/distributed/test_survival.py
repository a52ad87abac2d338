"""A job survives what happens to jobs (``benchmarks/survival.py``: many times over)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.survival import Begin, Job, Launched, survive
from support.accidents import Running


def ranks_job(arguments: list[str], log: str) -> None:
    """The job on this rank. Ends as the module does."""
    from paceline.launch.finetune import main
    from paceline.supervise.lifetime import end_process

    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    end_process(code)


class Forked:
    """The job without a launcher, and so without the imports of four processes."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.running = Running(ranks_job, 2, arguments, str(log))

    def poll(self) -> int | None:
        codes = [process.exitcode for process in self.running.ranks.processes]
        return None if None in codes else max(codes, key=abs)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        for process in self.running.ranks.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        code = self.poll()
        assert code is not None, f"it runs for {timeout:g} s"
        return code

    def ask(self) -> None:
        self.ranks()[0].send_signal(signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """The ranks, and what each has started: it leads a process group."""
        leaders = {process.pid for process in self.running.ranks.processes}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        leaders = {process.pid for process in self.running.ranks.processes}
        return [process for process in self.processes() if process.pid in leaders]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """The first accident happens to a job under the `deepspeed` command."""
    jobs: list[Job] = []

    def one(arguments: list[str], log: Path) -> Job:
        jobs.append((Launched if len(jobs) == 1 else Forked)(arguments, log))
        return jobs[-1]

    yield one
    for job in jobs:
        for process in job.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if isinstance(job, Forked):
            job.running.kill()


@pytest.mark.launcher
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system to fill it: runs as root")
def test_killed_stopped_and_out_of_disk(tmp_path: Path, begin: Begin) -> None:
    """`survive` raises unless the weights are those of an undisturbed run, and all processes end within the limit."""
    result = survive(["kill", "term", "disk"], 60, seed=3, folder=tmp_path, begin=begin)
    assert result["weights"] == "bitwise equal"
    assert max(result["resumed_from"]) > 0
