"""Several islands on one machine, each a world of ranks of its own, and the lighthouse where they meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from ranks import RANK_ENVIRONMENT, run_ranks


class Island(NamedTuple):
    """``act(*args)`` on so many ranks."""

    act: Callable[..., Any]
    num_ranks: int
    args: tuple[Any, ...] = ()
    number: int | None = None
    """None: its place in the list."""


@contextmanager
def lighthouse(*flags: str) -> Iterator[str]:
    """Its host:port."""
    command = [sys.executable, "-m", "paceline.launch.cli", "lighthouse", "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run_islands(islands: Sequence[Island]) -> list[list[Any]]:
    """Results of each island's ranks. What an island raises is raised when all have ended."""
    with ThreadPoolExecutor(len(islands)) as pool:
        futures = []
        for place, island in enumerate(islands):
            number = place if island.number is None else island.number
            environment = {**RANK_ENVIRONMENT, "PACELINE_ISLAND": str(number)}
            futures.append(pool.submit(run_ranks, island.act, island.num_ranks, *island.args, env=environment))
    return [future.result() for future in futures]
