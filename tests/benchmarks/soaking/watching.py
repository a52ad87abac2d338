"""Memory, descriptors and threads of a job's processes while it trains, in a thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.soaking.flatness import medians, trend

EVERY_S = 0.5
POINTS = 12
"""Of the curve that the report shows."""

_KEYS = {"VmRSS:": "rss", "Threads:": "threads"}


class Watcher:
    """Samples ``processes`` (by name) until the end of the block, or until they have ended."""

    def __init__(self, processes: Mapping[str, psutil.Process], every_s: float = EVERY_S) -> None:
        self.pids = {name: process.pid for name, process in processes.items()}
        self.samples: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in self.pids}
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak-watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            for name, pid in self.pids.items():
                with contextlib.suppress(OSError, KeyError):
                    self.samples[name].append(_sample(pid))

    def findings(self) -> dict[str, Any]:
        """What of each process grew how much, and what grew too much."""
        processes, problems = {}, []
        for name, samples in self.samples.items():
            times = [sample[0] for sample in samples]
            rss, descriptors, threads = (trend(times, [sample[i] for sample in samples]) for i in (1, 2, 3))
            processes[name] = {
                "rss_mb": round(rss.level / 1e6, 1),
                "rss_growth_mb": round(rss.growth / 1e6, 2),
                "descriptors": round(descriptors.level),
                "descriptors_growth": round(descriptors.growth, 1),
                "threads": round(threads.level),
                "threads_growth": round(threads.growth, 1),
                "seconds": round(rss.seconds, 1),
                "rss_curve_mb": [round(value / 1e6, 1) for value in medians([sample[1] for sample in samples], POINTS)],
            }
            if rss.leaks_memory:
                problems.append(f"{name}: memory grew by {rss.growth / 1e6:.1f} MB in {rss.seconds:.0f} s")
            for what, counted in (("descriptors", descriptors), ("threads", threads)):
                if counted.leaks:
                    problems.append(f"{name}: {counted.growth:.1f} more {what} in {counted.seconds:.0f} s")
        judged = any(one["seconds"] >= 1 for one in processes.values())
        return {"processes": processes, "problems": problems} if judged else {"processes": {}, "problems": problems}


def _sample(pid: int) -> tuple[float, int, int, int]:
    """Time, resident bytes, descriptors, threads."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, *rest = line.split()
        if key in _KEYS:
            found[_KEYS[key]] = int(rest[0])
    return time.monotonic(), 1024 * found["rss"], len(os.listdir(f"/proc/{pid}/fd")), found["threads"]
