"""Memory that control groups leave this process: a container's limit, or that of a batch system's job.

What the machine has free tells nothing of them, and what takes more is killed without a word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

CGROUP = "/sys/fs/cgroup"


class _Version(NamedTuple):
    """Names of the files in a group's folder."""

    limit: str
    used: str
    files: str
    """Key of ``memory.stat``: what is used by files that may be dropped at once."""


_V2 = _Version("memory.max", "memory.current", "inactive_file")
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Limit(NamedTuple):
    """A group with a limit.

    Args:
        limit_bytes: of all its processes together.
        free_bytes: what they may still take.
    """

    limit_bytes: int
    free_bytes: int


def memory_limits(
    cgroup: str | os.PathLike[str] = CGROUP, own: str | os.PathLike[str] = "/proc/self/cgroup"
) -> Iterator[Limit]:
    """Those of the groups that this process is in, the innermost first.

    Args:
        cgroup: where the groups are mounted.
        own: lists the groups of this process.
    """
    root = Path(cgroup)
    places = {"": "/", "memory": "/"}  # in a container its own group is all that it sees
    with contextlib.suppress(OSError, ValueError):
        for line in Path(own).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            places |= dict.fromkeys({"", "memory"}.intersection(controllers.split(",")), path)
    for controller, base, version in (("", root, _V2), ("memory", root / "memory", _V1)):
        place = base / places[controller].strip("/")
        for folder in (place, *place.parents):
            if folder == base or base in folder.parents:
                yield from _limit_of(folder, version)


def container_room_bytes(cgroup: str | os.PathLike[str] = CGROUP) -> float:
    """Bytes that this process may take by all limits; infinite without one."""
    return min((limit.free_bytes for limit in memory_limits(cgroup)), default=inf)


def _limit_of(folder: Path, version: _Version) -> Iterator[Limit]:
    used = 0
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / version.limit).read_text())  # "max" for none
        with contextlib.suppress(OSError, ValueError):
            used = int((folder / version.used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used -= int(stat.get(version.files, 0))
        yield Limit(limit, min(max(limit - used, 0), limit))
