"""What happens to a job: ranks that are slowed down for a while, and accidents that end it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.soaking.job import Job

PULSE_S = 0.05


class Slowing:
    """Slows ranks of ``jobs()`` down at random moments, in a thread, until the end of the block.

    A rank stands still for a moment, or gets half of its time, or shares the cores with somebody else.
    """

    def __init__(self, jobs: Callable[[], list[Job]], seed: str, env: dict[str, str]) -> None:
        self.counts: Counter[str] = Counter()
        self._jobs, self._chance, self._env = jobs, random.Random(seed), env
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._slow, name="soak-slowing", daemon=True)

    def __enter__(self) -> Slowing:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No rank is held while the block runs."""
        with self._lock:
            yield

    def _slow(self) -> None:
        while not self._over.wait(self._chance.uniform(2.0, 8.0)):
            ranks = [rank for job in self._jobs() if job.step() for rank in job.ranks().values()]
            if not ranks:
                continue
            rank, how = self._chance.choice(ranks), self._chance.choice(["freeze", "half speed", "competition"])
            seconds = self._chance.uniform(0.3, 3.0) if how == "freeze" else self._chance.uniform(2.0, 6.0)
            self.counts[how] += 1
            if how == "competition":
                self._compete(seconds)
            else:
                self._hold(rank, seconds if how == "freeze" else PULSE_S, seconds)

    def _hold(self, rank: psutil.Process, pulse_s: float, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._over.is_set():
            with self._lock, contextlib.suppress(psutil.Error):
                rank.suspend()
                try:
                    time.sleep(pulse_s)
                finally:
                    rank.resume()
            time.sleep(pulse_s)

    def _compete(self, seconds: float) -> None:
        code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-S", "-c", code]
        process = subprocess.Popen(command, env={**os.environ, **self._env}, start_new_session=True)
        while process.poll() is None and not self._over.wait(0.1):
            pass
        process.kill()
        process.wait()


def cause(how: str, job: Job, victim: int, ballast: Path) -> None:
    """One of :data:`benchmarks.soaking.episodes.ACCIDENTS`."""
    number = victim % len(job.places)
    if how == "full disk":
        fill(ballast)
        return
    verb, _, target = how.partition(" ")
    chosen = signal.SIGKILL if verb == "kill" else signal.SIGTERM
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        rank = job.ranks().get(number)
        if target == "launcher" or rank is None:  # it is still starting
            job.launchers[number].send_signal(chosen)
        else:
            rank.send_signal(chosen)


def fill(ballast: Path) -> None:
    """Leave no room on its file system."""
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(b"\0" * 65536)
            file.flush()


@contextmanager
def small_disk(folder: Path, mib: int = 48) -> Iterator[Path]:
    """A file system of its own. Needs root."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
